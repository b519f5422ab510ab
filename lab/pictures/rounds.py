"""Draws the timelines of several policies below each other, over the same span of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.trace.critical_path import Path, paths_of
from lab.trace.reading import Process, Trace

FIRST_ROUND = 6  # earlier rounds are left out, because costs are still being measured
NUM_ROUNDS = 5  # rounds of the first policy; the same span of time is drawn of each policy
COLOURS = {"target": "#3b75af", "drafter": "#6aa56a"}
VERDICT = "#b04a5a"
HEIGHT = 0.6


def draw(figure: Any, traces: Mapping[str, Trace]) -> None:
    """Draw a panel for each policy with a line for each process; time runs to the right."""
    figure.set_size_inches(10, 1.6 * len(traces) + 0.9)
    paths = {name: paths_of(trace)[0] for name, trace in traces.items()}
    span_ns = _span_ns(next(iter(paths.values())))
    panels: Sequence[Any] = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        _panel(axes, name, trace, paths[name], span_ns)
    panels[-1].set_xlabel("milliseconds")
    panels[-1].set_xlim(0, span_ns / 1e6)


def _span_ns(path: Path) -> int:
    """Return the length of the drawn span in nanoseconds."""
    first, last = path.rounds[FIRST_ROUND], path.rounds[FIRST_ROUND + NUM_ROUNDS - 1]
    return last.end_ns - first.start_ns


def _panel(axes: Any, name: str, trace: Trace, path: Path, span_ns: int) -> None:
    """Draw one policy: the forwards of each process, and the verdicts with their tokens."""
    start_ns = path.rounds[FIRST_ROUND].start_ns
    roles = ("target", "drafter")
    for y, role in enumerate(reversed(roles)):
        for process in trace.of_role(role):
            _bars(axes, y, process, start_ns, span_ns, COLOURS[role])
    num_tokens = 0
    for one in path.rounds:
        at_ns = one.end_ns - start_ns
        if one.start_ns - start_ns >= 0 and at_ns <= span_ns:
            num_tokens += one.tokens
            axes.axvline(at_ns / 1e6, color=VERDICT, linewidth=1, zorder=0)
            axes.text(
                *(at_ns / 1e6, 1.42, f"+{one.tokens}"),
                ha="right",
                va="bottom",
                fontsize=9,
                color=VERDICT,
            )
    axes.set_yticks(range(len(roles)), [f"{role}" for role in reversed(roles)])
    axes.set_ylim(-0.5, 1.75)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    span_ms = span_ns / 1e6
    axes.set_title(f"{name}: {num_tokens} tokens in {span_ms:.0f} ms", loc="left", fontsize=10)


def _bars(axes: Any, y: int, process: Process, start_ns: int, span_ns: int, colour: str) -> None:
    """Draw the forwards of one process as bars."""
    bars = [
        ((one.start_ns - start_ns) / 1e6, (one.end_ns - one.start_ns) / 1e6)
        for one in process.forwards
        if one.end_ns > start_ns and one.start_ns < start_ns + span_ns
    ]
    axes.broken_barh(
        bars, (y - HEIGHT / 2, HEIGHT), facecolors=colour, edgecolors="white", linewidth=0.8
    )
