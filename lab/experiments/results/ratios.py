"""How much faster one arm is than another, and how sure that is (pure).

Theory of operation
-------------------
A machine drifts, and prompts differ by more than arms do. So speeds are compared within a *cell*,
one prompt in one repetition, which both arms ran in the same minutes; the logarithms of these
ratios are averaged, and the geometric mean is what is told: it is one through itself when the two
arms change places.

The repetitions of a prompt are no news about prompts. So what is resampled are prompts, each with
the mean over its repetitions, and the interval says: another experiment, with *other prompts of
this kind* on this machine, would have a mean in it nineteen times of twenty. With fewer than
`MIN_PROMPTS` prompts the cells themselves are resampled, and the interval is about these prompts
alone.

The interval is the bootstrap's, bias-corrected and accelerated (BCa: Efron, 1987), which for few
units is too narrow by itself: it takes the spread of n units for that of all. Its level is raised
by as much as Student's t is wider than the normal (Hesterberg, 2015: the expanded interval). So
0.91 to 0.96 of the intervals of 5 to 20 units contain what they should, for normal and for
exponential logarithms; of three units 0.7 and of two 0.5, which are their extremes (`is_rough`).

Where prompts differ much that interval is wide, however quiet the machine is. So there is another,
of *the same prompts again*: the repetitions are resampled within each prompt, their distances from
its mean made wider by sqrt(n / (n - 1)), since n of them lie too close to a mean of their own.
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
MAX_LEVEL = 0.9995  # of so many resamples no more can be told
SEED = 0
ALIKE = 1e-9  # logarithms that differ by less are equal

FloatArray = npt.NDArray[np.float64]


class Cell(NamedTuple):
    """What both arms of a pair have run; of a conversation, one turn of it."""

    prompt: int
    repetition: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speeds of an arm in those of its baseline.

    mean          geometric
    low, high     its interval at 95 %; None: of one unit nothing is known of the spread
    again_low, again_high  its interval for the same prompts; None: a prompt has one repetition
    median        of the pairs
    num_pairs     cells that both have
    num_unpaired  cells of the arm that the baseline lacks: they are in no figure here
    unit          what was resampled: prompts, or cells where prompts are few
    num_units     how many
    """

    mean: float
    low: float | None
    high: float | None
    again_low: float | None
    again_high: float | None
    median: float
    num_pairs: int
    num_unpaired: int
    unit: Literal["prompts", "cells"]
    num_units: int

    @property
    def is_rough(self) -> bool:
        """Whether the units are too few for an interval that can be relied on."""
        return self.num_units < MIN_PROMPTS

    @property
    def words(self) -> str:
        """It and its interval."""
        limits = "" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})"
        return f"{self.mean:.2f}{limits}"

    @property
    def again_words(self) -> str:
        """Its interval for the same prompts; empty: there is none."""
        return "" if self.again_low is None else f"{self.again_low:.2f}-{self.again_high:.2f}"

    @property
    def half_width(self) -> float | None:
        """Of the interval, as a share of the mean."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.mean


def paired(own: Mapping[Cell, float], base: Mapping[Cell, float]) -> Ratio | None:
    """Of speeds by cell, which must be positive. None: no cell is in both."""
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
        unit="prompts" if is_of_prompts else "cells",
        num_units=len(units),
    )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean, at 95 %; None: of a single value. The same values have the same interval."""
    if len(values) < 2:
        return None
    if max(values) - min(values) < ALIKE:
        return values[0], values[0]
    data = (np.asarray(values),)
    level = min(MAX_LEVEL, _expanded(len(values)))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            # Where BCa has no answer (its jackknife is of equal values), quantiles have one.
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
    """Of the mean over groups of their means, at 95 %, if only what is in them is drawn anew.

    None: one of them has a single value.
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
    """The level at which the bootstrap of so few units covers as often as it should."""
    wide = sqrt(num_units / (num_units - 1)) * t.ppf((1 + LEVEL) / 2, num_units - 1)
    return float(2 * norm.cdf(wide) - 1)
