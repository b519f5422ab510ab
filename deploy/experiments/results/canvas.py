"""How the pictures look: for a phone held upright, and in the same colours throughout.

A picture is 4.2 inches wide and is shown 350 to 600 pixels wide, so 9 points are about 10 pixels
at the least. Names of arms are long: they stand above their row, where there is the whole width.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from deploy.experiments.folder import ArmRecord
from deploy.experiments.results.names import clipped, family, shortened
from proto.policies import POLICIES

WIDTH = 4.2  # inches
DPI = 240
ROW = 0.42  # inches, of a row with its name above
LINE = 0.2  # inches, of a legend
FEW, HALF = 4, 20  # lines of a legend in one column; columns of a name that leave room for two
MAX_NAME = 38  # columns of a name above a row
MAX_ROWS = 40  # beyond these a picture is no picture
BASE = "#555555"  # of what is compared with
# For eyes of all kinds (after Okabe and Ito), and told apart by marks as well: auto, plain decoding
# in grey, and the other policies in the order of their table.
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
    """Of an arm: its family's."""

    colour: str
    mark: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A row of a picture: a value in its interval.

    words  what is written at its end
    """

    name: str
    look: Look
    value: float
    low: float | None
    high: float | None
    words: str


def looks(arms: Iterable[ArmRecord]) -> dict[str, Look]:
    """By family. The same policy looks the same in every experiment."""
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
    """Fonts and lines of everything that is drawn within."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def canvas(height: float) -> Figure:
    """An empty picture of so many inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def as_png(figure: Figure) -> bytes:
    """The bytes of the file; nothing in them is of the time or the machine."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def height_of(num_rows: int) -> float:
    """Of the rows of `draw_rows`, in inches."""
    return ROW * num_rows


def draw_rows(axes: Axes, dots: Sequence[Dot], *, base: float = 1.0) -> None:
    """A row for each, top to bottom, and a line where nothing is gained."""
    axes.axvline(base, color=BASE, linewidth=1.2, linestyle="--", zorder=1)
    for row, dot in enumerate(dots):
        draw_dot(axes, dot, row)
        write(axes, 0, row - 0.38, clipped(shortened(dot.name), MAX_NAME))
        write(axes, 1, row - 0.38, dot.words)
    without_y(axes, top=-0.75, bottom=len(dots) - 0.6)


def draw_dot(
    axes: Axes, dot: Dot, height: float, *, size: float = 6.5, is_named: bool = False
) -> None:
    """A value and its interval; in the legend if it is named."""
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
    """At the left or the right end of a row, over the lines that pass there."""
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
    """Rows have names in place of an axis."""
    axes.set_ylim(bottom, top)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.05)


def counted(axes: Axes, most: int) -> None:
    """Shares over counts from 1 on."""
    axes.set_xticks(range(1, most + 1, 1 + (most - 1) // 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def legend_below(figure: Figure) -> None:
    """What the lines mean, beneath everything: the picture becomes as much longer as that takes."""
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
