"""Open files and sockets: how many a process needs, and what to do where it gets no more."""

import os
import resource

from proto.errors import TransportError
from proto.system_errors import RAISE_THE_LIMIT

SPARE = 32  # what any of our processes opens besides what it has, with a margin: 18 were counted


def check_spare() -> None:
    """Raises TransportError if this process may not open what it will need.

    Asked before anything is opened: where the limit is met in the middle, ZeroMQ ends the process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - _num_open(limit) < SPARE:
        raise TransportError(
            f"this process may have {limit} files open, of which fewer than {SPARE} are left; "
            f"{RAISE_THE_LIMIT}"
        )


def _num_open(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this one could be opened
        return limit
