"""Holds for all tests: nothing but what compilers make is written into the home; signals work.

An example of hypothesis takes as long as it takes: a busy machine is no mistake.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forking.popen import Server, forking
from tests.turns import Turns

KEEP_SPEEDS = "SLIPSTREAM_KEEP_SPEEDS"

ROOT = Path(__file__).resolve().parents[1]
MOST_KEPT = 2000  # files that a compiler has made, of earlier runs

# Whatever was fetched on this machine, tests run the models of the repository.
os.environ["SLIPSTREAM_DEFAULT_MODEL"] = "toy"

settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")

# Until all tests are collected: there is hardly any rubbish among so many modules.
gc.disable()

# Where tests run in the background, or with nohup, these are ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the tests that drive a browser."""
    parser.addoption("--screenshots", help="folder for the screenshots of tests/browser")


def pytest_collection_finish() -> None:
    """What collecting thousands of tests leaves is not looked through again for rubbish.

    What comes later is, but not as often as usual, which takes a sixteenth of the time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


_server = Server()  # from which programs are forked; it is started for the first one
_turns = pytest.StashKey[Turns]()


def pytest_configure(config: pytest.Config) -> None:
    """Give a worker the locks of its run; the only process of a run needs none."""
    worker = getattr(config, "workerinput", {})
    config.stash[_turns] = Turns(worker.get("testrunuid", ""))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close them."""
    config.stash[_turns].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork the nodes of process tests (`tests/forking`), their fixtures' nodes included.

    While a test that depends on time runs, no other worker runs one (`tests/turns.py`). One of
    several workers computes on one thread, whatever the test before it has loaded: workers with
    more threads than cores keep each other waiting, and a test takes up to thirty times as long.
    What a test starts computes on as many as it takes.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    is_forked = item.get_closest_marker("process") and not item.get_closest_marker("really")
    is_alone = item.get_closest_marker("timed") is not None
    turn = item.config.stash[_turns].turn(is_alone=is_alone)
    with turn, forking(_server if is_forked else None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def homes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Logs of runs and what they compile go to a folder of this session, also those of processes
    that tests start.

    The C++ library is there before the first node starts, so that all nodes compute alike.
    """
    names = ("XDG_STATE_HOME", "XDG_CACHE_HOME")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="homes-") as folder:
        _keep_what_is_compiled(Path(before.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
        os.environ.update({name: os.path.join(folder, name) for name in names})
        os.environ[KEEP_SPEEDS] = "0"  # no test begins with what another one has measured
        if any(item.get_closest_marker("process") for item in request.session.items):
            command = [sys.executable, "-m", "engine.cpu_library"]
            subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600, check=True)
        _server.environment = dict(os.environ)
        yield
        _server.close()
    for name in (*names, KEEP_SPEEDS):
        os.environ.pop(name)
    os.environ.update(before)


def _keep_what_is_compiled(cache: Path) -> None:
    """Let a compiler that compiles nothing twice on this machine stand before the real one."""
    real = os.environ.get("CXX") or "g++"
    if "REAL_CXX" in os.environ or shutil.which(real) is None:
        return
    folder = cache / "slipstream-tests"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # nothing can be kept here
    with suppress(OSError):  # another worker removes the same
        files = [path for path in folder.iterdir() if path.is_file()]
        for old in sorted(files, key=os.path.getmtime)[:-MOST_KEPT]:
            old.unlink()
    os.environ |= {
        "REAL_CXX": real,
        "KEPT_COMPILER_FOLDER": str(folder),
        "CXX": str(Path(__file__).parent / "kept" / "g++"),
    }
