"""What the command line's process does besides its work: signals, memory, what it can write."""

import io
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.cli import app as command_line
from coordinator.cli import process
from coordinator.launching import launcher
from coordinator.launching.launcher import LIMITED_MEMORY, MORE_MEMORY
from proto.messages import Role
from tests.programs import ROOT, python

SIGNALS = {
    signal.SIGINT: (130, "interrupted\n"),
    signal.SIGTERM: (143, "ended by SIGTERM\n"),
    signal.SIGHUP: (129, "ended by SIGHUP\n"),
}
# The command line, with a signal to itself when it imports a module.
WHILE_IT_IMPORTS = """
import builtins, os, runpy, sys
real = builtins.__import__
def stop(name, *rest, **more):
    if name == sys.argv[1]: os.kill(os.getpid(), int(sys.argv[2]))
    return real(name, *rest, **more)
builtins.__import__ = stop
runpy.run_module("coordinator.__main__", run_name="__main__")
"""
# The same with a command that is complete when the signal comes.
WHEN_ALL_IS_SAID = """
import os, runpy, sys
number = int(sys.argv[1])
sys.argv[1:] = ["--version"]
class Last:
    def __del__(self):  # when the interpreter takes its modules to pieces
        os.kill(os.getpid(), number)
if {late}:
    last = Last()
else:
    end = sys.exit
    def leave(status):
        os.kill(os.getpid(), number)
        end(status)
    sys.exit = leave
runpy.run_module("coordinator.__main__", run_name="__main__")
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["coordinator.cli.app", "typer", "rich.table"])
def test_a_signal_during_the_imports_ends_with_a_line(number: int, module: str) -> None:
    done = python(WHILE_IT_IMPORTS, module, str(int(number)))
    assert (done.returncode, done.stderr) == SIGNALS[signal.Signals(number)]
    assert done.stdout == ""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_work_ends_with_a_line(number: int) -> None:
    done = python(WHEN_ALL_IS_SAID.format(late=False), str(int(number)))
    assert (done.returncode, done.stderr) == SIGNALS[signal.Signals(number)]
    assert done.stdout.startswith("slipstream ")


def test_a_signal_at_the_very_end_changes_nothing() -> None:
    done = python(WHEN_ALL_IS_SAID.format(late=True), str(int(signal.SIGINT)))
    assert (done.returncode, done.stderr) == (0, "")


def test_after_a_signal_nobody_waits_for_threads_that_still_work() -> None:
    working = """
import runpy, signal, threading
from coordinator.cli import app
def serve(*_: object) -> int:
    threading.Thread(target=threading.Event().wait, args=(50,)).start()
    print("ready")
    return 128 + signal.SIGTERM
app.main = serve
runpy.run_module("coordinator.__main__", run_name="__main__")
"""
    begun = time.monotonic()
    done = python(working)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "ready\n")
    assert time.monotonic() - begun < 40


def test_what_hangs_after_a_signal_does_not_keep_the_process() -> None:
    hanging = """
import contextlib, os, signal, threading
from coordinator.cli import process
process.END_LIMIT_S = 0.3
with contextlib.suppress(KeyboardInterrupt), process.Interruption():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        threading.Event().wait(60)  # as a node that cannot be ended, or a thread that is joined
"""
    assert python(hanging).returncode == -signal.SIGALRM


def test_what_is_ignored_stays_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = python(ignoring + WHEN_ALL_IS_SAID.format(late=False), str(int(signal.SIGHUP)))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_a_command_has_its_own_status(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> None:
        os.kill(os.getpid(), number)

    before = [signal.getsignal(one) for one in SIGNALS]
    monkeypatch.setattr(sys, "argv", ["coordinator", "command"])
    status = command_line.main(plugins=(command,))
    assert (status, capsys.readouterr().err) == SIGNALS[signal.Signals(number)]
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "nothing ends this process later"


def within(kilobytes: int) -> "subprocess.CompletedProcess[str]":
    """`generate` with so much memory for each of its processes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (kilobytes << 10, kilobytes << 10))

    command = [sys.executable, "-m", "coordinator", "generate", "def f(x):", "--max-tokens", "2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done


@pytest.mark.parametrize("kilobytes", [16_000, 32_000, 60_000, 100_000])
def test_too_little_memory_is_one_line(kilobytes: int) -> None:
    assert within(kilobytes).stderr == process.NO_MEMORY


@pytest.mark.parametrize("kilobytes", [140_000, 160_000, 200_000, 220_000, 300_000])
def test_too_little_memory_for_the_nodes_is_told_as_that_and_not_as_an_interruption(
    kilobytes: int,
) -> None:
    *others, last = within(kilobytes).stderr.splitlines()
    assert last + "\n" == process.NO_MEMORY or MORE_MEMORY in last or LIMITED_MEMORY in last
    for line in others:  # what can be gone without
        assert line.startswith(("the drafter process ", "`status` cannot ask this coordinator: "))


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize(
    ("words", "status", "is_told"),
    [
        ("RuntimeError: something that nobody expected", 1, True),
        ("torch.AcceleratorError: the same", 1, True),
        ("", -signal.SIGSEGV, True),
        ("", -signal.SIGKILL, False),  # by somebody
        ("error: no model at /models/x", 1, False),  # it knows why
    ],
)
def test_what_nobody_expected_may_come_of_limited_memory(
    words: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_told: bool,
    is_limited: bool,
) -> None:
    monkeypatch.setattr(launcher, "is_limited", lambda: is_limited)
    log = tmp_path / "log"
    log.write_text(words)
    how = f"kill {status} $$" if status < 0 else f"exit {status}"
    with subprocess.Popen(["sh", "-c", how], text=True) as ended:
        ended.wait()
    node = launcher.NodeProcess("t1", Role.TARGET, ended, log)
    told = node.obituary("target")
    assert told is not None
    assert told.status == status
    assert (launcher.LIMITED_MEMORY in told.line) is (is_told and is_limited)


def test_an_import_that_fails_for_another_reason_is_not_taken_for_a_lack_of_memory() -> None:
    assert not process.is_lack_of_memory(ImportError("no module named x"))
    mapped = ImportError("x.so: failed to map segment from shared object")
    because = ImportError("numpy could not be loaded")
    because.__cause__ = mapped
    assert process.is_lack_of_memory(because)
    assert process.is_lack_of_memory(MemoryError())
    assert process.is_lack_of_memory(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_an_output_cannot_encode_is_replaced(
    errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", output)
    process.prepare_streams()
    output.write("a⏎│\ud800é")
    output.flush()
    assert written.getvalue() == b"a????"


def test_who_has_said_what_replaces_a_sign_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="namereplace")
    monkeypatch.setattr(sys, "stdout", output)
    process.prepare_streams()
    assert output.errors == "namereplace"


def test_the_help_of_every_kind_can_be_shown_in_ascii() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    for arguments in ([], ["generate", "--help"], ["no-such-command-é"]):
        done = subprocess.run(
            [sys.executable, "-m", "coordinator", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=env,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert done.stdout + done.stderr
