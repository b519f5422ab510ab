"""Whose runtime folder is removed, and when."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from coordinator.launching.runtime_folder import OWNER, PREFIX, RuntimeFolder
from proto.installation import ROOT

KILLED = """
import os, signal
from coordinator.launching.runtime_folder import RuntimeFolder
folder = RuntimeFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
FORKED = """
import os, sys
from coordinator.launching.launcher import Launcher
launcher = Launcher()
child = os.fork()
if child == 0:
    launcher.close()
    sys.exit(0)  # with all that runs at exit
os.waitpid(child, 0)
assert launcher.folder.exists()
print(launcher.folder, flush=True)
if os.fork() == 0:
    print("forked", flush=True)
    os.read(0, 1)  # for as long as the test wants
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_what_a_killed_coordinator_left_goes_when_the_next_one_starts(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    left = Path(done.stdout.strip())
    assert left.parent == place
    assert left.is_dir()
    mine = RuntimeFolder()
    assert list(place.iterdir()) == [mine.path]
    mine.remove()
    assert list(place.iterdir()) == []


def test_a_folder_that_may_be_somebodys_is_left_as_it_is(place: Path) -> None:
    alive = RuntimeFolder()
    unfinished = place / f"{PREFIX}unfinished"
    unfinished.mkdir()
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).touch()
    link = place / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    a_file = place / f"{PREFIX}file"
    a_file.touch()
    mine = RuntimeFolder()
    expected = {alive.path, mine.path, unfinished, elsewhere, link, a_file}
    assert set(place.iterdir()) == expected
    assert (elsewhere / OWNER).exists()
    alive.remove()
    mine.remove()


def test_a_folder_of_another_user_is_left_as_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = place / f"{PREFIX}theirs"
    theirs.mkdir()
    (theirs / OWNER).touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    RuntimeFolder().remove()
    assert theirs.is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    RuntimeFolder().remove()
    assert not theirs.exists()


def test_a_forked_child_neither_removes_the_folder_nor_keeps_it_alive(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    process.wait(30)
    assert process.stdout.readline() == "forked\n"
    assert left.is_dir()
    RuntimeFolder().remove()  # while a child of its owner lives
    assert not left.exists()
    process.communicate("\n")
