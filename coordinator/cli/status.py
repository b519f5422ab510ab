"""`python -m coordinator status`: shows the state of this user's coordinators on this machine."""

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Annotated, Any

import typer

from coordinator.cli.writers import write_out
from coordinator.cluster.snapshot import FORM
from coordinator.cluster.status_socket import LIMIT_S as SERVED_IN_S
from coordinator.cluster.status_socket import MAX_ANSWER_BYTES, NAME, REQUEST, peer_of
from coordinator.launching.logs import latest, runtime_folders, state_folder, tail
from coordinator.launching.runtime_folder import PREFIX, has_owner
from proto.errors import NodeError

# -- asking ----------------------------------------------------------------------------------------

# Finds the coordinators of this user on this machine, and asks each for its state.
#
# Every wait has a limit. An answer is read up to a limit of bytes, and used only as far as it has
# the expected form.

EXACT = "exact: a text is the same with drafts, without, and beside others"
NOT_EXACT = "not exact: texts may differ at near ties, but for float32 or --reproducible"

LONG_S = 1.0  # a pass that takes longer is shown
LIMIT_S = 5.0  # longer than a coordinator takes to say that its loop hangs
AGAIN_S = 0.1
MAX_COORDINATORS = 64


@dataclass(frozen=True, slots=True)
class Found:
    """A coordinator that was found, with its answer or what is wrong.

    answer   its state as JSON; empty: it gave none that can be read
    trouble  what is wrong, for people; empty: all is well
    """

    folder: Path
    pid: int
    answer: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


def folders() -> list[Path]:
    """Return the runtime folders of all coordinators that run, in a fixed order."""
    try:
        here = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    except OSError:
        here = []
    known = {*here, *runtime_folders()}
    return sorted(one for one in known if has_owner(one) and (one / NAME).exists())


def ask(folder: Path, limit_s: float = LIMIT_S) -> Found | None:
    """Ask a coordinator for its state; no answer: `trouble` says why. None: it has just ended."""
    deadline = time.monotonic() + limit_s
    pid = 0
    while True:
        try:
            pid, read = _exchange(folder, deadline)
        except TimeoutError:
            return Found(folder, pid or _listener(folder), trouble=_hung(limit_s))
        except BlockingIOError:
            read = b""  # the socket's queue is full
        except OSError as error:
            if not has_owner(folder):
                return None
            if time.monotonic() > deadline:
                return Found(folder, pid, trouble=f"it cannot be asked ({error})")
            read = b""
        if read:
            return _understood(folder, pid, read)
        if time.monotonic() > deadline:  # the coordinator took no more requests
            return Found(folder, pid, trouble=_hung(limit_s))
        time.sleep(AGAIN_S)


def _hung(limit_s: float) -> str:
    return f"it has not answered for {limit_s:.0f} s; it is stopped, or hangs"


def _exchange(folder: Path, deadline: float) -> tuple[int, bytes]:
    """Send the request; return (process id, answer). Raises OSError, TimeoutError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_left(deadline))
        connection.connect(os.fspath(folder / NAME))
        pid, user = peer_of(connection)
        if user != os.geteuid():
            raise PermissionError("it belongs to another user")
        connection.sendall(REQUEST)
        parts: list[bytes] = []
        num_bytes = 0
        while num_bytes <= MAX_ANSWER_BYTES:
            connection.settimeout(_left(deadline))
            if not (part := connection.recv(1 << 16)):
                break
            parts.append(part)
            num_bytes += len(part)
        return pid, b"".join(parts)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _listener(folder: Path) -> int:
    """Return the process id of the coordinator that listens there, even if it hangs; else 0."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SERVED_IN_S)
            connection.connect(os.fspath(folder / NAME))
            return peer_of(connection)[0]
    except OSError:
        return 0


def _understood(folder: Path, pid: int, read: bytes) -> Found:
    try:
        answer = json.loads(read)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or type(answer.get("pid")) is not int:
        said = answer.get("error") if isinstance(answer, dict) else None
        return Found(folder, pid, trouble=f"its answer cannot be read ({said or 'another form'})")
    if answer.get("hung"):
        return Found(folder, pid, answer, "its loop hangs: it has not answered for 2 s")
    if "form" not in answer:
        return Found(folder, pid, answer, "it is ending")
    if answer["form"] != FORM:
        return Found(folder, pid, answer, "it is of another release; use the status of that one")
    return Found(folder, pid, answer)


# -- screen ----------------------------------------------------------------------------------------

# The lines that `status` shows of a coordinator, at most 80 columns except for paths.

WIDTH = 80
MAX_TEXTS = 8  # texts that are shown; --json has more

TEXT_COLUMNS = ("TEXT", "TOKENS", "OF", "PROMPT", "FOR", "TOKENS/S", "ACCEPTED")
NODE_COLUMNS = ("NODE", "STATE", "MODEL", "TYPE", "DEVICE", "TEXTS", "ROUND TRIP")

Answer = Mapping[str, Any]


def lines_of(answer: Answer, log: Sequence[str], now: float) -> list[str]:
    """Return the lines for a coordinator's answer. `log`: end of its log; `now`: s since 1970."""
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
    """Return the lines that say which coordinator it is."""
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
    """Return the lines on a node that follow its row in the table."""
    words = []
    if node["health"] == "starting":
        words.append(node["doing"])
    if node["health"] == "silent":
        words.append(f"nothing heard for {_duration(node['silent_s'])}")
    if node["host"]:
        words.append(f"on {node['host']}" + (f", process {node['pid']}" if node["pid"] else ""))
    if node["backend"]:
        words.append(f"{node['backend']}, {node['forwards']} forwards")
    if node.get("forms"):
        words.append(f"computed by {node['forms']}")
    if node.get("is_exact") is not None:
        words.append(EXACT if node["is_exact"] else NOT_EXACT)
    trip, first = node["round_trip_ms"], node["round_trip_at_start_ms"]
    if trip is not None and first is not None and trip > 2 * first + 1:
        words.append(f"round trip at the start {first:.1f} ms")
    if node.get("pass_rows") and node["pass_s"] >= LONG_S:
        words.append(_pass_of(node))
    if node["bad_frames"]:
        words.append(f"{node['bad_frames']} frames from it were dropped")
    return _wrapped("; ".join(words))


def _pass_of(node: Answer) -> str:
    """Return which pass a node is in, for how long, and how long such a pass usually takes."""
    rows = "1 row" if node["pass_rows"] == 1 else f"{node['pass_rows']:,} rows"
    usual = f", usually {node['pass_expected_s']:.1f} s" if node["pass_expected_s"] else ""
    return f"in a pass of {rows} for {_duration(node['pass_s'])}{usual}"


def _texts(answer: Answer) -> list[str]:
    texts = answer["texts"]
    line = f"texts: {answer['open']} open, {answer['queued']} queued, {answer['complete']} complete"
    line += "".join(f", {answer[how]} {how}" for how in ("cancelled", "failed") if answer[how])
    if not texts:
        return [line]
    has_several = sum(node["role"] == "target" for node in answer["nodes"]) > 1
    where = ("TARGET",) if has_several else ()
    rows: list[tuple[str, ...]] = [(*TEXT_COLUMNS, *where, "POLICY")]
    for one in texts[:MAX_TEXTS]:
        rate = one["acceptance_rate"]
        rows.append(
            (
                str(one["number"]),
                str(one["tokens"]),
                str(one["max_tokens"]),
                _prompt(one),
                _duration(one["running_s"]),
                f"{one['tokens_per_s']:.1f}",
                "-" if rate is None else f"{rate:.0%}",
                *((one.get("target") or "none",) if has_several else ()),
                one["policy"] + (" (no drafter)" if one["without_drafter"] else ""),
            )
        )
    more = answer["open"] - min(len(texts), MAX_TEXTS)
    return [line, *_table(rows), *([f"and {more} more"] if more > 0 else [])]


def _prompt(text: Answer) -> str:
    """Return the length of a text's prompt, and how far it was read while that is under way."""
    length = text["prompt_tokens"]
    read = text.get("prompt_read", length)  # an older release does not say
    return str(length) if read >= length else f"{read:,} of {length:,}"


def _since_the_start(answer: Answer) -> list[str]:
    words = [f"{role} {number}" for role, number in answer["restarts"].items()]
    lines = [f"restarts: {', '.join(words) or 'none'}"]
    refusals = answer["refusals"]
    lines.append(f"refusals: {sum(refusals.values()) or 'none'}")
    for cause, number in sorted(refusals.items(), key=lambda item: -item[1]):
        lines += _wrapped(f"{number} x {cause}")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, with columns as wide as needed."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _cut("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]


def _duration(seconds: float) -> str:
    """Return a duration in two units at most: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _wrapped(line: str) -> list[str]:
    """Return a line as indented lines of at most WIDTH columns."""
    return wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _cut(line: str, width: int = WIDTH) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


# -- command ---------------------------------------------------------------------------------------

NUM_LOG_LINES = 5
EXIT_TROUBLE = 1

Pid = Annotated[
    int | None,
    typer.Argument(metavar="PID", help="Process id of the coordinator to show. Default: all."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON object with every figure, no table.")
]


def status(pid: Pid = None, as_json: Json = False) -> None:
    """Show what runs here: nodes, texts, restarts and logs.

    The exit status is 1 if none runs, or if one does not answer.
    """
    asked = folders()[:MAX_COORDINATORS]
    # All at the same time, because each one that hangs takes seconds.
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
        found = [one for one in pool.map(ask, asked) if one is not None]
    if pid is not None:
        found = [one for one in found if pid in (one.pid, one.answer.get("pid"))]
    if as_json:
        write_out(json.dumps(_record(found), indent=2) + "\n")
    elif found:
        write_out("\n".join(_lines(found)) + "\n")
    if not found:
        raise NodeError(_nobody(pid))
    if any(one.trouble for one in found):
        raise typer.Exit(EXIT_TROUBLE)


def _record(found: Sequence[Found]) -> dict[str, object]:
    last = latest()
    return {
        "coordinators": [{"pid": one.pid, **one.answer, "trouble": one.trouble} for one in found],
        "last_logs": None if last is None else str(last),
    }


def _lines(found: Sequence[Found]) -> list[str]:
    lines: list[str] = []
    now = time.time()
    for number, one in enumerate(found):
        lines += ["", "─" * WIDTH, ""] if number else []
        if one.trouble:
            lines += heading(one.answer, now) if "started" in one.answer else []
            lines.append(f"coordinator {one.pid or '(process not known)'}: {one.trouble}")
            continue
        try:
            log = tail(Path(one.answer["logs"]), NUM_LOG_LINES)
            lines += lines_of(one.answer, log, now)
        except (LookupError, TypeError, ValueError, AttributeError):
            lines.append(f"coordinator {one.pid}: its answer cannot be read (another form)")
    return [_encodable(line) for line in lines]


def _encodable(line: str) -> str:
    """Return the line with characters that standard output cannot encode replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    return line.encode(encoding, errors="replace").decode(encoding)


def _nobody(pid: int | None) -> str:
    who = "no coordinator of this user" if pid is None else f"no coordinator with process id {pid}"
    last = latest()
    if last is None:
        try:
            where = f"there are no logs in {state_folder()}"
        except OSError as error:
            where = f"there are no logs ({error})"
    else:
        where = f"the last logs are in {last}"
    return f"{who} runs on this machine; {where}"
