"""Writes the file of a trace, as a whole or not at all."""

import json
import os
import platform
import socket
from pathlib import Path
from typing import Any, TextIO

from coordinator.tracing.chrome import chrome_trace
from coordinator.tracing.tape import Recording
from coordinator.tracing.timeline import timeline_of
from proto.errors import OutputError
from proto.system import cannot_write


def trace_of(recording: Recording, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the Chrome trace of a recording that was made on this host."""
    host = socket.gethostname()
    machine = {"host": host, "system": platform.platform(), "num_cpus": os.cpu_count()}
    about = {"machine": machine, "settings": settings}
    return chrome_trace(timeline_of(recording, host), about)


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace to a file; on an error, remove the file. Raises OutputError."""
    failed = f"the trace cannot be written to {path}"
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{failed}: {cannot_write(error)}") from error
    try:
        with file:
            _write_to(file, trace)
    except OSError as error:
        why = f"{cannot_write(error)}{_removed(path.resolve())}"
        raise OutputError(f"{failed}: {why}") from error
    except BaseException:  # for example Ctrl-C
        _removed(path.resolve())
        raise


def _write_to(file: TextIO, trace: dict[str, Any]) -> None:
    others = {name: value for name, value in trace.items() if name != "traceEvents"}
    file.write('{"traceEvents": [')
    for index, event in enumerate(trace["traceEvents"]):
        file.write(",\n" if index else "\n")
        file.write(json.dumps(event, separators=(",", ":")))
    file.write("\n], " + json.dumps(others)[1:] + "\n")


def _removed(path: Path) -> str:
    """Remove a partly written file; return words on that for an error message, or ""."""
    if not path.is_file():
        return ""  # not a regular file, such as a device
    try:
        path.unlink()
    except OSError:
        return " (the file is cut off)"
    return " (what there was of it has been removed)"
