"""Draws some rounds: each process, and each direction of a link, on a line of its own."""

from collections.abc import Sequence
from typing import Any

from coordinator.tracing.chrome import COORDINATOR_PID
from lab.palette import (
    CODEC,
    COORDINATOR,
    DECIDE,
    DRAFTER,
    FAINT,
    INK,
    MOVE,
    PREPARE,
    ROLES,
    VERDICT,
    pale,
)
from lab.trace.critical_path import Path
from lab.trace.reading import Arrow, Busy, Forward, Message, Process, Trace

NUM_ROUNDS = 5  # that are drawn if nobody says which
# What a host does besides running a model, which has the colour of its process.
COLOURS = {"prepare": PREPARE, "move": MOVE, "decide": DECIDE, "codec": CODEC}
LABELS = {
    "model": "{role}: model",
    "sampling": "{role}: sampling",
    "prepare": "masks, tensors",
    "move": "cache rows",
    "decide": "decisions",
    "codec": "reading, sending",
}
WIRE = {"Draft": pale(DRAFTER, 0.2), "Verdict": VERDICT, "Open": FAINT}
ARROWS = {
    "accepted draft": (DRAFTER, 1.3),
    "draft": (pale(DRAFTER, 0.6), 0.6),
    "verdict": (VERDICT, 0.8),
}
WHITHER = {
    "accepted draft": "its verdict",
    "draft": "the first verdict that could use it",
    "verdict": "a drafter",
}
# For each kind of moment: its marker, colour, height above the line, and words in the legend.
MARKS = {
    "re-root": ("v", VERDICT, 0.08, "re-root: nodes rolled back"),
    "roll back": ("v", VERDICT, 0.08, "re-root: nodes rolled back"),
    "rejection": ("x", INK, 0.30, "rejection"),
    "stale drafts": ("d", FAINT, 0.20, "stale drafts"),
    "fallback": ("^", DECIDE, 0.40, "fallback"),
}
HEIGHT = 0.62
MAX_WORDS = 400  # most spans that have words in them; more could not be read


def interesting(path: Path) -> range:
    """Return some rounds around the one with the most nodes rolled back, away from both ends."""
    rounds = path.rounds
    inner = range(2, len(rounds) - 2) or range(len(rounds))
    worst = max(inner, key=lambda index: rounds[index].rolled_back)
    first = max(0, min(worst - NUM_ROUNDS // 2, len(rounds) - NUM_ROUNDS))
    return range(first, min(first + NUM_ROUNDS, len(rounds)))


def draw(figure: Any, trace: Trace, path: Path, rounds: range) -> None:
    """Draw these rounds of a text, with all processes, messages and arrows of that time."""
    start_ns, end_ns = path.rounds[rounds[0]].start_ns, path.rounds[rounds[-1]].end_ns
    picture = _Picture(figure, trace, start_ns, end_ns)
    for process in trace.processes.values():
        picture.process(process)
    for message in trace.messages:
        picture.message(message)
    for arrow in trace.arrows:
        picture.arrow(arrow)
    for index in rounds:
        picture.verdict(path, index)
    picture.finish(
        f"text {path.text} under {path.policy}: rounds {rounds[0] + 1} to {rounds[-1] + 1} of "
        f"{len(path.rounds)}{_simulated(trace)}"
    )


class _Picture:
    """The axes of a figure and its lines. Times are milliseconds from the first round."""

    def __init__(self, figure: Any, trace: Trace, start_ns: int, end_ns: int) -> None:
        self._start_ns, self._end_ns = start_ns, end_ns
        self._names = _lines(trace)
        self._lines = {key: -index for index, key in enumerate(self._names)}
        figure.set_size_inches(15, 1.6 + 0.62 * len(self._lines))
        self._figure = figure
        self._axes = figure.subplots()
        self._num_words = 0
        self._legend: dict[str, Any] = {}

    def _ms(self, ns: int) -> float:
        return (ns - self._start_ns) / 1e6

    def _is_seen(self, start_ns: int, end_ns: int) -> bool:
        return end_ns > self._start_ns and start_ns < self._end_ns

    def process(self, process: Process) -> None:
        """Draw a process: its phases, forwards as frames around them, and marks for moments.

        A forward on a device is drawn behind the host's phases, which are then half as high.
        """
        y = self._lines[process.pid]
        on_device = [one for one in process.forwards if one.on_device]
        height = HEIGHT / 2 if on_device else HEIGHT
        self._bars(on_device, y, HEIGHT, "model", process.role)
        for category in LABELS:
            of_category = [one for one in process.busy if one.category == category]
            self._bars(of_category, y, height, category, process.role)
        for one in process.forwards:
            if self._is_seen(one.start_ns, one.end_ns):
                self._forward(y, one.start_ns, one.end_ns, _words(one.name, one.args))
        for moment in process.moments:
            if moment.name in MARKS and self._is_seen(moment.ns, moment.ns + 1):
                marker, colour, height, label = MARKS[moment.name]
                place = self._ms(moment.ns), y + HEIGHT / 2 + height
                (mark,) = self._axes.plot(*place, marker, color=colour, markersize=5, zorder=5)
                self._legend.setdefault(label, mark)

    def _bars(
        self,
        spans: Sequence[Busy | Forward],
        y: float,
        height: float,
        category: str,
        role: str,
    ) -> None:
        """Draw the spans in view as bars, `height` high, whose lower edge is `y - HEIGHT / 2`."""
        bars = [
            (self._ms(one.start_ns), (one.end_ns - one.start_ns) / 1e6)
            for one in spans
            if self._is_seen(one.start_ns, one.end_ns)
        ]
        place = y - HEIGHT / 2, height
        if bars:
            colour = _colour(category, role)
            drawn = self._axes.broken_barh(bars, place, facecolors=colour, linewidth=0)
            self._legend.setdefault(LABELS[category].format(role=role), drawn)

    def _forward(self, y: float, start_ns: int, end_ns: int, words: str) -> None:
        """Draw a forward as a frame, with words if there is room."""
        start, length = self._ms(start_ns), (end_ns - start_ns) / 1e6
        self._axes.broken_barh(
            [(start, length)],
            (y - HEIGHT / 2, HEIGHT),
            facecolors="none",
            edgecolors=INK,
            linewidth=0.7,
        )
        share = length / max(1e-9, self._ms(self._end_ns))
        self._num_words += 1
        if share * 190 > len(words) and self._num_words <= MAX_WORDS:
            middle = start + length / 2
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
            self._axes.text(middle, y, words, clip_on=True, zorder=6, **style)

    def message(self, message: Message) -> None:
        """Draw a message from when it is sent until it is read."""
        key = (message.sender, message.receiver)
        if key not in self._lines or not self._is_seen(message.sent_ns, message.received_ns):
            return
        colour = WIRE.get(message.kind)
        if colour is None:
            return
        y = self._lines[key]
        start, end = self._ms(message.sent_ns), self._ms(message.received_ns)
        drawn = self._axes.broken_barh(
            [(start, end - start)],
            (y - HEIGHT / 4, HEIGHT / 2),
            facecolors=colour,
            edgecolors=colour,
            alpha=0.45,
            linewidth=0.8,
        )
        label = f"{message.kind.lower()} on its way until it is read"
        self._legend.setdefault(label, drawn)

    def arrow(self, arrow: Arrow) -> None:
        """Draw an arrow from a draft to its verdict, or from a verdict to a drafter."""
        if not self._is_seen(arrow.start_ns, arrow.end_ns):
            return
        start_y, end_y = self._lines[arrow.sender], self._lines[arrow.receiver]
        down = -1 if end_y < start_y else 1
        colour, width = ARROWS[arrow.name]
        drawn = self._axes.annotate(
            "",
            xy=(self._ms(arrow.end_ns), end_y - down * HEIGHT / 2),
            xytext=(self._ms(arrow.start_ns), start_y + down * HEIGHT / 2),
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": width,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        drawn.arrow_patch.set_clip_path(self._axes.patch)
        if (label := f"{arrow.name} to {WHITHER[arrow.name]}") not in self._legend:
            (self._legend[label],) = self._axes.plot([], [], color=colour, linewidth=width)

    def verdict(self, path: Path, index: int) -> None:
        """Draw the beginning of a round, and its number of tokens."""
        one = path.rounds[index]
        self._axes.axvline(self._ms(one.start_ns), color=pale(FAINT, 0.5), linewidth=0.8, zorder=0)
        words = f"round {index + 1}: {one.tokens} token{'s' * (one.tokens != 1)}"
        middle = (self._ms(one.start_ns) + self._ms(one.end_ns)) / 2
        self._axes.text(middle, 0.75, words, ha="center", va="bottom", fontsize=8, color=FAINT)

    def finish(self, title: str) -> None:
        """Set title, names of the lines, axis and legend."""
        axes = self._axes
        axes.set_xlim(0, self._ms(self._end_ns))
        axes.set_ylim(-len(self._lines) + 0.4, 1.1)
        axes.set_yticks(list(self._lines.values()), list(self._names.values()))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("milliseconds")
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        self._figure.legend(
            self._legend.values(),
            self._legend.keys(),
            loc="outside lower center",
            ncols=6,
            frameon=False,
            fontsize=8,
        )


def _lines(trace: Trace) -> dict[Any, str]:
    """Return the lines from top to bottom: drafters, links to the target and back, and the target.

    The key of a process is its id; that of a direction of a link is the pair of ids.
    """
    drafters, targets = trace.of_role("drafter"), trace.of_role("target")
    used = {(one.sender, one.receiver) for one in trace.messages if one.kind in WIRE}
    lines: dict[Any, str] = {one.pid: one.name for one in drafters}
    for senders, receivers in ((drafters, targets), (targets, drafters)):
        lines |= _directions(senders, used, is_to_coordinator=True)
        if senders is drafters:
            lines[COORDINATOR_PID] = "coordinator"
        lines |= _directions(receivers, used, is_to_coordinator=False)
    return lines | {one.pid: one.name for one in targets}


def _directions(
    nodes: Sequence[Process], used: set[tuple[int, int]], *, is_to_coordinator: bool
) -> dict[Any, str]:
    """Return the used directions of links between these nodes and the coordinator, with names."""
    found: dict[Any, str] = {}
    for one in nodes:
        key = (one.pid, COORDINATOR_PID) if is_to_coordinator else (COORDINATOR_PID, one.pid)
        ends = (one.name, "coordinator") if is_to_coordinator else ("coordinator", one.name)
        if key in used:
            found[key] = " \N{RIGHTWARDS ARROW} ".join(ends)
    return found


def _simulated(trace: Trace) -> str:
    """Return what was simulated, in words that begin with ";"; "": nothing."""
    settings = trace.about.get("settings", {})
    names = {"simulate_target_ms": "target", "simulate_draft_ms": "drafter", "link": "link"}
    found = [words for name, words in names.items() if settings.get(name)]
    return f"; simulated: {', '.join(found)}" if found else ""


def _colour(category: str, role: str) -> str:
    """Return a colour: a process's own for its model, a paler one for choosing tokens."""
    if category in COLOURS:
        return COLOURS[category]
    own = ROLES.get(role, COORDINATOR)
    return pale(own) if category == "sampling" else own


def _words(name: str, args: Any) -> str:
    """Return the words that are drawn in a forward."""
    if "accepted" in args and args.get("drafted"):
        return f"{args['accepted']} of {args['drafted']} accepted"
    rows = args.get("rows", "?")
    return f"{name}: {rows} row{'s' * (rows != 1)}"
