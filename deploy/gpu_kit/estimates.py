"""What was expected before anything had run on a GPU, to be put beside what is measured (pure).

From a reading of the code and the data sheet of an H200 (4.8 TB/s), 2 us for a small kernel in a
graph; good for 30 % or so. On another GPU they say little.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.gpu_kit.rows import Row, latest

NUM_LAYERS = 37  # of the target that the kit makes
MS_PER_US = 1e-3


@dataclass(frozen=True, slots=True)
class Estimate:
    """One expectation, and where the measurement of it is found.

    low, high  between which it was expected; equal: one number was said
    factor     from the figure to the unit of the estimate
    """

    what: str
    unit: str
    low: float
    high: float
    step: str
    cell: str
    figure: str
    factor: float = 1.0


ESTIMATES = (
    Estimate(
        "memory, read and written in a copy", "TB/s", 4.8, 4.8, "models", "copy", "GB_s", 1e-3
    ),
    Estimate(
        *("target pass, 5 rows, 500 tokens", "ms", 5.2, 5.2),
        *("passes-target", "graphs 500|5 rows", "pass_ms"),
    ),
    Estimate(
        *("draft step (said of 24 layers; here 16)", "ms", 1.25, 1.25),
        *("passes-drafter", "graphs 500|1 row", "pass_ms"),
    ),
    Estimate(
        *("attention of a target pass, 512 slots", "ms", 0.26, 0.26),
        *("attention", "8b 5x512|default", "steady_us", NUM_LAYERS * MS_PER_US),
    ),
    Estimate(
        *("attention of a target pass, 32k slots", "ms", 5.0, 10.0),
        *("attention", "8b 5x32768|default", "steady_us", NUM_LAYERS * MS_PER_US),
    ),
    Estimate(
        *("the same, where keys are split (flex)", "ms", 1.0, 1.0),
        *("attention", "8b 5x32768|flex", "steady_us", NUM_LAYERS * MS_PER_US),
    ),
    Estimate(
        *("cuDNN's attention, first time in a shape", "ms", 400.0, 400.0),
        *("attention", "8b 5x512|cudnn", "first_ms"),
    ),
    Estimate("greedy choice, eager", "ms", 0.08, 0.08, "choice", "greedy|1 row", "eager_ms"),
    Estimate("sampled choice, eager", "ms", 0.2, 0.2, "choice", "T=0.8|1 row", "eager_ms"),
    Estimate(
        *("a row sorted on the host (top-p)", "ms", 27.0, 27.0),
        *("choice", "on the host, T=0.8 top-p=0.95|1 row", "eager_ms"),
    ),
    Estimate(
        *("plain decoding, a token", "ms", 5.6, 6.2),
        *("texts", "ar cuda:0 T=0.0", "ms_per_token"),
    ),
    Estimate(
        *("sync over plain decoding, K = 4", "x", 1.2, 1.2),
        *("texts", "sync cuda:0 T=0.0", "speedup"),
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """An estimate with its measurement; None: there is none."""

    estimate: Estimate
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over expected: 1 within the range that was expected."""
        one, value = self.estimate, self.measured
        if value is None:
            return None
        nearest = min(max(value, one.low), one.high)
        return value / nearest


def compare(rows: Iterable[Row]) -> list[Compared]:
    """Every estimate with what was measured of it."""
    figures = {
        (row.step, row.cell, name): value
        for row in latest(rows)
        for name, value in row.figures.items()
    }
    found = []
    for one in ESTIMATES:
        value = figures.get((one.step, one.cell, one.figure))
        is_number = isinstance(value, int | float)
        found.append(Compared(one, value * one.factor if is_number else None))  # type: ignore[operator]
    return found
