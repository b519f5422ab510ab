"""Draws the pictures of an experiment's results, as PNG files in memory.

Everything that is drawn comes from the summaries, except for the histograms (from the rows).
"""

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.experiments.folder import ArmRecord, Header
from lab.experiments.results.ratios import Ratio
from lab.experiments.results.summary import Summary, overall, sound
from lab.experiments.results.words import AXES, baseline_words, clipped, family, series, shortened
from lab.experiments.rows import Row
from proto.policies import POLICIES

# -- canvas ----------------------------------------------------------------------------------------

# The style of the pictures: readable on a phone held upright, with the same colours in all.
#
# A picture is 4.2 inches wide and is shown 350 to 600 pixels wide, so 9 points are about 10 pixels
# at the least. Names of arms are long, so they are written above their row, over the whole width.

WIDTH = 4.2  # inches
DPI = 240
ROW = 0.42  # inches: height of a row with its name above
LINE = 0.2  # inches: height of a line of a legend
FEW, HALF = 4, 20  # most lines of a one-column legend; longest name that allows two columns
MAX_NAME = 38  # most characters of a name above a row
MAX_ROWS = 40  # most rows of a picture; with more it could not be read
BASE = "#555555"  # colour of the baseline
# Safe for colour-blind readers (after Okabe and Ito), and each with its own mark: auto, plain
# decoding in grey, and the other policies in the order of their table.
COLOURS = ("#7b3fa0", BASE, "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00")
PEER_COLOURS = ("#8c6d31", "#637939", "#843c39", "#31a3a3", "#393b79", "#b5a300")
MARKS = ("o", "P", "s", "v", "D", "^", "X", "d")
PEER_MARKS = ("<", ">", "p", "h", "8", "*")
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3,
}


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker of an arm, which are those of its family (policy or peer)."""

    colour: str
    mark: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A row of a picture: a value with its interval.

    words  text at the right end of the row
    """

    name: str
    look: Look
    value: float
    low: float | None
    high: float | None
    words: str


def looks(arms: Iterable[ArmRecord]) -> dict[str, Look]:
    """Return the look of each family; a policy has the same look in every experiment."""
    found: dict[str, Look] = {
        name: Look(colour, mark)
        for name, colour, mark in zip(POLICIES, COLOURS, MARKS, strict=True)
    }
    others = [name for name in dict.fromkeys(map(family, arms)) if name not in found]
    for number, name in enumerate(others):
        place = number % len(PEER_COLOURS)
        found[name] = Look(PEER_COLOURS[place], PEER_MARKS[place])
    return found


@contextmanager
def style() -> Iterator[None]:
    """Set the fonts and line styles for everything that is drawn inside the `with` block."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def canvas(height: float) -> Figure:
    """Return an empty figure of this height (inches) and the usual width."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def as_png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file, which depend on neither time nor machine."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def height_of(num_rows: int) -> float:
    """Return the height in inches of `num_rows` rows of `draw_rows`."""
    return ROW * num_rows


def draw_rows(axes: Axes, dots: Sequence[Dot], *, base: float = 1.0) -> None:
    """Draw one row for each dot, top to bottom, and a dashed vertical line at `base`."""
    axes.axvline(base, color=BASE, linewidth=1.2, linestyle="--", zorder=1)
    for row, dot in enumerate(dots):
        draw_dot(axes, dot, row)
        write(axes, 0, row - 0.38, clipped(shortened(dot.name), MAX_NAME))
        write(axes, 1, row - 0.38, dot.words)
    without_y(axes, top=-0.75, bottom=len(dots) - 0.6)


def draw_dot(
    axes: Axes, dot: Dot, height: float, *, size: float = 6.5, is_named: bool = False
) -> None:
    """Draw a value and its interval at this height; `is_named` adds it to the legend."""
    if dot.low is not None and dot.high is not None:
        ends = (dot.low, dot.high)
        axes.plot(ends, (height, height), color=dot.look.colour, linewidth=2.2, alpha=0.5)
    axes.plot(
        dot.value,
        height,
        marker=dot.look.mark,
        markersize=size,
        color=dot.look.colour,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linestyle="none",
        zorder=3,
        label=clipped(shortened(dot.name), MAX_NAME + 4) if is_named else None,
    )


def write(axes: Axes, side: Literal[0, 1], height: float, words: str) -> None:
    """Write text at the left (0) or right (1) end of a row, on top of the lines there."""
    axes.text(
        side,
        height,
        words,
        transform=axes.get_yaxis_transform(),
        ha="right" if side else "left",
        va="center",
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        zorder=2,
    )


def without_y(axes: Axes, *, top: float, bottom: float) -> None:
    """Remove the y axis, since each row has its name, and set its limits."""
    axes.set_ylim(bottom, top)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.05)


def counted(axes: Axes, most: int) -> None:
    """Set the axes for shares (y, in %) over counts from 1 to `most` (x)."""
    axes.set_xticks(range(1, most + 1, 1 + (most - 1) // 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def legend_below(figure: Figure) -> None:
    """Add a legend below the picture, and make the picture taller by the height of the legend."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    num_lines = sum(1 + label.count("\n") for label in handles)
    num_columns = 2 if num_lines > FEW and max(map(len, handles)) <= HALF else 1
    height = figure.get_figheight() + LINE * -(-num_lines // num_columns) + 0.1
    figure.set_size_inches(WIDTH, height)
    figure.legend(
        handles=list(handles.values()),
        labels=list(handles),
        loc="outside lower left",
        ncols=num_columns,
    )


# -- pictures --------------------------------------------------------------------------------------

ONE_PANEL = 6  # most arms whose lines can be distinguished in one panel
WIDE = 20.0  # ratio of largest to smallest x from which on the x axis is logarithmic
CROWDED = 0.05  # share of the x axis: if values are closer together, they get no own ticks
TOLERANCE = 0.1  # relative error of a prediction that is still good
STROKES = ("-", "--", ":", "-.")
UNITS = {"link": " ms"}


@dataclass(frozen=True, slots=True)
class Material:
    """What all pictures of an experiment are drawn from.

    rows       rows that are not void, by arm
    summaries  all summaries, those of single categories included
    whole      summaries over all categories, by arm
    families   family (policy or peer) of each arm
    looks      colour and marker, by family
    base       words for what a speed-up of 1 means
    """

    header: Header
    rows: Mapping[str, Sequence[Row]]
    summaries: Sequence[Summary]
    whole: Mapping[str, Summary]
    families: Mapping[str, str]
    looks: Mapping[str, Look]
    base: str

    def look(self, arm: str) -> Look:
        """Return the colour and marker of an arm."""
        return self.looks[self.families[arm]]

    @property
    def speedups(self) -> dict[str, Ratio]:
        """Return the speed-up of each arm that has one, by name of the arm."""
        return {arm: one.speedup for arm, one in self.whole.items() if one.speedup is not None}


def draw_all(
    header: Header,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    predicted: Mapping[str, float] | None = None,
) -> dict[str, bytes]:
    """Draw every picture for which there is data; return PNG files by file name.

    predicted  predicted tokens per second, by arm
    """
    by_arm: dict[str, list[Row]] = defaultdict(list)
    for row in sound([row for row in rows if row.stage == "main"]):
        by_arm[row.arm].append(row)
    material = Material(
        header,
        by_arm,
        summaries,
        whole={one.arm: one for one in overall(summaries)},
        families={arm.name: family(arm) for arm in header.arms},
        looks=looks(header.arms),
        base=clipped(baseline_words(header), 32),
    )
    with style():
        found = {
            "speedup.png": speedup(material),
            "along_x.png": along_x(material),
            "categories.png": categories(material),
            "acceptance.png": acceptance(material),
            "tokens_per_pass.png": tokens_per_pass(material),
            "predicted.png": compared(material, predicted or {}),
        }
    return {name: picture for name, picture in found.items() if picture is not None}


def speedup(material: Material) -> bytes | None:
    """Draw the speed-up of each arm over its baseline with its interval; None if there is none."""
    dots = [
        Dot(arm, material.look(arm), ratio.mean, ratio.low, ratio.high, ratio.words)
        for arm, ratio in material.speedups.items()
    ][:MAX_ROWS]
    if not dots:
        return None
    figure = canvas(height_of(len(dots)) + 0.6)
    axes = figure.subplots()
    draw_rows(axes, dots)
    axes.set_xlabel(_told(f"times {material.base} (dashed)", len(dots), len(material.speedups)))
    return as_png(figure)


def along_x(material: Material) -> bytes | None:
    """Draw speed-up over the setting on the x axis, one line per policy; None for < 2 values.

    Arms that differ in other settings too have a line each.
    """
    header, speedups = material.header, material.speedups
    lines = series(header, list(speedups))[:MAX_ROWS]
    values = list(dict.fromkeys(x for line in lines for x, _ in line.points))
    if len(values) < 2:
        return None
    figure = canvas(3.2)
    axes = figure.subplots()
    axes.axhline(1, color=BASE, linewidth=1.2, linestyle="--", label=material.base)
    places = _scaled(axes, values)
    num_drawn: Counter[str] = Counter()
    for line in lines:
        stroke = STROKES[num_drawn[line.family] % len(STROKES)]
        num_drawn[line.family] += 1
        points = {places[x]: speedups[arm] for x, arm in line.points}
        label = clipped(line.label, MAX_NAME)
        if all(isinstance(x, int | float) for x in values):
            look, unit = material.looks[line.family], UNITS.get(header.x, "")
            label = "\n".join((label, *_crossed(axes, points, look, unit)))
        _draw_line(axes, points, material.looks[line.family], stroke, label)
    axes.set_xlabel(AXES.get(header.x, header.x.replace("_", " ")))
    axes.set_ylabel(f"times {material.base}")
    legend_below(figure)
    return as_png(figure)


def _scaled(axes: Axes, values: Sequence[float | str]) -> dict[float | str, float]:
    """Prepare the x axis; return the position of each value on it."""
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
    axes: Axes, points: Mapping[float, Ratio], look: Look, stroke: str, label: str
) -> None:
    """Draw the line of one series with its band of intervals."""
    xs, means = list(points), [ratio.mean for ratio in points.values()]
    axes.plot(
        xs,
        means,
        stroke,
        color=look.colour,
        marker=look.mark,
        markersize=6,
        markeredgecolor="white",
        label=label,
    )
    low = [ratio.mean if ratio.low is None else ratio.low for ratio in points.values()]
    high = [ratio.mean if ratio.high is None else ratio.high for ratio in points.values()]
    axes.fill_between(xs, low, high, color=look.colour, alpha=0.13, linewidth=0)


def _crossed(axes: Axes, points: Mapping[float, Ratio], look: Look, unit: str) -> list[str]:
    """Mark where a line crosses 1; return words for the legend, such as "pays from 3 ms"."""
    words = []
    is_log = axes.get_xscale() == "log"
    xs = [log(x) if is_log else x for x in points]
    for place, is_falling in crossings(xs, [ratio.mean for ratio in points.values()]):
        x = exp(place) if is_log else place
        axes.plot(x, 1, marker="o", markersize=12, fillstyle="none", color=look.colour, zorder=4)
        words.append(f"{'stops paying at' if is_falling else 'pays from'} {x:.2g}{unit}")
    return words


def crossings(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, bool]]:
    """Return for each crossing of y = 1 its x (linear interpolation) and True if the line falls."""
    return [
        (x + (next_x - x) * (1 - y) / (next_y - y), y >= 1)
        for (x, y), (next_x, next_y) in pairwise(zip(xs, ys, strict=True))
        if (y >= 1) != (next_y >= 1)
    ]


def categories(material: Material) -> bytes | None:
    """Draw speed-up by category, for the fastest arm of each family; None for < 2 categories."""
    best: dict[str, str] = {}
    for arm, ratio in material.speedups.items():
        name = material.families[arm]
        if name not in best or ratio.mean > material.speedups[best[name]].mean:
            best[name] = arm
    arms = list(best.values())[:MAX_ROWS]
    found: dict[str, dict[str, Ratio]] = defaultdict(dict)
    for one in material.summaries:
        if one.category and one.arm in arms and one.speedup is not None:
            found[one.category][one.arm] = one.speedup
    if len(found) < 2:
        return None
    step, block = 0.16, 0.3 + 0.16 * len(arms)  # inches
    figure = canvas(block * len(found) + 0.6)
    axes = figure.subplots()
    axes.axvline(1, color=BASE, linewidth=1.2, linestyle="--", label=material.base)
    for number, (category, ratios) in enumerate(found.items()):
        write(axes, 0, number * block, category)
        for place, arm in enumerate(arms):
            if arm in ratios:
                ratio = ratios[arm]
                dot = Dot(arm, material.look(arm), ratio.mean, ratio.low, ratio.high, "")
                height = number * block + 0.17 + place * step
                draw_dot(axes, dot, height, size=5.5, is_named=not number)
    without_y(axes, top=-0.15, bottom=len(found) * block - 0.1)
    axes.set_xlabel(f"times {material.base} (dashed)")
    legend_below(figure)
    return as_png(figure)


def acceptance(material: Material) -> bytes | None:
    """Draw how often each draft of a pass is accepted, by its position; None if there are no data.

    Many arms get one panel per family. Peers do not report acceptance by position.
    """
    every = {
        arm: one.drafts.by_position
        for arm, one in material.whole.items()
        if one.drafts is not None and one.drafts.by_position
    }
    if not every:
        return None
    shown = dict(list(every.items())[:MAX_ROWS])
    panels: dict[str, list[str]] = defaultdict(list)
    for arm in shown:
        panels[material.families[arm] if len(shown) > ONE_PANEL else ""].append(arm)
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = canvas(0.5 + (2.7 if num_columns == 1 else 1.8) * num_rows)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    for axes, (title, arms) in zip(places, panels.items(), strict=False):
        axes.set_title(title)
        for number, arm in enumerate(arms):
            _draw_positions(axes, shown[arm], material.look(arm), number, len(arms), arm)
        axes.tick_params(labelbottom=True)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    places[0].set_ylim(0, 1.02)
    counted(places[0], max(map(len, shown.values())))
    # A label for the whole figure would overlap the legend.
    for axes in grid[:, 0]:
        axes.set_ylabel("passes that accept it")
    for axes in places[len(panels) - num_columns : len(panels)]:
        axes.set_xlabel(_told("draft of a pass", len(shown), len(every)))
    legend_below(figure)
    return as_png(figure)


def _draw_positions(
    axes: Axes, shares: Sequence[float], look: Look, number: int, of: int, arm: str
) -> None:
    """Draw the line of one arm; the later arms of a family are paler."""
    axes.plot(
        range(1, len(shares) + 1),
        shares,
        STROKES[number % len(STROKES)],
        color=look.colour,
        alpha=1 - 0.6 * number / max(of, ONE_PANEL),
        marker=MARKS[number] if of > 1 and number < len(MARKS) else look.mark,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label=clipped(shortened(arm), MAX_NAME + 4),
    )


def tokens_per_pass(material: Material) -> bytes | None:
    """Draw a histogram of the tokens per pass for each arm that drafts; None if there is none."""
    every: dict[str, list[int]] = {}
    for arm in material.whole:
        lengths = [one for row in material.rows.get(arm, ()) for one in row.accept_lengths]
        if lengths and max(lengths) > 1:
            every[arm] = lengths
    if not every:
        return None
    shown = dict(list(every.items())[:MAX_ROWS])
    num_columns = min(2, len(shown))
    num_rows = -(-len(shown) // num_columns)
    figure = canvas(0.5 + 1.45 * num_rows)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    most = max(max(lengths) for lengths in shown.values())
    for axes, (arm, lengths) in zip(places, shown.items(), strict=False):
        counts = Counter(lengths)
        shares = [counts[length] / len(lengths) for length in range(1, most + 1)]
        axes.bar(range(1, most + 1), shares, color=material.look(arm).colour, width=0.85)
        axes.axvline(fmean(lengths), color="black", linewidth=1, linestyle=":")
        name = clipped(shortened(arm), 26 if num_columns == 2 else 52)
        axes.set_title(f"{name}\nmean {fmean(lengths):.2f}", fontsize=8.5)
        axes.grid(visible=False, axis="x")
        axes.tick_params(labelbottom=True)
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    counted(places[0], most)
    figure.supxlabel(_told("tokens of a target pass", len(shown), len(every)), fontsize=9.5)
    figure.supylabel("share of the passes", fontsize=9.5)
    return as_png(figure)


def compared(material: Material, predicted: Mapping[str, float]) -> bytes | None:
    """Draw predicted over measured tokens per second, and the relative error of each prediction.

    Returns None if nothing was predicted.
    """
    pairs = {
        arm: (one.tokens_per_second.median, predicted[arm])
        for arm, one in material.whole.items()
        if arm in predicted and one.tokens_per_second is not None
    }
    pairs = dict(list(pairs.items())[:MAX_ROWS])
    if not pairs:
        return None
    rows = height_of(len(pairs)) + 0.5
    figure = canvas(3.7 + rows)
    above, below = figure.subplots(2, 1, height_ratios=[3.7, rows])
    ends = (0.0, 1.08 * max(max(pair) for pair in pairs.values()))
    above.plot(ends, ends, color=BASE, linewidth=1, linestyle="--")
    near = [tuple(end * share for end in ends) for share in (1 - TOLERANCE, 1 + TOLERANCE)]
    above.fill_between(ends, *near, color=BASE, alpha=0.12, linewidth=0)
    dots = []
    for arm, (measured, expected) in pairs.items():
        look, off = material.look(arm), expected / measured
        above.plot(measured, expected, look.mark, color=look.colour, markeredgecolor="white")
        dots.append(Dot(arm, look, off, None, None, f"{expected:.1f} / {measured:.1f}"))
    above.set(xlim=ends, ylim=ends, aspect="equal")
    above.set(xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    for edge in (1 - TOLERANCE, 1 + TOLERANCE):
        below.axvline(edge, color=BASE, linewidth=1, linestyle=":", zorder=1)
    draw_rows(below, dots)
    values = [dot.value for dot in dots]
    below.set_xlim(min(0.78, *values), max(1.22, *values))
    below.set_xlabel(f"predicted / measured; dotted: {TOLERANCE:.0%} off")
    return as_png(figure)


def _told(words: str, num_shown: int, num_all: int) -> str:
    """Return the label of an axis, with a note if only some of the arms are shown."""
    return words if num_shown == num_all else f"{words}; the first {num_shown} of {num_all} arms"
