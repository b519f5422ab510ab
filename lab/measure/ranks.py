"""Record how a pair's drafter ranks what its target says, for `plan --trace`.

    python -m lab.measure.ranks PROMPTS --out FILE [--temperature T] [--target ...]

The target writes each text by itself, with the noise of a seed; then the drafter reads it, and
ranks at every position what may come next, with the same noise, as it would have while drafting.
Only counts: it may run on a busy machine. One JSON object a line (`rehearsal.acceptance.read`).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from coordinator.api.config import PairConfig
from coordinator.api.prompts import Tokenization
from engine.choice.coupling import choose, rank_scored
from engine.choice.sampling import Sampling
from engine.errors import EngineError
from engine.executor import Executor
from engine.layout.slots import SlotMap
from engine.loading import Engine, load_engine
from lab.experiments.prompt_sets import read
from proto.errors import ConfigurationError, SlipstreamError
from proto.system import check_writable
from rehearsal.acceptance import NUM_RANKS, Position, shares, written

CHUNK = 256
FIRST_SEED = 1000  # seed of the first text, as in an experiment; each further text has one more


def load(model: str, options: argparse.Namespace) -> Engine:
    """Load and return a model with room for one text."""
    return load_engine(
        model,
        revision=None,
        dtype=options.dtype,
        device=options.device,
        max_len=options.max_prompt_tokens + options.max_tokens,
        fixed_rows=None,
        warm_rows=(1,),
        say=lambda _: None,
    )


def text_of(
    target: Executor, prompt: Sequence[int], sampling: Sampling, seed: int, num_tokens: int
) -> list[int]:
    """Return the tokens that the target alone writes after a prompt, with this seed's noise."""
    text, slots = list(prompt), SlotMap[int](target.capacity)
    while len(text) < len(prompt) + num_tokens:
        missing = text[slots.prefix_len : slots.prefix_len + CHUNK]
        logits = target.run(slots.feed_prefix(missing), (len(missing) - 1,))
        if slots.prefix_len == len(text):
            text += choose(logits, sampling, seed, 0, (len(text),))
    return text[len(prompt) :]


def logits_after(
    executor: Executor, prompt: Sequence[int], said: Sequence[int], chunk: int = CHUNK
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


def positions_of(
    drafter: Engine, prompt: Sequence[int], said: Sequence[int], sampling: Sampling, seed: int
) -> Iterator[Position]:
    """Yield for each token of a text the drafter's rank of it and the scores of its best tokens."""
    for at, logits in logits_after(drafter.executor, prompt, said):
        tokens = [said[position - len(prompt)] for position in at]
        yield from ranked(drafter, logits, at, tokens, sampling, seed)


def record(options: argparse.Namespace) -> list[tuple[Position, ...]]:
    """Write and rank all texts; return the positions of each text.

    Raises ConfigurationError and other SlipstreamErrors, EngineError.
    """
    tokenization = Tokenization.of_model(options.target, None)
    if tokenization is None:
        raise ConfigurationError(f"{options.target} has no tokenizer.json")
    target, drafter = load(options.target, options), load(options.drafter, options)
    sampling, texts = Sampling(temperature=options.temperature), []
    for index, prompt in enumerate(read(options.prompts, options.num_prompts)):
        ids = tokenization.encode(prompt.turns[0])[: options.max_prompt_tokens]
        seed = FIRST_SEED + index
        said = text_of(target.executor, ids, sampling, seed, options.max_tokens)
        texts.append(tuple(positions_of(drafter, ids, said, sampling, seed)))
    return texts


def main() -> int:
    """Record the ranks and write the file; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.ranks", description=__doc__.splitlines()[0]
    )
    defaults = PairConfig()
    parser.add_argument(
        "prompts", type=Path, metavar="FILE", help="prompts: one per line, or JSON Lines"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--target", default=defaults.target, metavar="MODEL", help="folder, or name on the hub"
    )
    parser.add_argument(
        "--drafter", default=defaults.drafter, metavar="MODEL", help="folder, or name on the hub"
    )
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where both run")
    parser.add_argument(
        "--dtype", default=defaults.dtype, metavar="NAME", help="number type of both"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="NUMBER", help="0, the default: greedy"
    )
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="how many prompts (default: all)"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=256,
        metavar="N",
        help="longer prompts are cut here (default 256)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens of an answer (default 128)"
    )
    options = parser.parse_args()
    try:
        check_writable(options.out, "--out")
        texts = record(options)
        options.out.write_text("".join(written(text) + "\n" for text in texts), encoding="utf-8")
    except (OSError, ValueError, EngineError, SlipstreamError) as error:
        print(error, file=sys.stderr)
        return 1
    found = ", ".join(f"{share:.3f}" for share in shares(tuple(texts)))
    print(f"{len(texts)} texts of {options.max_tokens} tokens; by rank: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
