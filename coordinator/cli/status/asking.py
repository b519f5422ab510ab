"""Finds the coordinators of this user on this machine, and asks each how it is.

Every wait has a limit. What comes from a socket is read up to a limit, and is only believed as far
as it has the form that it should have.
"""

import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cluster.snapshot import FORM
from coordinator.cluster.status_socket import LIMIT_S as SERVED_IN_S
from coordinator.cluster.status_socket import MAX_ANSWER_BYTES, NAME, REQUEST, peer_of
from coordinator.launching.logs import runtime_folders
from coordinator.launching.runtime_folder import PREFIX, has_owner

LIMIT_S = 5.0  # longer than a coordinator takes to say that its loop hangs
AGAIN_S = 0.1
MAX_COORDINATORS = 64


@dataclass(frozen=True, slots=True)
class Found:
    """A coordinator.

    answer   what it has said; empty: nothing that can be understood
    trouble  why not; empty: all is well
    """

    folder: Path
    pid: int
    answer: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


def folders() -> list[Path]:
    """The runtime folders of all coordinators that run, in a fixed order."""
    try:
        here = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    except OSError:
        here = []
    known = {*here, *runtime_folders()}
    return sorted(one for one in known if has_owner(one) and (one / NAME).exists())


def ask(folder: Path, limit_s: float = LIMIT_S) -> Found | None:
    """What the coordinator of this folder says; None: it has just ended."""
    deadline = time.monotonic() + limit_s
    pid = 0
    while True:
        try:
            pid, read = _exchange(folder, deadline)
        except TimeoutError:
            return Found(folder, pid or _listener(folder), trouble=_hung(limit_s))
        except BlockingIOError:
            read = b""  # so many ask that one more cannot even wait
        except OSError as error:
            if not has_owner(folder):
                return None
            if time.monotonic() > deadline:
                return Found(folder, pid, trouble=f"it cannot be asked ({error})")
            read = b""
        if read:
            return _understood(folder, pid, read)
        if time.monotonic() > deadline:  # it had no place for one more question
            return Found(folder, pid, trouble=_hung(limit_s))
        time.sleep(AGAIN_S)


def _hung(limit_s: float) -> str:
    return f"it has not answered for {limit_s:.0f} s; it is stopped, or hangs"


def _exchange(folder: Path, deadline: float) -> tuple[int, bytes]:
    """Process id and answer. Raises OSError, TimeoutError."""
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
    """The process that listens there, whether or not it answers; 0: not known."""
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
