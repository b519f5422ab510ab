"""Checks that a Ray cluster may be at an address before Ray is imported, which takes seconds.

The process that listens there may still be no cluster, or one that needs a token: `ray_launcher.py`
reports that.
"""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from proto.errors import TransportError

AUTO = "auto"
CONNECT_LIMIT_S = 1.5
UP = "bring one up (docs/cluster.md), or leave --ray out: then both processes run on this machine"
_STARTED_WITH = re.compile(rb"--gcs[-_]address=([^\s\0]+:\d+)")


def check(address: str) -> None:
    """Raise TransportError if no process listens at the address.

    address  HOST:PORT, or auto: the address in RAY_ADDRESS, or the cluster that this machine is in
    """
    if address != AUTO:
        _connect(address)
        return
    stated = os.environ.get("RAY_ADDRESS", "")
    if ":" in stated:
        _connect(stated.rpartition("/")[2])
    elif stated in ("", AUTO) and not _was_started() and not any(_running()):
        raise TransportError(f"--ray auto: no Ray cluster runs on this machine; {UP}")


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_LIMIT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TransportError(f"there is no Ray cluster at {address} ({why}); {UP}") from error


def _was_started() -> bool:
    """True if `ray start` has left the address of a cluster on this machine."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    return (folder / "ray_current_cluster").exists()


def _running() -> Iterator[str]:
    """Yield the cluster addresses that processes of Ray on this machine were started with."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found = _STARTED_WITH.search(path.read_bytes())
        except OSError:
            continue
        if found:
            yield found[1].decode(errors="replace")
