"""Holds for all tests: nothing is written into the home of whoever runs them; signals work.

An example of hypothesis takes as long as it takes: a busy machine is no mistake.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")

# Where tests run in the background, or with nohup, these are ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the tests that drive a browser."""
    parser.addoption("--screenshots", help="folder for the screenshots of tests/browser")


def pytest_collection_finish() -> None:
    """What collecting thousands of tests leaves is not looked through again for rubbish."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def homes() -> Iterator[None]:
    """Logs of runs and what they compile go to a folder of this session, also those of processes
    that tests start.
    """
    names = ("XDG_STATE_HOME", "XDG_CACHE_HOME")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="homes-") as folder:
        os.environ.update({name: os.path.join(folder, name) for name in names})
        yield
    for name in names:
        os.environ.pop(name)
    os.environ.update(before)
