"""Draws the pictures of an experiment's results, as PNG files in memory.

Everything that is drawn comes from the summaries, except for the histograms (from the rows).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.experiments.folder import Header
from lab.experiments.results.canvas import (
    MAX_NAME,
    Dot,
    as_png,
    canvas,
    counted,
    draw_dot,
    draw_rows,
    heading,
    height_of,
    legend_below,
    looks,
    style,
    without_y,
    write,
)
from lab.experiments.results.curves import STROKES, WHISKERS, curves_of
from lab.experiments.results.curves import draw as draw_curves
from lab.experiments.results.ratios import Ratio
from lab.experiments.results.summary import Summary, overall, sound
from lab.experiments.results.words import (
    baseline_words,
    clipped,
    facts,
    family,
    shortened,
)
from lab.experiments.rows import Row
from lab.palette import PLAIN, POLICIES, Look

MAX_ROWS = 40  # beyond these a picture is no picture
ONE_PANEL = 6  # arms whose lines can be told apart in one panel
TOLERANCE = 0.1  # of a prediction
BEST = "Each policy's fastest arm; the table has all arms."
MARKS = tuple(look.mark for look in POLICIES.values())


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
        looks=looks(map(family, header.arms)),
        base=clipped(baseline_words(header), 32),
    )
    curves = curves_of(header, material.speedups)
    with style():
        found = {
            "speedup.png": speedup(material),
            "along_x.png": None if curves is None else draw_curves(curves, material.looks),
            "categories.png": categories(material),
            "acceptance.png": acceptance(material),
            "tokens_per_pass.png": tokens_per_pass(material),
            "predicted.png": compared(material, predicted or {}),
        }
    return {name: picture for name, picture in found.items() if picture is not None}


def speedup(material: Material) -> bytes | None:
    """Return a PNG of each arm's speed-up over its baseline, with intervals; None: no data."""
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
    return _finished(material, figure, "Speed-up of each arm", WHISKERS)


def categories(material: Material) -> bytes | None:
    """Return a PNG of the speed-up by category, for each family's best arm; None: one category."""
    arms = _best(material, material.speedups)[:MAX_ROWS]
    found: dict[str, dict[str, Ratio]] = defaultdict(dict)
    for one in material.summaries:
        if one.category and one.arm in arms and one.speedup is not None:
            found[one.category][one.arm] = one.speedup
    if len(found) < 2:
        return None
    step, block = 0.16, 0.3 + 0.16 * len(arms)  # inches
    figure = canvas(block * len(found) + 0.6)
    axes = figure.subplots()
    axes.axvline(1, color=PLAIN, linewidth=1.2, linestyle="--", label=material.base)
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
    return _finished(material, figure, "Speed-up by kind of prompt", WHISKERS)


def acceptance(material: Material) -> bytes | None:
    """Return a PNG of how often drafts are accepted, by position in the pass; None: no data.

    Many arms get one panel per family, with the arm that has the highest mean: its title names it,
    so there is no legend. Peers do not report acceptance by position.
    """
    every = {
        arm: one.drafts.by_position
        for arm, one in material.whole.items()
        if one.drafts is not None and one.drafts.by_position
    }
    if not every:
        return None
    panels: dict[str, list[str]] = {"": list(every)}
    if len(every) > ONE_PANEL:
        panels = {_short(arm): [arm] for arm in _best(material, every)[:MAX_ROWS]}
    shown = [arm for arms in panels.values() for arm in arms]
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = canvas(0.5 + (2.7 if num_columns == 1 else 1.8) * num_rows)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    for axes, (title, arms) in zip(places, panels.items(), strict=False):
        axes.set_title(title)
        for number, arm in enumerate(arms):
            _draw_positions(axes, every[arm], material.look(arm), number, len(arms), arm)
        axes.tick_params(labelbottom=True)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    places[0].set_ylim(0, 1.02)
    counted(places[0], max(len(every[arm]) for arm in shown))
    # A label for the whole figure would overlap the legend.
    for axes in grid[:, 0]:
        axes.set_ylabel("passes that accept it")
    for axes in places[len(panels) - num_columns : len(panels)]:
        axes.set_xlabel("draft of a pass")
    if len(panels) == 1:
        legend_below(figure)
    more = () if len(shown) == len(every) else (BEST,)
    return _finished(material, figure, "How often each draft of a pass is accepted", *more)


def _best(material: Material, arms: Iterable[str]) -> list[str]:
    """Return the arm with the highest mean speed-up of each family, in the order of `arms`."""
    best: dict[str, str] = {}
    for arm in arms:
        name = material.families[arm]
        if name not in best or _mean(material, arm) > _mean(material, best[name]):
            best[name] = arm
    return list(best.values())


def _mean(material: Material, arm: str) -> float:
    ratio = material.speedups.get(arm)
    return 0.0 if ratio is None else ratio.mean


def _short(arm: str) -> str:
    return clipped(shortened(arm), 26)


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
    """Return a PNG of histograms of tokens per pass, for arms that draft; None: no data."""
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
    figure.supxlabel(
        _told("tokens of a target pass (dotted: mean)", len(shown), len(every)), fontsize=9.5
    )
    figure.supylabel("share of the passes", fontsize=9.5)
    return _finished(material, figure, "Tokens that a pass of the target brings")


def compared(material: Material, predicted: Mapping[str, float]) -> bytes | None:
    """Return a PNG of predicted and measured tokens per second, with errors; None: no data.

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
    above.plot(ends, ends, color=PLAIN, linewidth=1, linestyle="--")
    near = [tuple(end * share for end in ends) for share in (1 - TOLERANCE, 1 + TOLERANCE)]
    above.fill_between(ends, *near, color=PLAIN, alpha=0.12, linewidth=0)
    dots = []
    for arm, (measured, expected) in pairs.items():
        look, off = material.look(arm), expected / measured
        above.plot(measured, expected, look.mark, color=look.colour, markeredgecolor="white")
        dots.append(Dot(arm, look, off, None, None, f"{expected:.1f} / {measured:.1f}"))
    above.set(xlim=ends, ylim=ends, aspect="equal")
    above.set(xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    for edge in (1 - TOLERANCE, 1 + TOLERANCE):
        below.axvline(edge, color=PLAIN, linewidth=1, linestyle=":", zorder=1)
    draw_rows(below, dots)
    values = [dot.value for dot in dots]
    below.set_xlim(min(0.78, *values), max(1.22, *values))
    below.set_xlabel(f"predicted / measured; dotted: {TOLERANCE:.0%} off")
    return _finished(material, figure, "Predicted and measured speed")


def _finished(material: Material, figure: Figure, title: str, *more: str) -> bytes:
    """Add the title and the facts (what was measured, what simulated); return the PNG."""
    heading(figure, title, [*facts(material.header, material.whole), *more])
    return as_png(figure)


def _told(words: str, num_shown: int, num_all: int) -> str:
    """Return the label of an axis, with a note if only some of the arms are shown."""
    return words if num_shown == num_all else f"{words}; the first {num_shown} of {num_all} arms"
