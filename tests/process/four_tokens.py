"""Texts of four tokens whose chances are known exactly, and pairs that write many of them.

Top-k of three leaves 81 texts, whose chances are computed from the model itself. Every text has a
seed of its own. The target answers slowly: a text so short would else be over before the drafter
has said anything.
"""

from collections import Counter, deque
from pathlib import Path

import torch

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.stream import TokenStream
from engine.choice.sampling import Sampling, process
from tests.process.reference import Reference
from tests.tiny_models import make_model, make_noised

LENGTH, TOP_K, TEMPERATURE = 4, 3, 2.0
LEVEL = 1e-4  # of Pearson's chi-square test of one sample against the joint distribution
PROMPT = (11, 5, 77, 8)
SYNC = {"policy": "sync", "num_speculative_tokens": 3, "adaptive": False}
PIPELINED = {"policy": "pipelined", "num_speculative_tokens": 3, "adaptive": False}
Joint = dict[tuple[int, ...], float]


def make_pair(folder: Path) -> PairConfig:
    """A random pair that agrees often, but not always."""
    target = make_model("llama", folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.25)
    return PairConfig(
        target=str(target),
        drafter=str(drafter),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        simulate_target_ms=20.0,
    )


def joint_of(config: PairConfig, prompt: tuple[int, ...] = PROMPT) -> Joint:
    """The exact chance of every text."""
    model = Reference(Path(config.target)).model
    chances: Joint = {(): 1.0}
    for _ in range(LENGTH):
        longer: Joint = {}
        for text, chance in chances.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1:]
            p = process(logits, Sampling(TEMPERATURE, TOP_K)).double().softmax(dim=1)[0]
            for token in torch.nonzero(p)[:, 0].tolist():
                longer[(*text, token)] = chance * float(p[token])
        chances = longer
    assert len(chances) == TOP_K**LENGTH
    return chances


def sample(
    pair: Pair,
    speculation: SpeculationConfig,
    seeds: range,
    prompt: tuple[int, ...] = PROMPT,
) -> tuple[Counter[tuple[int, ...]], float, float]:
    """A text of each seed, the share of drafts that were accepted, and how many a text had.

    Several are written at once, as many as the nodes have room for.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    streams: deque[TokenStream] = deque()
    left = list(reversed(seeds))
    while left or streams:
        if left and len(streams) < pair.config.num_seqs:
            request = SamplingParams(
                temperature=TEMPERATURE,
                top_k=TOP_K,
                seed=left.pop(),
                max_tokens=LENGTH,
                ignore_eos=True,
            )
            streams.append(pair.generate(prompt, speculation, request)[0])
            continue
        stream = streams.popleft()
        counts[tuple(token for emit in stream for token in emit.tokens)] += 1
        assert stream.result is not None
        drafted += stream.result.metrics.num_draft_tokens
        accepted += stream.result.metrics.num_accepted_tokens
    return counts, accepted / max(1, drafted), drafted / len(seeds)
