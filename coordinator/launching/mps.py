"""Starts NVIDIA's multi-process service (MPS), which lets two processes compute on one GPU at once.

Without MPS the GPU gives its time to one process after the other, and a drafter that runs ahead
makes the passes of the target longer. The service is a daemon that runs as this user. It is started
where two nodes share a GPU, with its pipe in the coordinator's folder, and ends with the
coordinator, however that ends: a shell waits for the end of a pipe and then stops the daemon. A
service that the user runs already (CUDA_MPS_PIPE_DIRECTORY) is used as it is; if that variable is
set but empty, no service is used. A small client tests a service before any node relies on it. MPS
changes no setting of the GPU.

A daemon whose CUDA_VISIBLE_DEVICES are numbers numbers its GPUs anew from 0, and its clients choose
among those new numbers: with `1` for both, no GPU is left. So daemon and clients get UUIDs, which
name a GPU independently of any order. Where the UUIDs are not known, the daemon's variable is not
set.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.launching.groups import kill
from proto.messages import Role

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
START_LIMIT_S, STOP_LIMIT_S, POLL_S = 3.0, 3.0, 0.02
CLIENT_LIMIT_S = 20.0  # the first client waits for the daemon to start a server

# The drafter's kernels wait for those of the target: a delayed target pass costs more than a
# delayed draft step. Its share of the GPU is not limited (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): with
# 40 % of the multiprocessors cuBLAS computed NaN from finite numbers (H200, CUDA 13.0).
DRAFTER = {"CUDA_MPS_CLIENT_PRIORITY": "1"}

# Standard input of this script is a pipe that closes when the coordinator ends.
_SCRIPT = f"""
trap '' INT TERM
{CONTROL} -f </dev/null & daemon=$!
while read -r _; do :; done
echo quit -t 1 | {CONTROL}
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 $daemon 2>/dev/null || exit 0; sleep 0.1; done
kill -9 $daemon
"""

# Allocates a little memory of GPU N through the driver alone: torch takes seconds to import.
_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for name, arguments in (
    ("cuInit", (0,)),
    ("cuDeviceGet", (ctypes.byref(device), int(sys.argv[1]))),
    ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ("cuCtxSetCurrent", (context,)),
    ("cuMemAlloc_v2", (ctypes.byref(memory), ctypes.c_size_t(1 << 20))),
    ("cuMemsetD8_v2", (memory, ctypes.c_ubyte(0), ctypes.c_size_t(1 << 20))),
    ("cuCtxSynchronize", ()),
):
    if status := getattr(cuda, name)(*arguments):
        sys.exit(f"{name} fails with status {status}")
cuda.cuDevicePrimaryCtxRelease_v2(device)
"""


class Mps:
    """An MPS service that runs, used by the nodes of one coordinator that share a GPU."""

    def __init__(
        self,
        folder: Path,
        shell: "subprocess.Popen[Any] | None",
        visible: Mapping[str, str],
    ) -> None:
        """Keep what `start` has made; call `start`, not this.

        folder   the folder of the service's pipe
        shell    the process that ends the daemon; None: the service is the user's own
        visible  variables that name the GPUs by UUID for the clients; empty: not known
        """
        self._folder = folder
        self._shell = shell
        self._visible = visible

    @classmethod
    def start(cls, folder: Path, visible: Sequence[str], device: int) -> "Mps | None":
        """Start MPS and return it; None if it is not wanted or does not work here.

        folder   where the service's pipe is made
        visible  the GPUs that the nodes see, in their order (`devices.visible_gpus`)
        device   index in `visible` of a GPU that both nodes share; a test client runs on it

        If MPS does not work, one warning says why, and the nodes run without it.
        """
        theirs = os.environ.get(PIPE)
        if theirs == "":
            return None
        made: Mps | None = None
        if theirs is not None:
            made, problem = cls(Path(theirs), None, {}), ""
        else:
            made, problem = cls._of_our_own(folder, visible)
        if made is not None and (problem := made._tried(device)):
            made.stop()
            made = None
        if made is None:
            logger.warning("both nodes share a GPU in turns: without MPS (%s)", problem)
        return made

    @classmethod
    def _of_our_own(cls, folder: Path, visible: Sequence[str]) -> "tuple[Mps | None, str]":
        """Start a daemon and wait until it listens; return (it, "") or (None, reason)."""
        if shutil.which(CONTROL) is None:
            return None, f"{CONTROL} is not installed"
        have_uuids = all(name.startswith(("GPU-", "MIG-")) for name in visible)
        of_both = {VISIBLE: ",".join(visible)} if have_uuids else {}
        given = {name: value for name, value in os.environ.items() if name != VISIBLE}
        pipe = folder / "mps"
        try:
            pipe.mkdir(mode=0o700, exist_ok=True)
            with (folder / "mps.log").open("w") as log:
                shell = subprocess.Popen(
                    ["/bin/sh", "-c", _SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**given, **of_both, PIPE: str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)},
                    process_group=0,
                )
        except OSError as error:
            return None, str(error)
        made = cls(pipe, shell, of_both)
        deadline = time.monotonic() + START_LIMIT_S
        while not (pipe / "control").exists():
            if shell.poll() is not None or time.monotonic() > deadline:
                made.stop()
                return None, f"{CONTROL} does not start"
            time.sleep(POLL_S)
        return made, ""

    def _tried(self, device: int) -> str:
        """Run a test client on GPU `device`; return why it failed, or "" if it worked."""
        command = [sys.executable, "-I", "-c", _CLIENT, str(device)]
        given = {**os.environ, **self.environment(Role.DRAFTER)}
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=given,
                timeout=CLIENT_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it answers no client in {CLIENT_LIMIT_S:.0f} s"
        except OSError as error:
            return str(error)
        if ended.returncode == 0:
            return ""
        lines = ended.stderr.strip().splitlines() or ["no reason was given"]
        return f"a client cannot use it: {lines[-1][:200]}"

    def environment(self, role: Role) -> Mapping[str, str]:
        """Return the environment variables for the process of a node that shares its GPU."""
        of_drafter = DRAFTER if role is Role.DRAFTER else {}
        return {PIPE: str(self._folder), **self._visible, **of_drafter}

    def stop(self) -> None:
        """End the daemon, if it was started here; a service of the user's own goes on."""
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
        """In a forked child: let go of the daemon, which belongs to the parent."""
        if self._shell is not None and self._shell.stdin is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._shell.stdin.fileno(), inheritable=False)
            os.close(nowhere)
            self._shell = None
