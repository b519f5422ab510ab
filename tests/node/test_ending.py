"""How a signal ends a node that was started by hand, while it loads and afterwards."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import leftovers
from tests.programs import ROOT, python

SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}
# A node by hand, with a signal to itself when it imports a module: there, or in a callback of the
# kind that every import has, where whatever is raised is swallowed.
WHILE_IT_IMPORTS = """
import builtins, runpy, signal, sys, weakref
node, module, number, place = sys.argv[1:]
sys.argv[1:] = ["--join", "tcp://127.0.0.1:5998"]
real = builtins.__import__
class Lock: pass
def stop(name, *rest, **more):
    if name == module:
        builtins.__import__ = real
        if place == "callback":
            lock = Lock()
            kept = weakref.ref(lock, lambda _: signal.raise_signal(int(number)))
            del lock
        else:
            signal.raise_signal(int(number))
    return real(name, *rest, **more)
builtins.__import__ = stop
runpy.run_module(node, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("place", ["import", "callback"])
@pytest.mark.parametrize("module", ["proto.installation", "node.process", "typer", "torch"])
def test_a_signal_while_a_node_imports_ends_it_with_a_line(
    module: str, place: str, number: signal.Signals
) -> None:
    done = python(WHILE_IT_IMPORTS, "target_node", module, str(int(number)), place)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"target: {SIGNALS[number]}\n"


@pytest.mark.parametrize("place", ["import", "callback"])
def test_a_signal_when_torch_is_loaded_ends_a_node_with_a_line_too(place: str) -> None:
    number = signal.SIGTERM
    done = python(WHILE_IT_IMPORTS, "target_node", "node.loop", str(int(number)), place)
    assert (done.returncode, done.stderr) == (0, "target: ended by SIGTERM\n")


def test_a_drafter_ends_with_a_line_too() -> None:
    number = signal.SIGTERM
    done = python(WHILE_IT_IMPORTS, "drafter_node", "node.process", str(int(number)), "import")
    assert (done.returncode, done.stderr) == (0, "drafter: ended by SIGTERM\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    end = "import sys; sys.modules['target_node.worker'] = None\n"  # where it would begin to load
    done = python(
        ignoring + end + WHILE_IT_IMPORTS, "target_node", "typer", str(int(signal.SIGHUP)), "import"
    )
    assert done.returncode == 1
    assert "ended by" not in done.stderr


def test_a_node_that_ends_at_once_leaves_no_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ranks-x"
    folder.mkdir()
    (folder / "store").touch()
    leftovers.keep_track_of(str(folder))
    leftovers.remove()
    assert list(tmp_path.iterdir()) == []
    leftovers.remove()  # gone already
    leftovers.forget(str(folder))


# A library that waits in C for what never comes: Python's own handlers do not run meanwhile.
BLOCKED = """
from node.ending import end_at_once_on_signals
end_at_once_on_signals("target")
import ctypes
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
print("blocked", flush=True)
library.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_node_whose_main_thread_waits_in_a_library(number: signal.Signals) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", BLOCKED],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert node.stdout is not None
        assert node.stdout.readline() == "blocked\n"
        node.send_signal(number)
        _, said = node.communicate(timeout=30)
    finally:
        node.kill()
    assert (node.returncode, said) == (0, f"target: {SIGNALS[number]}\n")


# A signal that comes while the main thread gives the device its work, as in a pass.
IN_A_PASS = """
from node.ending import end_at_once_on_signals
end_at_once_on_signals("target")
import signal, time
from engine import running
running.wait_at_end(lambda: print("the device is idle", flush=True))
running.begin()
signal.raise_signal(signal.SIGTERM)
running.end()
time.sleep(30)
"""


def test_a_signal_in_the_middle_of_a_pass_lets_it_come_to_its_end() -> None:
    done = python(IN_A_PASS)
    assert (done.returncode, done.stderr) == (0, "target: ended by SIGTERM\n")
    assert done.stdout == "the device is idle\n"


def test_processes_that_are_left_over_are_killed_even_if_stopped_and_forgotten_ones_are_not() -> (
    None
):
    kept, forgotten = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        kept.send_signal(signal.SIGSTOP)
        for process in (kept, forgotten):
            leftovers.keep_track_of_process(process.pid)
        leftovers.forget_process(forgotten.pid)
        leftovers.end_processes()
        assert kept.wait(10) == -signal.SIGKILL
        assert forgotten.poll() is None
        leftovers.end_processes()  # gone already
    finally:
        leftovers.forget_process(kept.pid)
        for process in (kept, forgotten):
            process.kill()
            process.wait()
