"""Processes that lead a group of their own (`process_group=0`): they are ended with all of it.

What such a process starts is in its group as well, so it can be killed even where the process
itself has gone, hangs or was stopped.
"""

import contextlib
import os
import signal
import subprocess
from typing import Any

Leader = subprocess.Popen[Any]
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # asked without taking note


def has_ended(leader: Leader) -> bool:
    """Whether the process has. Then what it had started is killed as well."""
    if leader.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):  # somebody else took note: `poll` knows
        if os.waitid(os.P_PID, leader.pid, ENDED) is None:
            return False
        kill(leader)  # until `poll` takes note, the number of the group is nobody else's
    return leader.poll() is not None


def kill(leader: Leader) -> None:
    """Kill the whole group, in whatever state its processes are. It is not known to have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
