"""Times the choice of tokens over a large vocabulary: as the engine does it, and as a CUDA graph.

Both run the engine's own function until the tokens are on the host: launched kernel by kernel, or
recorded. The cells "on the host" time the choice if whole rows of logits were copied to the host.
"""

import sys
from collections.abc import Callable

import torch

from engine.choice.coupling import choose, rank_scored
from engine.choice.coupling_on_gpu import capture_on, choice_of, record_choices
from engine.choice.logit_graphs import Captures
from engine.choice.sampling import Sampling, candidates, scaled, to_host
from engine.device import torch_device
from engine.forward.graphs import recorder
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.measure.timing import typical

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
Run = Callable[[], object]


def measure(context: Context) -> None:
    """Measure every sampling setting with every number of rows.

    Raises ModelError if the device cannot be used.
    """
    device = torch_device(context.device)
    vocab = VOCAB_SMALL if context.is_small else VOCAB
    for num_rows in ROW_COUNTS_SMALL if context.is_small else ROW_COUNTS:
        generator = torch.Generator().manual_seed(num_rows)
        logits = (torch.randn(num_rows, vocab, generator=generator) * 3).to(device)
        rows = f"{num_rows} row{'s' * (num_rows > 1)}"
        for name, sampling in SETTINGS.items():
            _measure(context, f"{name}|{rows}", logits, sampling)
        _measure_ranks(context, f"4 best, T=0.8|{rows}", logits)
        _measure_host(context, f"on the host, T=0.8 top-p=0.95|{rows}", logits)


def _measure(context: Context, cell: str, logits: torch.Tensor, sampling: Sampling) -> None:
    """Time `choose` under one setting, eagerly and as a CUDA graph, and write the row."""
    if context.record.has(cell):
        return
    positions, device = range(POSITION, POSITION + len(logits)), logits.device

    def run() -> list[int]:
        return choose(logits, sampling, SEED, 0, positions)

    figures = {"eager_ms": typical(run, device, count=COUNT) * 1e3}
    if context.is_on_gpu:
        wanted = run()
        capture_on(device, Captures(recorder(device)))
        try:
            record_choices((choice_of(sampling, 1.0, None),), logits, (len(logits),))
            found = [run() for _ in range(2)]
            figures["captured_ms"] = typical(run, device, count=COUNT) * 1e3
        finally:
            capture_on(device, None)
        if any(tokens != wanted for tokens in found):
            context.record.failed(cell, "the recorded choice is of other tokens")
            return
    context.record.measured(cell, **figures)
    say(f"{cell}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


def _measure_ranks(context: Context, cell: str, logits: torch.Tensor) -> None:
    """Time the ranking of the 4 best tokens, as a drafter does it."""
    positions = range(POSITION, POSITION + len(logits))
    _measure_run(
        *(context, cell, logits),
        lambda: rank_scored(logits, SETTINGS["T=0.8"], SEED, 0, positions, 4),
    )


def _measure_host(context: Context, cell: str, logits: torch.Tensor) -> None:
    """Time the candidates of a top-p choice on the host, with the copy of the logits."""
    sampling = SETTINGS["T=0.8 top-p=0.95"]
    _measure_run(
        *(context, cell, logits),
        lambda: list(candidates(scaled(to_host(logits), sampling), sampling)),
    )


def _measure_run(context: Context, cell: str, logits: torch.Tensor, run: Run) -> None:
    """Time a function and write the row of a cell that has none yet."""
    if not context.record.has(cell):
        took_ms = typical(run, logits.device, count=COUNT) * 1e3
        context.record.measured(cell, eager_ms=took_ms)
        say(f"{cell}: {took_ms:.3f} ms")


if __name__ == "__main__":
    sys.exit(run_step(measure))
