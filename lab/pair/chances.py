"""Compute how often drafts are right on texts of the target: alpha, and the chance of each rank.

    python -m lab.pair.chances < REQUEST > ANSWER

Target and drafter read each text, which the target has written, and say at every position what may
come next. *Alpha* is sum over tokens of min(p, q), with p and q of the temperature at which the
text was written: the chance that the classical rules accept a draft (Leviathan et al., 2211.17192,
Corollary 3.6). The *rank* of the target's token among the drafter's choices, which are made with
the noise of the text's seed, says which of them the coupled rule would have accepted.

It runs in a process of its own, so that the memory of both models is free again. The request is one
line of JSON (`Request`), the answer one line for each text (`Judged`).
"""

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise

import torch

from engine.choice.coupling import rank_scored
from engine.choice.sampling import Sampling
from engine.errors import EngineError
from engine.executor import Executor
from engine.layout.slots import SlotMap
from engine.loading import Engine, load_engine
from lab.pair.requests import Judged, Request, Said
from lab.records import from_json
from node.process import end_with_parent
from rehearsal.acceptance import NUM_RANKS, Position

# Logits of one chunk of a text, at most: 64 MiB for each model in float32.
CHUNK_LOGITS = 1 << 24


def load(request: Request, name: str, dtype: str, revision: str | None) -> Engine:
    """Load and return a model with room for the longest text. Raises ModelError."""
    return load_engine(
        name,
        revision=revision,
        dtype=dtype,
        device=request.device,
        max_len=max(len(text.prompt) + len(text.said) for text in request.texts),
        fixed_rows=None,
        warm_rows=(1,),
        say=lambda _: None,
    )


def overlaps(p: torch.Tensor, q: torch.Tensor, temperature: float) -> list[float]:
    """Return sum over tokens of min(p, q) for each row; 1 or 0 where both are greedy.

    p, q  logits [n, V] and [n, W] of the target and the drafter; ids from min(V, W) on are never
          drafted, so they count as 0 in q
    """
    num_ids = min(p.shape[1], q.shape[1])
    if Sampling(temperature).is_greedy:
        same: list[float] = (p.argmax(1) == q[:, :num_ids].argmax(1)).double().tolist()
        return same
    target = (p.double() / temperature).softmax(1)[:, :num_ids]
    drafter = (q[:, :num_ids].double() / temperature).softmax(1)
    shared: list[float] = torch.minimum(target, drafter).sum(1).tolist()
    return shared


def logits_after(
    executor: Executor, prompt: Sequence[int], said: Sequence[int], chunk: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Read a text in chunks; yield (positions, logits [n, V]) of what the model would have said.

    Together the positions are those of `said`: a logit row is what the model makes of the tokens
    before its position. The next chunk may overwrite the logits.
    """
    text, slots = [*prompt, *said[:-1]], SlotMap[int](executor.capacity)
    ends = [*range(0, len(text), chunk), len(text)]
    for start, end in pairwise(ends):
        ask = range(max(0, len(prompt) - 1 - start), end - start)
        logits = executor.run(slots.feed_prefix(text[start:end]), ask)
        if ask:
            yield [start + row + 1 for row in ask], logits


def ranked(
    drafter: Engine,
    logits: torch.Tensor,
    at: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> Iterator[Position]:
    """Yield the drafter's rank of each token, and the scores of its best tokens.

    at      positions of the tokens in their text
    logits  of the drafter at these positions
    """
    ids, scores = rank_scored(
        logits, sampling, seed, 0, at, NUM_RANKS, num_valid=drafter.vocab_size
    )
    for token, found, row in zip(tokens, ids, scores, strict=True):
        yield Position(found.index(token) if token in found else None, tuple(row))


def judge(target: Engine, drafter: Engine, text: Said) -> Judged:
    """Return alpha and the drafter's choices at every position of a text."""
    num_ids = drafter.vocab_size
    chunk = max(1, min(256, CHUNK_LOGITS // target.loaded.vocab_size))
    sampling = Sampling(temperature=text.temperature)
    shared: list[float] = []
    ranks: list[int | None] = []
    scores: list[tuple[float, ...]] = []
    said = logits_after(target.executor, text.prompt, text.said, chunk)
    drafted = logits_after(drafter.executor, text.prompt, text.said, chunk)
    for (at, p), (_, q) in zip(said, drafted, strict=True):
        shared += overlaps(p.cpu(), q.cpu()[:, :num_ids], text.temperature)
        tokens = [text.said[position - len(text.prompt)] for position in at]
        for position in ranked(drafter, q, at, tokens, sampling, text.seed):
            ranks.append(position.rank)
            scores.append(tuple(round(score, 4) for score in position.scores))
    return Judged(tuple(shared), tuple(ranks), tuple(scores))


def answers(request: Request) -> Iterator[Judged]:
    """Load both models and yield the answer for each text. Raises EngineError."""
    target = load(request, request.target, request.target_dtype, request.target_revision)
    drafter = load(request, request.drafter, request.drafter_dtype, request.drafter_revision)
    for text in request.texts:
        yield judge(target, drafter, text)


def main() -> int:
    """Answer the request on standard input; return the exit status."""
    request = from_json(Request, sys.stdin.readline())
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        for found in answers(request):
            sys.stdout.write(json.dumps(asdict(found)) + "\n")
            sys.stdout.flush()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
