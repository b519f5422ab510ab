"""`python -m coordinator status`: how the coordinators of this user on this machine are."""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.status.asking import MAX_COORDINATORS, Found, ask, folders
from coordinator.cli.status.screen import WIDTH, heading, lines_of
from coordinator.cli.writers import write_out
from coordinator.launching.logs import latest, state_folder, tail
from proto.errors import NodeError

NUM_LOG_LINES = 5
EXIT_TROUBLE = 1

Pid = Annotated[
    int | None,
    typer.Argument(metavar="PID", help="Of one coordinator. Default: all are shown."),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output, with every figure.")
]


def status(pid: Pid = None, as_json: Json = False) -> None:
    """Show the coordinators that run here: their nodes, texts, links, restarts and logs.

    Exits with 1 where none runs, or one does not answer.
    """
    asked = folders()[:MAX_COORDINATORS]
    # At the same time: each that hangs would take seconds.
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
    """The line as standard output can show it."""
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
