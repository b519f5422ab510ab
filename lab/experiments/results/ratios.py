"""The speed-up of one arm over another, with confidence intervals (pure).

Theory of operation
-------------------
A machine's speed drifts, and prompts differ by more than arms do. So speeds are compared within a
*cell*, one prompt in one repetition, which both arms ran within the same minutes. The logarithms of
these ratios are averaged, and the geometric mean is reported: if the two arms are exchanged, the
result is its reciprocal.

The repetitions of a prompt say nothing new about other prompts. So the bootstrap resamples prompts,
each with the mean over its repetitions, and the interval says: another experiment, with *other
prompts of this kind* on this machine, would have its mean in it nineteen times of twenty. With
fewer than `MIN_PROMPTS` prompts the cells themselves are resampled, and the interval is about these
prompts alone.

The interval is the bootstrap's, bias-corrected and accelerated (BCa: Efron, 1987). For few units
(what is resampled) it is too narrow by itself, because it takes the spread of n units for that of
all. So its level is raised by as much as Student's t is wider than the normal (Hesterberg, 2015:
the expanded interval). Then 0.91 to 0.96 of the intervals of 5 to 20 units contain the true mean,
for normal and for exponential logarithms; of three units 0.7 and of two 0.5, whose intervals are
simply their extremes (`is_rough`).

Where prompts differ much that interval is wide, however quiet the machine is. So there is a second
interval, for *the same prompts again*: the repetitions are resampled within each prompt, their
distances from its mean made wider by sqrt(n / (n - 1)), since n values lie too close to their own
mean.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import DegenerateDataWarning, bootstrap, norm, t

MIN_PROMPTS = 5
NUM_RESAMPLES = 4000
LEVEL = 0.95
MAX_LEVEL = 0.9995  # NUM_RESAMPLES resamples do not support a higher level
SEED = 0
ALIKE = 1e-9  # logarithms that differ by less than this are equal

FloatArray = npt.NDArray[np.float64]


class Cell(NamedTuple):
    """Identifies what two arms are compared on: prompt, repetition and turn of a conversation."""

    prompt: int
    repetition: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speed-up of an arm over its baseline, with its confidence intervals.

    mean          geometric mean
    low, high     95 % interval of the mean; None for a single unit, whose spread is unknown
    again_low, again_high  95 % interval for the same prompts; None if a prompt has one repetition
    median        median of the ratios of all pairs
    num_pairs     (prompt, repetition) pairs that both arms have
    num_unpaired  pairs of the arm that its baseline lacks: they are in no figure here
    unit          what was resampled: prompts, or cells if there are few prompts
    num_units     how many units there are
    """

    mean: float
    low: float | None
    high: float | None
    again_low: float | None
    again_high: float | None
    median: float
    num_pairs: int
    num_unpaired: int
    unit: Literal["prompts", "measurements"]
    num_units: int

    @property
    def is_rough(self) -> bool:
        """Return True if there are too few units for a reliable interval."""
        return self.num_units < MIN_PROMPTS

    @property
    def words(self) -> str:
        """Return the mean and its interval as text."""
        limits = "" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})"
        return f"{self.mean:.2f}{limits}"

    @property
    def again_words(self) -> str:
        """Return the interval again_low to again_high as text; "" if there is none."""
        return "" if self.again_low is None else f"{self.again_low:.2f}-{self.again_high:.2f}"

    @property
    def half_width(self) -> float | None:
        """Return half the width of the interval divided by the mean; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.mean


def paired(own: Mapping[Cell, float], base: Mapping[Cell, float]) -> Ratio | None:
    """Return the ratio of the speeds (above 0, by cell) of two arms; None if no cell is in both."""
    turns: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cell, speed in own.items():
        if cell in base:
            turns[cell.prompt, cell.repetition].append(log(speed / base[cell]))
    if not turns:
        return None
    # The turns of a conversation are parts of one text: together they are one pair.
    pairs = {key: fmean(ratios) for key, ratios in turns.items()}
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for (prompt, _), ratio in pairs.items():
        by_prompt[prompt].append(ratio)
    prompts = [fmean(ratios) for ratios in by_prompt.values()]
    is_of_prompts = len(prompts) >= MIN_PROMPTS
    units = prompts if is_of_prompts else list(pairs.values())
    limits = interval(units)
    low, high = (None, None) if limits is None else map(exp, limits)
    same = interval_again(list(by_prompt.values()))
    again_low, again_high = (None, None) if same is None else map(exp, same)
    return Ratio(
        mean=exp(fmean(units)),
        low=low,
        high=high,
        again_low=again_low,
        again_high=again_high,
        median=exp(median(pairs.values())),
        num_pairs=len(pairs),
        num_unpaired=len({cell[:2] for cell in own} - pairs.keys()),
        unit="prompts" if is_of_prompts else "measurements",
        num_units=len(units),
    )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean; None for a single value. It is deterministic."""
    if len(values) < 2:
        return None
    if max(values) - min(values) < ALIKE:
        return values[0], values[0]
    data = (np.asarray(values),)
    level = min(MAX_LEVEL, _expanded(len(values)))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            # BCa has no answer if the values of its jackknife are equal; quantiles always have one.
            warnings.simplefilter("ignore", DegenerateDataWarning)
            found = bootstrap(
                data,
                np.mean,
                n_resamples=NUM_RESAMPLES,
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(SEED),
            ).confidence_interval
        if np.isfinite(found.low) and np.isfinite(found.high):
            return float(found.low), float(found.high)
    raise AssertionError("quantiles of finite numbers are finite")


def interval_again(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of group means, resampling only within the groups.

    Returns None if a group has a single value.
    """
    if not groups or min(map(len, groups)) < 2:
        return None
    samples = []
    for group in groups:
        values = np.asarray(group)
        samples.append(
            values.mean() + (values - values.mean()) * sqrt(len(group) / (len(group) - 1))
        )
    if max(float(np.ptp(sample)) for sample in samples) < ALIKE:
        middle = fmean(float(sample.mean()) for sample in samples)
        return middle, middle

    def mean_of_means(*drawn: FloatArray, axis: int = -1) -> FloatArray:
        means = [np.mean(sample, axis=axis) for sample in drawn]
        return np.asarray(np.mean(means, axis=0), dtype=np.float64)

    found = bootstrap(
        samples,
        mean_of_means,
        n_resamples=NUM_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def _expanded(num_units: int) -> float:
    """Return the bootstrap level whose interval for so few units has a coverage of LEVEL."""
    wide = sqrt(num_units / (num_units - 1)) * t.ppf((1 + LEVEL) / 2, num_units - 1)
    return float(2 * norm.cdf(wide) - 1)
