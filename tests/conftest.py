"""What holds for all tests: nothing is written into the home of whoever runs them."""

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_home() -> Iterator[None]:
    """Logs of runs go to a folder of this session, also those of processes that tests start."""
    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory(prefix="state-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
