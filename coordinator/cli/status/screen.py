"""What `status` shows of a coordinator, in lines of at most 80 columns but for paths (pure)."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from textwrap import wrap
from typing import Any

WIDTH = 80
MAX_TEXTS = 8  # that are shown; --json has more

NODE_COLUMNS = ("NODE", "STATE", "MODEL", "TYPE", "DEVICE", "TEXTS", "ROUND TRIP")

Answer = Mapping[str, Any]


def lines_of(answer: Answer, log: Sequence[str], now: float) -> list[str]:
    """A coordinator that has answered. `log`: the end of its log; `now`: seconds since 1970."""
    return [
        *heading(answer, now),
        "",
        *_nodes(answer["nodes"]),
        "",
        *_texts(answer),
        *_since_the_start(answer),
        "",
        f"logs: {answer['logs']}",
        *(part for line in log for part in _wrapped(line)),
    ]


def heading(answer: Answer, now: float) -> list[str]:
    """Which coordinator it is."""
    up = _duration(max(0.0, now - answer["started"]))
    lines = [f"coordinator {answer['pid']} on {answer['host']}, for {up}"]
    where = f", listens at {answer['listens']}" if answer["listens"] else ""
    lines.append(f"nodes: {answer['nodes_started']}{where}")
    return [_cut(line) for line in lines]


def _nodes(nodes: Sequence[Answer]) -> list[str]:
    if not nodes:
        return ["no node has been started"]
    lines = _table([NODE_COLUMNS, *map(_row, nodes)])
    shown = [lines[0]]
    for node, line in zip(nodes, lines[1:], strict=True):
        shown += [line, *_about(node)]
    return shown


def _row(node: Answer) -> tuple[str, ...]:
    trip = node["round_trip_ms"]
    return (
        _cut(node["name"], 12),
        node["health"],
        _cut(PurePath(node["model"]).name or "-", 22),
        _cut(node["dtype"] or "-", 8),
        _cut(node["device"] or "-", 10),
        f"{node['texts']}/{node['max_texts']}",
        "-" if trip is None else f"{trip:.1f} ms",
    )


def _about(node: Answer) -> list[str]:
    """What there is to say of a node beyond its row."""
    words = []
    if node["health"] == "starting":
        words.append(node["doing"])
    if node["health"] == "silent":
        words.append(f"nothing heard for {_duration(node['silent_s'])}")
    if node["host"]:
        words.append(f"on {node['host']}" + (f", process {node['pid']}" if node["pid"] else ""))
    if node["backend"]:
        words.append(f"{node['backend']}, {node['forwards']} forwards")
    trip, first = node["round_trip_ms"], node["round_trip_at_start_ms"]
    if trip is not None and first is not None and trip > 2 * first + 1:
        words.append(f"round trip at the start {first:.1f} ms")
    if node["bad_frames"]:
        words.append(f"{node['bad_frames']} frames could not be read")
    return _wrapped("; ".join(words))


def _texts(answer: Answer) -> list[str]:
    texts = answer["texts"]
    line = f"texts: {answer['open']} open, {answer['queued']} queued, {answer['complete']} complete"
    line += "".join(f", {answer[how]} {how}" for how in ("cancelled", "failed") if answer[how])
    if not texts:
        return [line]
    rows = [("TEXT", "TOKENS", "OF", "PROMPT", "FOR", "TOKENS/S", "ACCEPTED", "POLICY")]
    for one in texts[:MAX_TEXTS]:
        rate = one["acceptance_rate"]
        rows.append(
            (
                str(one["number"]),
                str(one["tokens"]),
                str(one["max_tokens"]),
                str(one["prompt_tokens"]),
                _duration(one["running_s"]),
                f"{one['tokens_per_s']:.1f}",
                "-" if rate is None else f"{rate:.0%}",
                one["policy"] + (" (no drafter)" if one["without_drafter"] else ""),
            )
        )
    more = answer["open"] - min(len(texts), MAX_TEXTS)
    return [line, *_table(rows), *([f"and {more} more"] if more > 0 else [])]


def _since_the_start(answer: Answer) -> list[str]:
    words = [f"{role} {number}" for role, number in answer["restarts"].items()]
    lines = [f"restarts: {', '.join(words) or 'none'}"]
    refusals = answer["refusals"]
    lines.append(f"refusals: {sum(refusals.values()) or 'none'}")
    for cause, number in sorted(refusals.items(), key=lambda item: -item[1]):
        lines += _wrapped(f"{number} x {cause}")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _cut("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]


def _duration(seconds: float) -> str:
    """Two units at most: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _wrapped(line: str) -> list[str]:
    """A line below another, as long as it is."""
    return wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _cut(line: str, width: int = WIDTH) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
