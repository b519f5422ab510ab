"""The picture of speed-ups over a setting, as data and drawn.

The data of a picture that is kept lie beside it as JSON, so that it can be drawn anew without
measuring anew.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation, Transform

from lab.experiments.folder import Header
from lab.experiments.results.canvas import (
    MAX_NAME,
    as_png,
    canvas,
    heading,
    legend_below,
    looks,
    style,
)
from lab.experiments.results.ratios import Ratio
from lab.experiments.results.words import (
    AXES,
    baseline_words,
    clipped,
    facts,
    series,
    shortened,
)
from lab.palette import PLAIN, Look
from lab.records import NO_OTHERS

MAX_LINES = 40  # beyond these a picture is no picture
WIDE = 20.0  # largest value of an x axis in smallest ones from which on it is logarithmic
CROWDED = 0.05  # of an x axis: values that are closer have no ticks of their own
STROKES = ("-", "--", ":", "-.")
UNITS = {"link": " ms"}
WHISKERS = "Whiskers: 95 % intervals. Overlapping ones show no difference."
ASIDE = "Points that belong to one value of the x axis stand side by side."
APART, SPREAD = 3.4, 14.0  # points between neighbouring lines, and between the outermost at most


class Point(NamedTuple):
    """A speed-up in its 95 % interval; `low` and `high` are None where there is none."""

    x: float | str
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the picture: the points of a policy (or peer) whose other settings are alike.

    family  decides the line's colour
    """

    __pydantic_config__ = NO_OTHERS
    label: str
    family: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """The data of a picture: speed-up over a setting, a line for each policy.

    facts  what was measured, what was simulated, and what was not measured
    x      name of the setting on the x axis
    unit   the setting's unit, with a space before it
    base   what a speed-up of 1 means
    """

    __pydantic_config__ = NO_OTHERS
    title: str
    facts: tuple[str, ...]
    x: str
    unit: str
    base: str
    lines: tuple[Line, ...]


def curves_of(header: Header, speedups: Mapping[str, Ratio]) -> Curves | None:
    """Return speed-ups over the setting on the x axis; None: it has fewer than two values."""
    lines = series(header, list(speedups))[:MAX_LINES]
    if len({x for line in lines for x, _ in line.points}) < 2:
        return None
    return Curves(
        title=header.title,
        facts=(*facts(header, speedups), WHISKERS, ASIDE),
        x=AXES.get(header.x, header.x.replace("_", " ")),
        unit=UNITS.get(header.x, ""),
        base=clipped(baseline_words(header), 32),
        lines=tuple(
            Line(
                line.label,
                line.family,
                tuple(
                    Point(x, speedups[arm].mean, speedups[arm].low, speedups[arm].high)
                    for x, arm in line.points
                ),
            )
            for line in lines
        ),
    )


def draw(curves: Curves, look_of: Mapping[str, Look] | None = None) -> bytes:
    """Return a PNG with a line for each policy (and other difference), with whiskers.

    look_of  by family; None: as its lines come
    """
    look_of = look_of or looks(line.family for line in curves.lines)
    values = list(dict.fromkeys(point.x for line in curves.lines for point in line.points))
    with style():
        figure = canvas(3.2)
        axes = figure.subplots()
        axes.axhline(1, color=PLAIN, linewidth=1.2, linestyle="--", label=curves.base)
        places = _scaled(axes, values)
        num_drawn: Counter[str] = Counter()
        for number, line in enumerate(curves.lines):
            stroke = STROKES[num_drawn[line.family] % len(STROKES)]
            num_drawn[line.family] += 1
            points = {places[point.x]: point for point in line.points}
            aside = _aside(axes, number, len(curves.lines))
            look = look_of[line.family]
            label = clipped(line.label, MAX_NAME)
            if all(isinstance(x, int | float) for x in values):
                label = "\n".join((label, *_crossed(axes, points, look, curves.unit, aside)))
            _draw_line(axes, points, look, stroke, label, aside)
            # What is moved aside does not count for the limits of the axes by itself.
            axes.update_datalim([(x, y) for x, one in points.items() for y in one[1:] if y])
        axes.autoscale_view()
        axes.set_xlabel(curves.x)
        axes.set_ylabel(f"times {curves.base}")
        legend_below(figure)
        heading(figure, curves.title, curves.facts)
        return as_png(figure)


def _aside(axes: Axes, number: int, of: int) -> Transform:
    """Return a transform that moves a line aside, so that whiskers do not cover each other."""
    step = min(APART, SPREAD / max(1, of - 1))
    points = (number - (of - 1) / 2) * step
    figure = axes.get_figure(root=True)
    assert figure is not None
    return axes.transData + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)


def _scaled(axes: Axes, values: Sequence[float | str]) -> dict[float | str, float]:
    """Prepare the x axis; returns where each value stands on it."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values):
        names = [clipped(shortened(str(value).rsplit("/", 1)[-1]), 15) for value in values]
        axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < 4 else 20)
        axes.margins(x=0.15)
        return {value: float(number) for number, value in enumerate(values)}
    if min(numbers) > 0 and max(numbers) / min(numbers) >= WIDE:
        axes.set_xscale("log")
        gaps = [log(b / a) for a, b in pairwise(sorted(numbers))]
    else:
        gaps = [b - a for a, b in pairwise(sorted(numbers))]
    if min(gaps) >= CROWDED * sum(gaps):
        axes.set_xticks(numbers, [f"{number:.4g}" for number in numbers])
        axes.set_xticks([], minor=True)
    return {value: float(value) for value in numbers}


def _draw_line(
    axes: Axes,
    points: Mapping[float, Point],
    look: Look,
    stroke: str,
    label: str,
    aside: Transform,
) -> None:
    for x, point in points.items():
        if point.low is not None and point.high is not None:
            ends = (point.low, point.high)
            axes.plot((x, x), ends, color=look.colour, linewidth=1.3, alpha=0.6, transform=aside)
    axes.plot(
        list(points),
        [point.mean for point in points.values()],
        stroke,
        color=look.colour,
        marker=look.mark,
        markersize=6,
        markeredgecolor="white",
        label=label,
        transform=aside,
    )


def _crossed(
    axes: Axes, points: Mapping[float, Point], look: Look, unit: str, aside: Transform
) -> list[str]:
    """Mark where a line goes through 1; returns what that means."""
    words = []
    is_log = axes.get_xscale() == "log"
    xs = [log(x) if is_log else x for x in points]
    for place, is_falling in crossings(xs, [point.mean for point in points.values()]):
        x = exp(place) if is_log else place
        ring: dict[str, Any] = {
            "marker": "o",
            "markersize": 12,
            "fillstyle": "none",
            "color": look.colour,
        }
        axes.plot(x, 1, zorder=4, transform=aside, **ring)
        words.append(f"{'stops paying at' if is_falling else 'pays from'} {x:.2g}{unit}")
    return words


def crossings(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, bool]]:
    """Return (x, goes down) of each point where the line through the points crosses y = 1."""
    return [
        (x + (next_x - x) * (1 - y) / (next_y - y), y >= 1)
        for (x, y), (next_x, next_y) in pairwise(zip(xs, ys, strict=True))
        if (y >= 1) != (next_y >= 1)
    ]
