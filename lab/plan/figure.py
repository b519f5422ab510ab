"""The figure of `plan`: speed-up over acceptance and over distance, a line for each policy."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.needed import missing
from lab.palette import PLAIN, POLICIES
from proto.errors import ConfigurationError, did_you_mean
from proto.system import cannot_write, check_writable
from rehearsal.acceptance import chances, cut, drawn, shares
from rehearsal.planning import Case, Plan, make_plan

# Fewer tokens and settings than for the table, since there are many points.
TOKENS, DRAFTS = 160, (2, 4, 8)
ACCEPTANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HOPS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)  # one-way time of a message, in target passes


def empty(path: Path) -> Any:
    """Return an empty figure, after checking that it can be saved to `path`.

    Raises ConfigurationError if matplotlib is not installed, or no picture can be written there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"--plot needs {missing('matplotlib')}") from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in known:  # a file without an ending is written as PNG
        raise ConfigurationError(
            f"--plot: {path} ends in no kind of picture that can be drawn; those are "
            f"{', '.join(known)}{did_you_mean(ending, known)}"
        )
    check_writable(path, "--plot")
    return figure


def draw(figure: Any, case: Case, say: Callable[[str], None]) -> None:
    """Draw speed-up over acceptance and over one-way hop, a line for each policy."""
    pass_s, hop_s = case.target.forward.of(1), case.drafter.hop_s
    by_acceptance: list[Case] = []
    for first in ACCEPTANCES:
        trace = drawn(chances(str(first)), len(case.trace), TOKENS)
        by_acceptance.append(dataclasses.replace(case, trace=trace))
    short = cut(case.trace, len(case.trace), TOKENS)
    by_hop: list[Case] = []
    for share in HOPS:
        by_hop.append(dataclasses.replace(case, trace=short).over(share * pass_s))
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, ACCEPTANCES, by_acceptance, say)
    _lines(right, HOPS, by_hop, say)
    left.set(xlabel="acceptance of the first choice", ylabel="times plain decoding")
    left.set_title(f"one-way hop of {hop_s / pass_s:.2g} target passes", fontsize=10)
    right.set(xlabel="one-way hop, in target passes")
    right.set_title(f"acceptance of {shares(case.trace)[0]:.2f}", fontsize=10)
    left.legend(frameon=False)
    texts = f"{len(case.trace)} text{'s' * (len(case.trace) != 1)}"
    figure.suptitle(
        f"Predicted in virtual time for {texts} of at most {TOKENS} tokens, with the given costs. "
        "Nothing was measured.",
        x=0.01,
        ha="left",
        fontsize=10,
    )


def save(figure: Any, path: Path) -> None:
    """Write the figure to a file. Raises ConfigurationError."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigurationError(
            f"--plot: {path} cannot be written: {cannot_write(error)}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"--plot: {path} cannot be written: {error}") from error


def _lines(
    axes: Any, values: Sequence[float], cases: Sequence[Case], say: Callable[[str], None]
) -> None:
    """Draw a line per policy, each point with its best setting, and one for plain decoding."""
    plans: list[Plan] = []
    for number, case in enumerate(cases, 1):
        say(f"point {number} of {len(cases)}")
        plans.append(make_plan(case, DRAFTS, wider=()))
    for index, cell in enumerate(plans[0].best):
        speedups = [made.speedup(made.best[index]) for made in plans]
        look = POLICIES[cell.policy]
        style = {"color": look.colour, "marker": look.mark, "markersize": 4}
        axes.plot(values, speedups, label=cell.policy, **style)
    axes.axhline(1.0, color=PLAIN, linewidth=0.8, linestyle="--", label=plans[0].plain.policy)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
