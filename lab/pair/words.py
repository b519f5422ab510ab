"""Says what was measured of a pair, on the screen and as a page of Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lab.pair.record import Measured, MeasuredNode, Share

NUM_RANKS = 4  # choices of the drafter that have a column
TEMPERATURE = "temp."  # the whole word would make tables wider than a terminal
ORDINALS = ("1st", "2nd", "3rd", "4th")
FAR_OFF = 0.25  # an expectation with which something is wrong
STALLED = 0.05  # share of a model's time in stalls, with which the machine was not idle
SHOWN_ROWS = (1, 2, 3, 5, 9, 16)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: a title, lines before a table, the table, lines after it."""

    title: str
    before: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    after: str = ""


def sections(measured: Measured) -> list[Section]:
    """Return all parts of the report in order."""
    return [
        _chances(measured),
        _times(measured),
        *([_speeds(measured)] if measured.speeds else []),
        *([_advice(measured)] if measured.advice else []),
    ]


def _chances(measured: Measured) -> Section:
    rows = []
    for one in measured.chances:
        ranks = [f"{rank.value:.2f}" for rank in one.ranks[1:NUM_RANKS]]
        cells = f"{one.temperature:g}", _share(one.alpha), _share(one.ranks[0]), *ranks
        rows.append((*cells, str(len(one.texts)), str(one.num_tokens)))
    return Section(
        "How often drafts are right",
        "On the target's own texts at each temperature. In brackets: 95 % intervals, by a "
        "bootstrap over texts.",
        (TEMPERATURE, "alpha", *ORDINALS, "texts", "tokens"),
        tuple(rows),
        "alpha is the chance that the classical rules (--verify token) accept a draft: the sum "
        "over tokens of min(p, q), p of the target and q of the drafter. The columns 1st to 4th "
        "are the chance that this choice of the drafter is the target's token: the default rule "
        "accepts by that. "
        'Neither is the "% of drafts accepted" on the screen of `generate`. That is the share of '
        "all drafts in a pass, also of those behind a wrong one, and of every branch of a tree.",
    )


def _share(share: Share) -> str:
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _times(measured: Measured) -> Section:
    pairs = (
        ("target pass", measured.target, "drafter"),
        ("draft step", measured.drafter, "target"),
    )
    rows = []
    for what, node, other in pairs:
        for when, curve in (
            ("no drafts", node.plain),
            (f"{other} waits", node.apart),
            (f"{other} {node.overlap:.0%} busy", node.beside),
        ):
            if curve:
                known = dict(curve)
                cells = [f"{known[rows]:.3g}" if rows in known else "" for rows in SHOWN_ROWS]
                rows.append((f"{what}, {when}", *cells))
    return Section(
        "What everything costs",
        f"{_about('Target', measured.target)} {_about('Drafter', measured.drafter)}",
        ("ms, by rows", *map(str, SHOWN_ROWS)),
        tuple(rows),
        f"A draft takes {measured.way_ms:.3g} ms from the drafter to the target. The host takes "
        f"{measured.target.host_us.beside:.0f} us for a pass ({measured.target.host_us.plain:.0f} "
        f"without drafts) and {measured.drafter.host_us.beside:.0f} us for a draft step, besides "
        "the model.",
    )


def _about(role: str, node: MeasuredNode) -> str:
    memory = "" if node.memory_mib is None else f", {node.memory_mib:,.0f} MiB of host memory"
    return (
        f"{role}: {node.model}, {node.num_parameters / 1e6:,.4g} M parameters, {node.dtype} on "
        f"{node.device} ({node.backend}){memory}."
    )


def _speeds(measured: Measured) -> Section:
    plain = {
        speed.temperature: speed.tokens_per_second
        for speed in measured.speeds
        if speed.drafts_accepted is None
    }
    rows = [
        (
            f"{speed.temperature:g}",
            speed.policy,
            f"{speed.tokens_per_second:.4g}",
            f"{speed.tokens_per_second / plain[speed.temperature]:.2f}"
            if speed.temperature in plain
            else "",
            f"{speed.predicted:.4g}",
            f"{speed.predicted / speed.tokens_per_second - 1:+.0%}",
            f"{speed.tokens_per_pass:.2f}",
            "-" if speed.drafts_accepted is None else f"{speed.drafts_accepted:.0%}",
        )
        for speed in measured.speeds
    ]
    header = TEMPERATURE, "policy", "tokens/s", "x plain", "expected", "off by", "tokens a pass"
    return Section(
        "What was measured, and what plan expects",
        "One text at a time, with the numbers that each policy has by default. "
        f"{_plain(measured.target)}",
        (*header, "% of drafts accepted"),
        tuple(rows),
        _warning(measured),
    )


def _warning(measured: Measured) -> str:
    """Return a line if the machine was busy, or an expectation is far off; else nothing."""
    again = "Measure again when it is idle."
    stalled = max(measured.target.stalled, measured.drafter.stalled)
    if stalled >= STALLED:
        return (
            f"One of the models lost {stalled:.0%} of its time to stalls: something else used the "
            f"machine, and the measured speeds are too low. {again}"
        )
    speeds = measured.speeds
    if all(abs(one.predicted / one.tokens_per_second - 1) < FAR_OFF for one in speeds):
        return ""
    return (
        "Some of it is far off: something else may have used the machine, and then all times are "
        f"too long. {again}"
    )


def _advice(measured: Measured) -> Section:
    rows = [
        (one.what, f"{one.speedup:.2f}", f"{one.tokens_per_second:.4g}", one.flags)
        for one in measured.advice
    ]
    return Section(
        "What to use",
        "What `plan` makes of these costs and chances: the fastest policy and its numbers. The "
        "lines below the first say what would change with other devices or another link. "
        f"{_plain(measured.target)}",
        ("", "x plain", "tokens/s", "flags for generate"),
        tuple(rows),
    )


def _plain(target: MeasuredNode) -> str:
    """Return what the column "x plain" compares with."""
    is_cpu = target.device.startswith("cpu")
    where = "the CPU cores where that is fastest" if is_cpu else target.device
    return f'"x plain" compares with the policy ar: the target alone, {target.dtype}, on {where}.'


def on_screen(measured: Measured) -> RenderableType:
    """Return the report for a terminal."""
    parts: list[RenderableType] = []
    for section in sections(measured):
        table = Table(box=None, pad_edge=False)
        for index, name in enumerate(section.header):
            table.add_column(name, justify="left" if index == 0 or "flags" in name else "right")
        for row in section.rows:
            table.add_row(*row)
        parts += [Text(section.title, style="bold"), Text(section.before), Text(), table]
        parts += [Text(f"\n{section.after}")] if section.after else []
        parts.append(Text())
    return Group(*parts)


def as_page(measured: Measured) -> str:
    """Return the report as Markdown."""
    lines = ["# A measured pair", "", f"Machine: {measured.machine}", ""]
    for section in sections(measured):
        lines += [f"## {section.title}", "", section.before, ""]
        lines += [_row(section.header), _row(["---"] * len(section.header))]
        lines += [_row(row) for row in section.rows]
        lines += ["", section.after, ""] if section.after else [""]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
