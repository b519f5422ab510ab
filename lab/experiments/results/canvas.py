"""What the pictures of an experiment are drawn on: size, fonts, rows, heading and legend.

A picture is 4.2 inches wide and is shown 350 to 600 pixels wide, so 9 points are about 10 pixels
at the least: it is made for a phone held upright. Names of arms are long: they stand above their
row, where there is the whole width.
"""

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from lab.experiments.results.words import clipped, shortened
from lab.palette import FAINT, INK, PEERS, PLAIN, POLICIES, Look

WIDTH = 4.2  # inches
DPI = 240
ROW = 0.42  # inches, of a row with its name above
LINE = 0.2  # inches, of a legend
FEW, HALF = 4, 20  # lines of a legend in one column; columns of a name that leave room for two
MAX_NAME = 38  # columns of a name above a row
HEAD = 0.155  # inches, of a line of the heading
HEAD_COLUMNS = 66  # of a line of the heading
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
class Dot:
    """A row of a picture: a name, a value and the value's interval.

    words  what is written at its end
    """

    name: str
    look: Look
    value: float
    low: float | None
    high: float | None
    words: str


def looks(families: Iterable[str]) -> dict[str, Look]:
    """Return the colour and mark of each family; a policy has its own in all experiments."""
    found: dict[str, Look] = dict(POLICIES)
    others = [name for name in dict.fromkeys(families) if name not in found]
    return found | {name: PEERS[number % len(PEERS)] for number, name in enumerate(others)}


@contextmanager
def style() -> Iterator[None]:
    """While inside, matplotlib draws with our fonts and lines (`STYLE`)."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def canvas(height: float) -> Figure:
    """Return an empty figure of this height in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def as_png(figure: Figure) -> bytes:
    """Return the figure as a PNG file; equal figures give equal bytes on every machine."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def height_of(num_rows: int) -> float:
    """Return the height of `num_rows` rows of `draw_rows`, in inches."""
    return ROW * num_rows


def draw_rows(axes: Axes, dots: Sequence[Dot], *, base: float = 1.0) -> None:
    """Draw a row for each dot, from top to bottom, and a dashed line at `base` (no gain)."""
    axes.axvline(base, color=PLAIN, linewidth=1.2, linestyle="--", zorder=1)
    for row, dot in enumerate(dots):
        draw_dot(axes, dot, row)
        write(axes, 0, row - 0.38, clipped(shortened(dot.name), MAX_NAME))
        write(axes, 1, row - 0.38, dot.words)
    without_y(axes, top=-0.75, bottom=len(dots) - 0.6)


def draw_dot(
    axes: Axes, dot: Dot, height: float, *, size: float = 6.5, is_named: bool = False
) -> None:
    """Draw a value and its interval; name it in the legend if `is_named`."""
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
    """Write words at the left (0) or right (1) end of a row, over lines that pass there."""
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
    """Remove the y axis, since rows have names instead; set its limits."""
    axes.set_ylim(bottom, top)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.05)


def counted(axes: Axes, most: int) -> None:
    """Label the x axis with counts 1..most, and the y axis with percentages."""
    axes.set_xticks(range(1, most + 1, 1 + (most - 1) // 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def legend_below(figure: Figure) -> None:
    """Add a legend below the figure, which becomes higher by the legend's lines."""
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


def heading(figure: Figure, title: str, facts: Sequence[str]) -> None:
    """Write the title and the facts above everything, last of all: the picture becomes longer."""
    lines = [line for fact in facts for line in textwrap.wrap(fact, HEAD_COLUMNS)]
    titles = textwrap.wrap(title, HEAD_COLUMNS - 12)
    space = HEAD * (len(lines) + 1.2 * len(titles)) + 0.12
    height = figure.get_figheight() + space
    figure.set_size_inches(WIDTH, height)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - space / height))
    top = 1 - 0.05 / height
    look: dict[str, Any] = {"ha": "left", "va": "top", "linespacing": 1.25}
    figure.text(0.015, top, "\n".join(titles), fontsize=9.5, weight="bold", color=INK, **look)
    top -= 1.2 * HEAD * len(titles) / height
    figure.text(0.015, top, "\n".join(lines), fontsize=8, color=FAINT, **look)
