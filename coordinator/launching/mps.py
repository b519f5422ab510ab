"""NVIDIA's multi-process service: two processes on one GPU that run beside each other.

Without it the GPU gives its time to one process after the other, and a drafter that runs ahead
stretches the passes of the target. The service is a daemon of the user's own; it is started here
where the only GPU is shared, with its pipe in the coordinator's folder, and ends with the
coordinator, however that ends: a shell waits at the end of a pipe for it. A service that the user
runs already (CUDA_MPS_PIPE_DIRECTORY) is used as it is, and if that is set to nothing there is
none. It changes no setting of the GPU.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from coordinator.launching.groups import kill
from proto.messages import Role

CONTROL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
START_LIMIT_S, STOP_LIMIT_S, POLL_S = 3.0, 3.0, 0.02

# The drafter gets a part of the processors, and its kernels wait for those of the target: its
# steps are small, and what it delays is dearer than what it does.
DRAFTER = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40", "CUDA_MPS_CLIENT_PRIORITY": "1"}

# The end of the pipe on standard input is the end of the coordinator.
_SCRIPT = f"""
trap '' INT TERM
{CONTROL} -f </dev/null & daemon=$!
while read -r _; do :; done
echo quit -t 1 | {CONTROL}
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 $daemon 2>/dev/null || exit 0; sleep 0.1; done
kill -9 $daemon
"""


class Mps:
    """A service that runs, for the nodes of one coordinator."""

    def __init__(self, folder: Path, shell: "subprocess.Popen[bytes] | None") -> None:
        """Use `start`."""
        self._folder = folder
        self._shell = shell

    @classmethod
    def start(cls, folder: Path) -> "Mps | None":
        """Start it with its pipe in `folder`; None: there is none here, or it is not wanted."""
        if (theirs := os.environ.get(PIPE)) is not None:
            return cls(Path(theirs), None) if theirs else None
        if shutil.which(CONTROL) is None:
            return None
        pipe = folder / "mps"
        try:
            pipe.mkdir(mode=0o700)
            with (folder / "mps.log").open("w") as log:
                shell = subprocess.Popen(
                    ["/bin/sh", "-c", _SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, PIPE: str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)},
                    process_group=0,
                )
        except OSError:
            return None
        made = cls(pipe, shell)
        deadline = time.monotonic() + START_LIMIT_S
        while not (pipe / "control").exists():
            if shell.poll() is not None or time.monotonic() > deadline:
                made.stop()
                return None
            time.sleep(POLL_S)
        return made

    def environment(self, role: Role) -> Mapping[str, str]:
        """What a node's process must find in its environment."""
        return {PIPE: str(self._folder), **(DRAFTER if role is Role.DRAFTER else {})}

    def stop(self) -> None:
        """End it, if it was started here."""
        if self._shell is None:
            return
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        try:
            self._shell.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill(self._shell)
            self._shell.wait()

    def disown(self) -> None:
        """In a forked child: it is the parent's."""
        if self._shell is not None and self._shell.stdin is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._shell.stdin.fileno(), inheritable=False)
            os.close(nowhere)
            self._shell = None
