"""`subprocess.Popen` for tests: programs of ours are forked from a server, all others started."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from node.starting import PAGES, THREADS
from tests.forking.server import MOST_PASSED, PR_SET_CHILD_SUBREAPER, PROGRAMS, Start, prctl

ROOT = Path(__file__).resolve().parents[2]
ANSWER_LIMIT_S = 120.0  # the first answer comes when everything is imported
END_LIMIT_S = 10.0
REALLY = subprocess.Popen
# Libraries read variables that begin like this when they are loaded, or Python at its start.
AT_LOAD = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LD_", "THP_", "ONEDNN_"),
    *("TORCH_", "PYTORCH_", "CUDA_", "NCCL_", "ATEN_", "DNNL_", "HF_", "HUGGING", "TRANSFORMERS_"),
    *("XDG_CACHE_HOME", "PYTHON", "LANG", "LC_", "TZ", "VIRTUAL_ENV", "PATH", "HOME"),
)
LIMITS = tuple(each for name, each in vars(resource).items() if name.startswith("RLIMIT_"))


class Server:
    """The process that forks, as seen by whoever asks it. It is started when first asked."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        """channel: to a server that runs already, forked from this process."""
        self.environment: Mapping[str, str] = dict(os.environ)  # in which it is started
        self._channel = channel
        self._limits = limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def forks(self, start: Start) -> bool:
        """True if a process forked from it is what a new Python would be."""
        its = at_load(start.environment)
        return its == at_load(self.environment) and limits() == self._limits

    def fork(self, start: Start, descriptors: list[int]) -> int:
        """Fork a process that is a child of this one; return its id. Raises OSError."""
        with self._lock:
            if self._channel is None:
                self._channel = self._started()
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [start.to_json()], descriptors)
                answer = self._channel.recv(16)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise OSError("the process from which programs are forked has ended")
        return int(answer)

    def _started(self) -> socket.socket:
        """Start the process with what a node's environment has when it loads its libraries."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(ANSWER_LIMIT_S)
        environment = {**PAGES, **self.environment}
        if not THREADS.keys() & environment.keys():
            environment.update(THREADS)
        with its:
            self._process = REALLY(
                [sys.executable, "-m", "tests.forking.server", str(its.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
            )
        return own

    def close(self) -> None:
        """End the process, if it was started."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
            self._process.kill()
            self._process.wait()


def at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment libraries read when they are loaded."""
    return {name: text for name, text in environment.items() if name.startswith(AT_LOAD)}


def limits() -> list[tuple[int, int]]:
    """Every limit that this process has, and that its children inherit."""
    return [resource.getrlimit(number) for number in LIMITS]


class Forking(subprocess.Popen):
    """Asks the server for programs of ours; starts others."""

    server: ClassVar[Server | None] = None

    def _execute_child(self, *given: Any) -> None:
        """As `subprocess.Popen` has it (3.11, 3.12)."""
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = given
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *rest = rest
        gid, gids, uid, umask, start_new_session, process_group = rest
        is_plain = not (executable or preexec_fn or shell) and len(pass_fds) <= MOST_PASSED
        is_same_user = gid is None and gids is None and uid is None and umask == -1
        start = None
        if is_plain and is_same_user:
            start = start_of(
                *(args, cwd, env, process_group),
                is_new_session=start_new_session,
                passed=sorted(pass_fds),
            )
        if start is None or self.server is None or not self.server.forks(start):
            return super()._execute_child(*given)
        sources = [p2cread, c2pwrite, errwrite]
        used = [own if own != -1 else number for number, own in enumerate(sources)]
        self.pid = self.server.fork(start, [*used, *start.passed])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def start_of(
    args: object,
    cwd: object,
    env: Mapping[str, str] | None,
    group: int,
    *,
    is_new_session: bool,
    passed: Sequence[int] = (),
) -> Start | None:
    """What is to be forked; None: this is no program of ours, or it runs in another folder."""
    if not isinstance(args, list | tuple):
        return None
    words = [os.fspath(word) for word in args]
    if words[:2] != [sys.executable, "-m"] or not {*words[2:3]} & {*PROGRAMS}:
        return None
    if Path(str(cwd) if cwd else ".").resolve() != ROOT:
        return None
    return Start(
        module=words[2],
        arguments=words[3:],
        environment=dict(os.environ if env is None else env),
        parent=os.getpid(),
        process_group=group,
        is_new_session=is_new_session,
        ignored=[n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        cores=list(os.sched_getaffinity(0)),
        umask=_umask(),
        passed=passed,
    )


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("Umask:")[1].split()[0], 8)


def install(server: Server | None) -> None:
    """Let `subprocess.Popen` ask this server from now on; None: start everything really."""
    Forking.server = server
    subprocess.Popen = REALLY if server is None else Forking  # type: ignore[misc]


@contextmanager
def forking(server: Server | None) -> Iterator[None]:
    """Let programs of ours be forked from a server inside; None: let none be forked."""
    before = Forking.server
    install(server)
    try:
        yield
    finally:
        install(before)
