"""The C++ library is compiled once, by whoever comes first, and a process has it or has it not."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import cpu_library
from engine.cpu_library import compile_in_background, library, library_name

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
ALL = [*(source.stem for source in cpu_library.SOURCES), ""]  # what is compiled, and linked

# Beside other tests a process that takes what others leave would get nothing for minutes.
BRISK = ("as it;", "as it; it._IDLE = 0;")
# Notes each call in a file, then waits as long as a real compiler might.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && {{ echo a compiler; exit 0; }}
echo "$TMPDIR $*" >> {calls}
sleep {seconds}
{then}
"""


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "_BEHIND", cpu_library._BEHIND.replace(*BRISK))
    cpu_library.forget()
    yield
    for process in cpu_library._running:
        process.wait(LIMIT_S)
    cpu_library._running.clear()
    cpu_library.forget()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """compiler(then, seconds=0.0): a compiler that does `then`; returns the file of its calls."""

    def make(then: str, seconds: float = 0.0) -> Path:
        calls, program = tmp_path / "calls", tmp_path / "compiler"
        program.write_text(COMPILER.format(calls=calls, seconds=seconds, then=then))
        program.chmod(0o700)
        monkeypatch.setenv("CXX", str(program))
        monkeypatch.setattr(cpu_library, "cpu_flags", lambda: cpu_library.NEEDED)
        return calls

    return make


def real(folder: Path) -> str:
    """Return what a shell runs to compile a small library, with the options it was given."""
    source = folder / "small.c"
    source.write_text("int slipstream_product(void) { return 0; }\n")
    name = os.environ.get("REAL_CXX", "g++")
    return f'for out; do :; done; exec {name} -shared -fPIC {source} -o "$out"'


def sources(calls: Path) -> list[str]:
    """Return what was compiled, in its order; "": the library was linked."""
    lines = calls.read_text().splitlines()
    return ["".join(re.findall(r"/(\w+)\.cpp ", line)) for line in lines]


def wait_for_the_compiler() -> None:
    (process,) = cpu_library._running
    assert process.wait(LIMIT_S) == 0


def products(folder: Path) -> list[Path]:
    return list((folder / "slipstream" / "products").glob("*.so"))


def test_a_start_does_not_wait_and_the_next_one_has_the_library(tmp_path: Path) -> None:
    if (why := cpu_library.why_not_here()) is not None:
        pytest.skip(why)
    started = time.monotonic()
    assert compile_in_background()
    assert time.monotonic() - started < 5.0
    wait_for_the_compiler()
    assert len(products(tmp_path)) == 1
    assert library(compiles=False) is not None
    assert library_name() == products(tmp_path)[0].name
    assert not compile_in_background(), "it is there"


def test_what_a_process_has_does_not_change_while_it_runs(
    compiler: Callable[..., Path], tmp_path: Path
) -> None:
    compiler(real(tmp_path))
    assert library(compiles=False) is None
    cpu_library._compiled()  # another process
    assert library(compiles=False) is None
    assert library_name() == ""
    cpu_library.forget()
    assert library(compiles=False) is not None
    assert library_name().endswith(".so")


def test_what_a_process_makes_itself_it_has(compiler: Callable[..., Path], tmp_path: Path) -> None:
    compiler(real(tmp_path))
    assert library(compiles=False) is None
    assert library() is not None
    assert library(compiles=False) is not None


def test_who_comes_while_another_compiles_waits_and_compiles_nothing(
    compiler: Callable[..., Path], tmp_path: Path
) -> None:
    calls = compiler(real(tmp_path), seconds=0.2)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(cpu_library._compiled())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not compile_in_background(), "somebody is at it"
    for thread in threads:
        thread.join(LIMIT_S)
    assert sources(calls) == ALL
    assert found == products(tmp_path) * 3


def test_of_two_nodes_that_start_at_once_one_compiles(
    compiler: Callable[..., Path], tmp_path: Path
) -> None:
    calls = compiler(real(tmp_path), seconds=0.2)
    assert compile_in_background()
    assert not compile_in_background()
    wait_for_the_compiler()
    assert sources(calls) == ALL


START = f"""
import sys
from engine import cpu_library
cpu_library._BEHIND = cpu_library._BEHIND.replace{BRISK}
cpu_library.cpu_flags = lambda: cpu_library.NEEDED
assert cpu_library.compile_in_background()
print(cpu_library._running[0].pid, flush=True)
sys.stdin.read()
"""


def in_group(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in listed.stdout.splitlines())
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group and stat[0] != "Z"]


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_nothing_compiles_on_when_the_node_has_ended(
    how: str, compiler: Callable[..., Path], tmp_path: Path
) -> None:
    calls = compiler("", seconds=60.0)
    node = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdin is not None
    assert node.stdout is not None
    group = int(node.stdout.readline())
    deadline = time.monotonic() + LIMIT_S
    while not calls.exists():
        assert time.monotonic() < deadline, "it never compiled"
        time.sleep(0.02)
    assert len(in_group(group)) > 1, "the process and its compiler"
    node.kill() if how == "is killed" else node.stdin.close()
    node.wait(LIMIT_S)
    while in_group(group):
        assert time.monotonic() < deadline, "it compiles on"
        time.sleep(0.02)
    left = [path.name for path in (tmp_path / "slipstream" / "products").iterdir()]
    assert left == ["lock"], "neither files of the compiler, nor a note that it failed"


def test_where_a_start_was_cut_short_the_next_one_compiles(
    compiler: Callable[..., Path], tmp_path: Path
) -> None:
    compiler(real(tmp_path), seconds=60.0)
    assert compile_in_background()
    (process,) = cpu_library._running
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    cpu_library._running.clear()
    calls = compiler(real(tmp_path))
    cpu_library.forget()
    assert compile_in_background()
    wait_for_the_compiler()
    assert len(products(tmp_path)) == 1
    assert calls.exists()


def test_starts_that_are_cut_short_go_on_from_what_the_ones_before_have_compiled(
    compiler: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "slipstream" / "products"
    for num_made in (0, 3, len(cpu_library.SOURCES)):
        slow = ALL[num_made]
        calls = compiler(f'case "$*" in *"/{slow}".cpp*) sleep 60;; esac; {real(tmp_path)}')
        calls.unlink(missing_ok=True)
        cpu_library.forget()
        assert compile_in_background()
        if not slow:
            break
        (process,) = cpu_library._running
        deadline = time.monotonic() + LIMIT_S
        while not (calls.exists() and slow in sources(calls)):
            assert time.monotonic() < deadline, "it never compiled"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(LIMIT_S)
        cpu_library._running.clear()
        assert len(list(folder.glob("*.o"))) == num_made
    wait_for_the_compiler()
    assert sources(calls) == ALL[3:]
    assert sorted(path.name for path in folder.iterdir()) == [products(tmp_path)[0].name, "lock"]


def test_what_a_compiler_needs_for_itself_is_not_where_a_run_ends(
    compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = compiler(real(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of this run"))
    cpu_library._compiled()
    for line in calls.read_text().splitlines():
        folder = Path(line.split()[0])
        assert folder.parent == tmp_path / "slipstream" / "products"
        assert not folder.exists()


def test_a_failure_is_noted_so_that_starts_try_again_only_a_day_later(
    compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = compiler("echo no room >&2; exit 1")
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    cpu_library.compile_behind()
    (note,) = (tmp_path / "slipstream" / "products").glob("*.failed")
    assert "cannot be compiled (no room)" in note.read_text()
    assert not compile_in_background()
    assert library() is None, "who needs it tries again"
    assert sources(calls) == ALL[:1] * 2
    compiler(real(tmp_path))
    assert not compile_in_background()
    a_day_ago = time.time() - cpu_library.RETRY_S
    os.utime(note, (a_day_ago, a_day_ago))
    assert compile_in_background()
    wait_for_the_compiler()
    cpu_library.compile_behind()  # for the processor that is played here
    assert not note.exists()


def test_a_damaged_library_is_not_used(
    compiler: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    compiler('for out; do :; done; echo half > "$out"')
    path = cpu_library._compiled()
    assert library(compiles=False) is None
    assert str(path) in caplog.text


@pytest.mark.parametrize("path", ["", None], ids=["without a compiler", "with one"])
def test_the_command_never_fails_and_says_how_it_went_in_one_line(
    path: str | None, tmp_path: Path
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    if path is not None:
        environment |= {"PATH": path}
        environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-m", "engine.cpu_library"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    made = products(tmp_path)
    expected = str(made[0]) if made else "use torch's own products: "
    assert expected in line
    assert not (made and path is not None)
