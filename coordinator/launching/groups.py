"""Ends a process together with its process group: all that it has started (`process_group=0`).

Child processes are in the group of the process that started them, so they can be killed even where
that process has ended, hangs or was stopped.
"""

import contextlib
import os
import signal
import subprocess
from typing import Any

Leader = subprocess.Popen[Any]
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # ask whether it ended, but do not reap it


def has_ended(leader: Leader) -> bool:
    """True if the process has ended; then kill what is left of its process group."""
    if leader.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):  # somebody else reaped it: `poll` knows
        if os.waitid(os.P_PID, leader.pid, ENDED) is None:
            return False
        kill(leader)  # until `poll` reaps it, no other group can have this number
    return leader.poll() is not None


def kill(leader: Leader) -> None:
    """Send SIGKILL to the whole process group.

    Call it only while the leader has not been reaped, so that the group's number is still its own.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
