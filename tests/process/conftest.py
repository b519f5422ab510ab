"""What the tests start can be interrupted, whatever started the tests."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from coordinator.api.pair import Pair
from tests.process.behaviours import CONFIG


@pytest.fixture(scope="session")
def embedded() -> Iterator[Pair]:
    """The embedded pair in float32, for every test that leaves it as it was."""
    with Pair(CONFIG) as pair:
        yield pair


@pytest.fixture(autouse=True, scope="session")
def _ignored_signals_stay_here() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C, and nohup's a hang-up, and so does what they start.

    A handler that does nothing ignores them here just as well, but is not inherited: where another
    program begins, the signal has its usual effect again.
    """
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda _number, _frame: None)
                stack.callback(signal.signal, number, signal.SIG_IGN)
        yield
