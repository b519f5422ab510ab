"""The picture of policies side by side: the same span of time, from a trace of each.

What is drawn is kept as data beside the picture, so that it can be drawn anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lab.palette import FAINT, INK, ROLES, VERDICT
from lab.records import NO_OTHERS
from lab.trace.critical_path import Path, paths_of
from lab.trace.reading import Process, Trace

FIRST_ROUND = 6  # before it, costs are still being learnt
NUM_ROUNDS = 5  # of the first policy: as much time is drawn of each
HEIGHT = 0.6
SHOWN_ROLES = ("target", "drafter")  # from top to bottom
LABELS = {"target": "a pass of the target", "drafter": "a step of the drafter"}
VERDICT_LABEL = "a verdict, with the tokens that it adds to the text"


class Bar(NamedTuple):
    """A forward pass, in milliseconds from the left end."""

    start_ms: float
    length_ms: float


class Verdict(NamedTuple):
    """A verdict: when it came (ms), and how many tokens it added to the text."""

    at_ms: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel of one policy: what each process did, and its verdicts. `bars` are by role."""

    __pydantic_config__ = NO_OTHERS
    policy: str
    bars: dict[str, tuple[Bar, ...]]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The data of a picture that shows some rounds under several policies, a panel for each.

    facts  what was measured, what was simulated, and what was not measured
    """

    __pydantic_config__ = NO_OTHERS
    title: str
    facts: tuple[str, ...]
    span_ms: float
    panels: tuple[Panel, ...]


def rounds_of(traces: Mapping[str, Trace], title: str, facts: tuple[str, ...]) -> Rounds:
    """Return a span of each policy's time, as long as some rounds of the first policy."""
    paths = {name: paths_of(trace)[0] for name, trace in traces.items()}
    span_ns = _span_ns(next(iter(paths.values())))
    panels = (_panel(name, trace, paths[name], span_ns) for name, trace in traces.items())
    return Rounds(title, facts, span_ns / 1e6, tuple(panels))


def _span_ns(path: Path) -> int:
    """Return the length of the drawn span in nanoseconds."""
    first, last = path.rounds[FIRST_ROUND], path.rounds[FIRST_ROUND + NUM_ROUNDS - 1]
    return last.end_ns - first.start_ns


def _panel(name: str, trace: Trace, path: Path, span_ns: int) -> Panel:
    start_ns = path.rounds[FIRST_ROUND].start_ns
    verdicts = tuple(
        Verdict((one.end_ns - start_ns) / 1e6, one.tokens)
        for one in path.rounds
        if one.start_ns >= start_ns and one.end_ns - start_ns <= span_ns
    )
    bars = {
        role: tuple(
            bar for process in trace.of_role(role) for bar in _bars(process, start_ns, span_ns)
        )
        for role in SHOWN_ROLES
    }
    return Panel(name, bars, verdicts)


def _bars(process: Process, start_ns: int, span_ns: int) -> list[Bar]:
    return [
        Bar((one.start_ns - start_ns) / 1e6, (one.end_ns - one.start_ns) / 1e6)
        for one in process.forwards
        if one.end_ns > start_ns and one.start_ns < start_ns + span_ns
    ]


def draw(figure: Any, rounds: Rounds) -> None:
    """Draw a panel for each policy, with a line for each process; time runs to the right."""
    figure.set_size_inches(10, 1.6 * len(rounds.panels) + 2.1)
    panels: Sequence[Any] = figure.subplots(len(rounds.panels), 1, sharex=True, squeeze=False)[:, 0]
    legend: dict[str, Any] = {}
    for axes, panel in zip(panels, rounds.panels, strict=True):
        _draw_panel(axes, panel, rounds.span_ms, legend)
    panels[-1].set_xlabel("milliseconds")
    panels[-1].set_xlim(0, rounds.span_ms)
    words = "\n".join((rounds.title, *rounds.facts))
    figure.suptitle(words, x=0.01, ha="left", fontsize=11, color=INK)
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower left",
        ncols=len(legend),
        frameon=False,
        fontsize=10.5,
    )


def _draw_panel(axes: Any, panel: Panel, span_ms: float, legend: dict[str, Any]) -> None:
    for number, role in enumerate(SHOWN_ROLES):
        y = len(SHOWN_ROLES) - 1 - number
        drawn = axes.broken_barh(
            panel.bars[role],
            (y - HEIGHT / 2, HEIGHT),
            facecolors=ROLES[role],
            edgecolors="white",
            linewidth=0.8,
        )
        legend.setdefault(LABELS[role], drawn)
    for at_ms, tokens in panel.verdicts:
        line = axes.axvline(at_ms, color=VERDICT, linewidth=1.2, zorder=0)
        legend.setdefault(VERDICT_LABEL, line)
        place = (at_ms - 0.004 * span_ms, 1.42)
        axes.text(*place, f"+{tokens}", ha="right", va="bottom", fontsize=10.5, color=VERDICT)
    names = list(reversed(SHOWN_ROLES))
    axes.set_yticks(range(len(names)), names, fontsize=10.5)
    for label, role in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(ROLES[role])
    axes.set_ylim(-0.5, 1.9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    num_tokens = sum(tokens for _, tokens in panel.verdicts)
    words = f"{panel.policy}: {num_tokens} tokens in {span_ms:.0f} ms"
    axes.set_title(words, loc="left", fontsize=11, color=FAINT)
