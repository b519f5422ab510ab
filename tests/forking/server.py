"""The process from which programs are forked, and what a forked process does first.

The requests come through a Unix socket, each with three descriptors: standard input, output and
errors. The server forks twice. The process between ends at once, so that the new process becomes a
child of the nearest of its ancestors that adopts orphans (`PR_SET_CHILD_SUBREAPER`), and that is
whoever asked. A coordinator that was forked gets a server of its own for its nodes, forked before
the coordinator has any threads.
"""

import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Nodes of tests, with a mistake or something played in them.
OF_TESTS = "tests.process."
TEST_NODES = (
    *("biased_target", "failing_drafter", "failing_heads", "hasty_gpu", "hostile_drafter"),
    *("hostile_target", "inexact_target", "played_gpu"),
)
# They start no other program of ours.
LEAVES = (
    *("target_node", "drafter_node", "lab.synthetic.node", "lab.synthetic.one_process"),
    *("lab.experiments.peers.one_process", "tests.forking.shown"),
    *(OF_TESTS + name for name in TEST_NODES),
)
PROGRAMS = ("coordinator", *LEAVES)
MAX_BYTES = 1 << 17  # of a request: an environment and arguments
ADOPTION_LIMIT_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# What Python itself has ignored since its start.
OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MOST_PASSED = 4  # further descriptors
ABOVE_PASSED = 900  # a number above theirs; nothing else is open beyond it
MAX_NAME = 15  # characters that the kernel keeps of a name
NAME = "fork-server"  # as in /proc/PID/comm; programs have the names of their modules there


@dataclass(frozen=True, slots=True)
class Start:
    """What a forked process is to be.

    parent         process id of whoever asks
    process_group  0: a new one; -1: that of the server, which is that of whoever asks
    ignored        numbers of the signals that are ignored there
    blocked        numbers of the signals that are blocked there
    cores          on which it may run
    passed         numbers of further descriptors that it has
    """

    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    parent: int
    process_group: int
    is_new_session: bool
    ignored: Sequence[int]
    blocked: Sequence[int]
    cores: Sequence[int]
    umask: int
    passed: Sequence[int] = ()

    def to_json(self) -> bytes:
        """As it crosses the socket."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def is_server(pid: int) -> bool:
    """True if this process is one from which programs are forked."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    except OSError:
        return False


def command_of(pid: int) -> str:
    """Return the command line of a process; of one that was forked, its module. Raises OSError."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    for module in PROGRAMS:
        if name_of(module) == name:
            return module
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def name_of(module: str) -> str:
    """The name of a program's processes."""
    return module.removeprefix(OF_TESTS)[:MAX_NAME]


def num_threads() -> int:
    """How many threads this process has, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def load() -> None:
    """Import what the programs import; the process must not have a second thread afterwards."""
    import transformers.models.llama.modeling_llama
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import coordinator.cli.app
    import drafter_node.worker
    import node.joining
    import node.loading
    import node.loop
    import target_node.home_worker
    import target_node.worker
    from coordinator.cli import plugins

    assert AutoModelForCausalLM, AutoTokenizer
    assert transformers.models.llama.modeling_llama, coordinator.cli.app
    assert drafter_node.worker, target_node.worker
    assert target_node.home_worker
    assert node.loop, node.joining
    plugins.commands()
    # OpenBLAS ends its threads before a fork, and begins new ones when it needs them.
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    if num_threads() != 1:
        raise SystemExit("a library has started threads: no process may be forked from here")
    gc.collect()
    gc.freeze()


def serve(channel: socket.socket) -> tuple[Start, list[int]] | None:
    """Fork a process for each request; None once nobody can ask any more.

    In a forked process it returns what that process is to be, and its descriptors.
    """
    while True:
        try:
            said, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 3 + MOST_PASSED)
        except ConnectionResetError:
            return None
        if not said:
            return None
        start = Start(**json.loads(said))
        pid = _forked(start)
        if pid == 0:
            channel.close()
            return start, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(pid).encode())


def _forked(start: Start) -> int:
    """Fork a process that is nobody's child; return its id, or 0 in the new process."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(reading)
        if start.is_new_session:
            os.setsid()
        if start.process_group >= 0:
            os.setpgid(0, start.process_group)
        os.write(writing, str(os.getpid()).encode())
        os.close(writing)
        return 0
    os.close(writing)
    os.waitpid(between, 0)
    pid = int(os.read(reading, 16))
    os.close(reading)
    return pid


def become(start: Start, descriptors: Sequence[int]) -> None:
    """Make this forked process what a new Python would be, for what is to be seen of it."""
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, ABOVE_PASSED) for one in descriptors[3:]]
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, ABOVE_PASSED)
    os.closerange(ABOVE_PASSED + len(high), os.sysconf("SC_OPEN_MAX"))
    for number, descriptor in zip(start.passed, high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for each in signal.valid_signals() - OF_PYTHON - {signal.SIGKILL, signal.SIGSTOP}:
        if each in start.ignored:
            signal.signal(each, signal.SIG_IGN)
        elif each == signal.SIGINT:
            signal.signal(each, signal.default_int_handler)
        elif signal.getsignal(each) is not signal.SIG_DFL:
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)
    os.sched_setaffinity(0, start.cores)
    os.umask(start.umask)
    os.environ.clear()
    os.environ.update(start.environment)
    tempfile.tempdir = None  # found anew, by this environment
    Path("/proc/self/comm").write_text(name_of(start.module))
    sys.orig_argv = [sys.executable, "-m", start.module, *start.arguments]
    sys.argv = ["-m", *start.arguments]
    _open_standard_streams()
    deadline = time.monotonic() + ADOPTION_LIMIT_S
    while os.getppid() != start.parent and time.monotonic() < deadline:
        time.sleep(0.0005)


def _open_standard_streams() -> None:
    """Make these streams anew, as Python does at its start: they know what they lead to."""
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        old = getattr(sys, name)
        is_unbuffered = old.write_through and mode == "wb"  # PYTHONUNBUFFERED
        new = io.TextIOWrapper(
            open(number, mode, 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=not is_unbuffered and (name == "stderr" or os.isatty(number)),
            write_through=is_unbuffered,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def run(start: Start, descriptors: Sequence[int]) -> None:
    """Be the program that was asked for, to its end."""
    become(start, descriptors)
    if start.module not in LEAVES:
        _fork_own_server()
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


def _fork_own_server() -> None:
    """Fork a server for what this process will start, as long as it has no threads."""
    from tests.forking import popen

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        popen.install(popen.Server(ours))
        return
    ours.close()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    if os.getppid() == parent:
        _serve_to_the_end(theirs)
    os._exit(0)  # the coordinator's own end is not run twice


def _serve_to_the_end(channel: socket.socket) -> None:
    """Serve; in a forked process, be the program and end."""
    for each in DEADLY:  # they are for the process group's programs
        signal.signal(each, signal.SIG_IGN)
    Path("/proc/self/comm").write_text(NAME)
    asked = serve(channel)
    if asked is not None:
        run(*asked)
        sys.exit()


if __name__ == "__main__":
    load()
    _serve_to_the_end(socket.socket(fileno=int(sys.argv[1])))
