"""Bad input, closed descriptors and signals, as the shell hands them over: one line, no traces."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_faults import GENERATE, ROOT, alive, children, wait_for
from tests.tiny_models import make_model

pytestmark = pytest.mark.process

LIMIT_S = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options for a random model drafted by itself."""
    folder = str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    return ["--target", folder, "--drafter", folder, "--prompt-ids", "5,6,7", "--ignore-eos"]


def in_shell(redirection: str, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with a redirection of the shell, like `2>&-`."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )


def only_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """What was said on standard error: one line."""
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    (line,) = [text for text in done.stderr.decode().splitlines() if ": " in text]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("redirection", "prompt", "line"),
    [
        ("<&-", "-", "standard input is closed"),
        ("</dev/null", "-", "standard input is empty"),
        (">&-", "a", "standard output is closed"),
    ],
)
def test_a_closed_descriptor_is_one_line(redirection: str, prompt: str, line: str) -> None:
    assert line in only_line(in_shell(redirection, *GENERATE, prompt))


@pytest.mark.long
def test_without_standard_input_and_error_the_text_comes_all_the_same(tiny: list[str]) -> None:
    done = in_shell("<&- 2>&-", *GENERATE, *tiny, "--max-tokens", "5")
    assert done.returncode == 0
    assert len(done.stdout.decode().split(",")) == 5


@pytest.mark.long
def test_a_full_device_ends_the_run_with_one_line(tiny: list[str]) -> None:
    done = in_shell(">/dev/full", *GENERATE, *tiny)
    errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert errors == [
        "error: cannot write to standard output: No space left on device; make room there"
    ]
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[*GENERATE, "a"], [sys.executable, "-m", "target_node"]])
def test_too_few_open_files_are_one_line_that_says_what_to_do(command: list[str]) -> None:
    done = in_shell("</dev/null", "bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *command)
    assert only_line(done) == (
        "error: this process may have 24 files open, of which fewer than 32 are left; raise the "
        "limit of open files (ulimit -n)"
    )


@pytest.mark.parametrize("module", ["target_node", "drafter_node"])
@pytest.mark.parametrize("redirection", ["<&-", "</dev/null", "<<< garbage", "<<< [[[", "<<< '[]'"])
def test_a_node_started_by_hand_says_who_starts_it(module: str, redirection: str) -> None:
    line = only_line(in_shell(redirection, sys.executable, "-m", module))
    assert "a coordinator starts it" in line


def test_a_node_does_not_wait_for_a_config_from_a_terminal() -> None:
    terminal, its_end = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "target_node"],
            cwd=ROOT,
            stdin=its_end,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(its_end)
    assert "a coordinator starts it" in only_line(done)


class Started:
    """A coordinator in a session of its own, with a temporary folder of its own."""

    def __init__(self, arguments: list[str], folder: Path, *shell: str) -> None:
        """`shell`: what starts it, if it is not this process."""
        self.folder = folder
        self.process = subprocess.Popen(
            [*shell, *GENERATE, *arguments, "--max-tokens", "600", "--simulate-target-ms", "50"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.nodes: list[int] = []

    def wait_for_nodes(self) -> None:
        """Until both processes are there."""
        assert wait_for(lambda: len(children(self.process.pid)) == 2, LIMIT_S)
        self.nodes = children(self.process.pid)

    def wait_for_text(self) -> None:
        """Until the first characters have come."""
        assert self.process.stdout is not None
        assert self.process.stdout.read(4), "no text came"
        self.nodes = children(self.process.pid)

    def check_end(self, number: signal.Signals = signal.SIGINT) -> None:
        """It was interrupted: it says so, and leaves nothing."""
        _, errors = self.process.communicate(timeout=10)
        assert self.process.returncode == 128 + number
        line = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
        assert errors.splitlines()[-1] == line
        assert "Traceback" not in errors
        assert wait_for(lambda: not any(map(alive, self.nodes)), 5.0)
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def started(tiny: list[str], tmp_path: Path) -> Iterator[Started]:
    """A coordinator that has just been started; it is gone after the test."""
    run = Started(tiny, tmp_path)
    yield run
    run.process.kill()
    run.process.communicate()


@pytest.mark.really
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_while_the_nodes_load_leaves_nothing(
    started: Started, number: signal.Signals
) -> None:
    started.wait_for_nodes()
    os.kill(started.process.pid, number)
    started.check_end(number)


@pytest.mark.really
@pytest.mark.long
def test_impatience_does_not_cut_the_cleaning_up_short(started: Started) -> None:
    started.wait_for_text()
    for _ in range(3):
        os.killpg(started.process.pid, signal.SIGINT)
        time.sleep(0.03)
    started.check_end()


@pytest.mark.really
@pytest.mark.long
def test_a_hang_up_while_text_comes_leaves_nothing(started: Started) -> None:
    started.wait_for_text()
    os.kill(started.process.pid, signal.SIGHUP)
    started.check_end(signal.SIGHUP)


@pytest.mark.long
def test_a_background_job_of_nohup_ignores_what_it_should_and_ends_on_sigterm(
    tiny: list[str], tmp_path: Path
) -> None:
    started = Started(tiny, tmp_path, "bash", "-c", 'trap "" INT HUP; exec "$@"', "bash")
    try:
        started.wait_for_text()
        assert started.process.stdout is not None
        for number in (signal.SIGINT, signal.SIGHUP):
            os.killpg(started.process.pid, number)
            assert len(started.process.stdout.read(100)) == 100, "the text broke off"
        assert started.process.poll() is None
        os.kill(started.process.pid, signal.SIGTERM)
        started.check_end(signal.SIGTERM)
    finally:
        started.process.kill()
        started.process.communicate()
