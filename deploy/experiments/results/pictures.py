"""The pictures of an experiment's results, as PNG files in memory.

They are drawn of summaries, and show no figure that is not in them, but for the histograms.
`canvas.py` says how they look.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import fmean

from matplotlib.axes import Axes

from deploy.experiments.folder import Header
from deploy.experiments.results import canvas
from deploy.experiments.results.canvas import Dot, Look
from deploy.experiments.results.names import (
    AXES,
    baseline_words,
    clipped,
    family,
    series,
    shortened,
)
from deploy.experiments.results.ratios import Ratio
from deploy.experiments.results.summary import Summary, overall, sound
from deploy.experiments.rows import Row

ONE_PANEL = 6  # arms whose lines can be told apart in one panel
WIDE = 20.0  # largest value of an x axis in smallest ones from which on it is logarithmic
CROWDED = 0.05  # of an x axis: values that are closer have no ticks of their own
TOLERANCE = 0.1  # of a prediction
STROKES = ("-", "--", ":", "-.")
UNITS = {"link": " ms"}


@dataclass(frozen=True, slots=True)
class Material:
    """What the pictures are drawn of.

    rows   those that count, by arm
    whole  what they say, by arm, over all categories
    looks  by family
    base   what a speed-up of 1 is
    """

    header: Header
    rows: Mapping[str, Sequence[Row]]
    summaries: Sequence[Summary]
    whole: Mapping[str, Summary]
    families: Mapping[str, str]
    looks: Mapping[str, Look]
    base: str

    def look(self, arm: str) -> Look:
        """Its colour and mark."""
        return self.looks[self.families[arm]]

    @property
    def speedups(self) -> dict[str, Ratio]:
        """By arm, of those that are compared with another."""
        return {arm: one.speedup for arm, one in self.whole.items() if one.speedup is not None}


def draw_all(
    header: Header,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    predicted: Mapping[str, float] | None = None,
) -> dict[str, bytes]:
    """Every picture on which there is something to see, by the name of its file.

    predicted  tokens per second, by arm
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
        looks=canvas.looks(header.arms),
        base=clipped(baseline_words(header), 32),
    )
    with canvas.style():
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
    """Each arm over its baseline, in its interval."""
    dots = [
        Dot(arm, material.look(arm), ratio.mean, ratio.low, ratio.high, ratio.words)
        for arm, ratio in material.speedups.items()
    ][: canvas.MAX_ROWS]
    if not dots:
        return None
    figure = canvas.canvas(canvas.height_of(len(dots)) + 0.6)
    axes = figure.subplots()
    canvas.draw_rows(axes, dots)
    axes.set_xlabel(_told(f"times {material.base} (dashed)", len(dots), len(material.speedups)))
    return canvas.as_png(figure)


def along_x(material: Material) -> bytes | None:
    """Speed-up over the setting on the x axis, a line per policy and whatever else differs."""
    header, speedups = material.header, material.speedups
    lines = series(header, list(speedups))[: canvas.MAX_ROWS]
    values = list(dict.fromkeys(x for line in lines for x, _ in line.points))
    if len(values) < 2:
        return None
    figure = canvas.canvas(3.2)
    axes = figure.subplots()
    axes.axhline(1, color=canvas.BASE, linewidth=1.2, linestyle="--", label=material.base)
    places = _scaled(axes, values)
    num_drawn: Counter[str] = Counter()
    for line in lines:
        stroke = STROKES[num_drawn[line.family] % len(STROKES)]
        num_drawn[line.family] += 1
        points = {places[x]: speedups[arm] for x, arm in line.points}
        label = clipped(line.label, canvas.MAX_NAME)
        if all(isinstance(x, int | float) for x in values):
            look, unit = material.looks[line.family], UNITS.get(header.x, "")
            label = "\n".join((label, *_crossed(axes, points, look, unit)))
        _draw_line(axes, points, material.looks[line.family], stroke, label)
    axes.set_xlabel(AXES.get(header.x, header.x.replace("_", " ")))
    axes.set_ylabel(f"times {material.base}")
    canvas.legend_below(figure)
    return canvas.as_png(figure)


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
    axes: Axes, points: Mapping[float, Ratio], look: Look, stroke: str, label: str
) -> None:
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
    """Mark where a line goes through 1; returns what that means."""
    words = []
    is_log = axes.get_xscale() == "log"
    xs = [log(x) if is_log else x for x in points]
    for place, is_falling in crossings(xs, [ratio.mean for ratio in points.values()]):
        x = exp(place) if is_log else place
        axes.plot(x, 1, marker="o", markersize=12, fillstyle="none", color=look.colour, zorder=4)
        words.append(f"{'stops paying at' if is_falling else 'pays from'} {x:.2g}{unit}")
    return words


def crossings(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, bool]]:
    """Where straight lines from point to point go through 1, and whether they fall there."""
    return [
        (x + (next_x - x) * (1 - y) / (next_y - y), y >= 1)
        for (x, y), (next_x, next_y) in pairwise(zip(xs, ys, strict=True))
        if (y >= 1) != (next_y >= 1)
    ]


def categories(material: Material) -> bytes | None:
    """Speed-up by category, of the fastest arm of each family."""
    best: dict[str, str] = {}
    for arm, ratio in material.speedups.items():
        name = material.families[arm]
        if name not in best or ratio.mean > material.speedups[best[name]].mean:
            best[name] = arm
    arms = list(best.values())[: canvas.MAX_ROWS]
    found: dict[str, dict[str, Ratio]] = defaultdict(dict)
    for one in material.summaries:
        if one.category and one.arm in arms and one.speedup is not None:
            found[one.category][one.arm] = one.speedup
    if len(found) < 2:
        return None
    step, block = 0.16, 0.3 + 0.16 * len(arms)  # inches
    figure = canvas.canvas(block * len(found) + 0.6)
    axes = figure.subplots()
    axes.axvline(1, color=canvas.BASE, linewidth=1.2, linestyle="--", label=material.base)
    for number, (category, ratios) in enumerate(found.items()):
        canvas.write(axes, 0, number * block, category)
        for place, arm in enumerate(arms):
            if arm in ratios:
                ratio = ratios[arm]
                dot = Dot(arm, material.look(arm), ratio.mean, ratio.low, ratio.high, "")
                height = number * block + 0.17 + place * step
                canvas.draw_dot(axes, dot, height, size=5.5, is_named=not number)
    canvas.without_y(axes, top=-0.15, bottom=len(found) * block - 0.1)
    axes.set_xlabel(f"times {material.base} (dashed)")
    canvas.legend_below(figure)
    return canvas.as_png(figure)


def acceptance(material: Material) -> bytes | None:
    """How often each draft of a pass is accepted: in one panel, or one per family if arms are many.

    What peers tell is not by position.
    """
    every = {
        arm: one.drafts.by_position
        for arm, one in material.whole.items()
        if one.drafts is not None and one.drafts.by_position
    }
    if not every:
        return None
    shown = dict(list(every.items())[: canvas.MAX_ROWS])
    panels: dict[str, list[str]] = defaultdict(list)
    for arm in shown:
        panels[material.families[arm] if len(shown) > ONE_PANEL else ""].append(arm)
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = canvas.canvas(0.5 + (2.7 if num_columns == 1 else 1.8) * num_rows)
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
    canvas.counted(places[0], max(map(len, shown.values())))
    # A label of the whole figure would lie in the legend.
    for axes in grid[:, 0]:
        axes.set_ylabel("passes that accept it")
    for axes in places[len(panels) - num_columns : len(panels)]:
        axes.set_xlabel(_told("draft of a pass", len(shown), len(every)))
    canvas.legend_below(figure)
    return canvas.as_png(figure)


def _draw_positions(
    axes: Axes, shares: Sequence[float], look: Look, number: int, of: int, arm: str
) -> None:
    """Of several arms of a family the later ones are paler."""
    axes.plot(
        range(1, len(shares) + 1),
        shares,
        STROKES[number % len(STROKES)],
        color=look.colour,
        alpha=1 - 0.6 * number / max(of, ONE_PANEL),
        marker=canvas.MARKS[number] if of > 1 and number < len(canvas.MARKS) else look.mark,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label=clipped(shortened(arm), canvas.MAX_NAME + 4),
    )


def tokens_per_pass(material: Material) -> bytes | None:
    """How many tokens a pass brings, of the arms that draft: a panel each."""
    every: dict[str, list[int]] = {}
    for arm in material.whole:
        lengths = [one for row in material.rows.get(arm, ()) for one in row.accept_lengths]
        if lengths and max(lengths) > 1:
            every[arm] = lengths
    if not every:
        return None
    shown = dict(list(every.items())[: canvas.MAX_ROWS])
    num_columns = min(2, len(shown))
    num_rows = -(-len(shown) // num_columns)
    figure = canvas.canvas(0.5 + 1.45 * num_rows)
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
    canvas.counted(places[0], most)
    figure.supxlabel(_told("tokens of a target pass", len(shown), len(every)), fontsize=9.5)
    figure.supylabel("share of the passes", fontsize=9.5)
    return canvas.as_png(figure)


def compared(material: Material, predicted: Mapping[str, float]) -> bytes | None:
    """Predicted against measured tokens a second; below, by how much each prediction is off."""
    pairs = {
        arm: (one.tokens_per_second.median, predicted[arm])
        for arm, one in material.whole.items()
        if arm in predicted and one.tokens_per_second is not None
    }
    pairs = dict(list(pairs.items())[: canvas.MAX_ROWS])
    if not pairs:
        return None
    rows = canvas.height_of(len(pairs)) + 0.5
    figure = canvas.canvas(3.7 + rows)
    above, below = figure.subplots(2, 1, height_ratios=[3.7, rows])
    ends = (0.0, 1.08 * max(max(pair) for pair in pairs.values()))
    above.plot(ends, ends, color=canvas.BASE, linewidth=1, linestyle="--")
    near = [tuple(end * share for end in ends) for share in (1 - TOLERANCE, 1 + TOLERANCE)]
    above.fill_between(ends, *near, color=canvas.BASE, alpha=0.12, linewidth=0)
    dots = []
    for arm, (measured, expected) in pairs.items():
        look, off = material.look(arm), expected / measured
        above.plot(measured, expected, look.mark, color=look.colour, markeredgecolor="white")
        dots.append(Dot(arm, look, off, None, None, f"{expected:.1f} / {measured:.1f}"))
    above.set(xlim=ends, ylim=ends, aspect="equal")
    above.set(xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    for edge in (1 - TOLERANCE, 1 + TOLERANCE):
        below.axvline(edge, color=canvas.BASE, linewidth=1, linestyle=":", zorder=1)
    canvas.draw_rows(below, dots)
    values = [dot.value for dot in dots]
    below.set_xlim(min(0.78, *values), max(1.22, *values))
    below.set_xlabel(f"predicted / measured; dotted: {TOLERANCE:.0%} off")
    return canvas.as_png(figure)


def _told(words: str, num_shown: int, num_all: int) -> str:
    """What an axis shows, and what is left out of it."""
    return words if num_shown == num_all else f"{words}; the first {num_shown} of {num_all} arms"
