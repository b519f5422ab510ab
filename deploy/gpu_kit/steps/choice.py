"""The choice of tokens over a large vocabulary: as the engine does it, and as one CUDA graph.

Eager is the engine's own function until the tokens are on the host. Captured are the same operators
in a graph, keys and logits where the graph reads them: what a choice could cost that is part of the
pass's recording. On the host is what rules pay that bring whole rows there.
"""

import sys
from collections.abc import Callable

import torch

from deploy.gpu_kit.steps.context import Context, run_step, say
from deploy.gpu_kit.steps.timing import in_a_graph, typical
from engine.coupling import choose, rank_scored, row_keys
from engine.device import torch_device
from engine.device_choice import FACTORS, GOLDEN
from engine.sampling import Sampling, candidates, scaled, to_host

VOCAB, VOCAB_SMALL = 151_936, 4096
ROW_COUNTS, ROW_COUNTS_SMALL = (1, 5, 17), (1, 5)
SEED, POSITION = 7, 1000
COUNT = 30
SETTINGS = {
    "greedy": Sampling(),
    "T=0.8": Sampling(0.8),
    "T=0.8 top-p=0.95": Sampling(0.8, top_p=0.95),
    "T=0.8 top-k=50": Sampling(0.8, top_k=50),
}
CAPTURED = ("greedy", "T=0.8")  # whose operators stand below
Run = Callable[[], object]


def measure(context: Context) -> None:
    """Every setting at every number of rows."""
    device = torch_device(context.device)
    vocab = VOCAB_SMALL if context.is_small else VOCAB
    for num_rows in ROW_COUNTS_SMALL if context.is_small else ROW_COUNTS:
        generator = torch.Generator().manual_seed(num_rows)
        logits = (torch.randn(num_rows, vocab, generator=generator) * 3).to(device)
        rows = f"{num_rows} row{'s' * (num_rows > 1)}"
        for name, sampling in SETTINGS.items():
            _measure(context, f"{name}|{rows}", logits, sampling, is_captured=name in CAPTURED)
        _measure_ranks(context, f"4 best, T=0.8|{rows}", logits)
        _measure_host(context, f"on the host, T=0.8 top-p=0.95|{rows}", logits)


def _measure(
    context: Context, cell: str, logits: torch.Tensor, sampling: Sampling, *, is_captured: bool
) -> None:
    if context.record.has(cell):
        return
    positions = range(POSITION, POSITION + len(logits))
    figures = {}

    def eager() -> object:
        return choose(logits, sampling, SEED, 0, positions)

    figures["eager_ms"] = typical(eager, logits.device, count=COUNT) * 1e3
    if is_captured and context.is_on_gpu:
        keys = torch.tensor(
            [_signed(key) for key in row_keys(SEED, 0, positions)], device=logits.device
        )
        with torch.inference_mode():
            if operators(logits, sampling, keys).tolist() != eager():
                context.record.failed(cell, "the captured operators choose other tokens")
                return
            captured_s = in_a_graph(
                *(lambda: operators(logits, sampling, keys), logits.device), calls=1, count=COUNT
            )
        figures["captured_ms"] = captured_s * 1e3
    context.record.measured(cell, **figures)
    say(f"{cell}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


def _measure_ranks(context: Context, cell: str, logits: torch.Tensor) -> None:
    positions = range(POSITION, POSITION + len(logits))
    _measure_run(
        *(context, cell, logits),
        lambda: rank_scored(logits, SETTINGS["T=0.8"], SEED, 0, positions, 4),
    )


def _measure_host(context: Context, cell: str, logits: torch.Tensor) -> None:
    sampling = SETTINGS["T=0.8 top-p=0.95"]
    _measure_run(
        *(context, cell, logits),
        lambda: list(candidates(scaled(to_host(logits), sampling), sampling)),
    )


def _measure_run(context: Context, cell: str, logits: torch.Tensor, run: Run) -> None:
    if not context.record.has(cell):
        took_ms = typical(run, logits.device, count=COUNT) * 1e3
        context.record.measured(cell, eager_ms=took_ms)
        say(f"{cell}: {took_ms:.3f} ms")


def operators(logits: torch.Tensor, sampling: Sampling, keys: torch.Tensor) -> torch.Tensor:
    """The chosen token of each row [n] int64, all on the device: a check and the choice.

    logits [n, V] float32; keys [n] int64, of the rows' noise (`engine/coupling.py`)
    """
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    scores = logits
    if not sampling.is_greedy:
        scores = logits / torch.full((), sampling.temperature, device=logits.device)
        mixed = (ids + 1) * _signed(GOLDEN) + keys[:, None]
        for shift, factor in zip((30, 27), FACTORS, strict=True):
            mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
        bits = _shifted(mixed ^ _shifted(mixed, 31), 12)
        uniform = (bits.double() + 0.5) * 2.0**-52
        scores = scores - (-(-uniform).log1p()).log().float()
    best = scores.amax(dim=1, keepdim=True)
    return ids.masked_fill(scores != best, logits.shape[1]).amin(dim=1)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


if __name__ == "__main__":
    sys.exit(run_step(measure))
