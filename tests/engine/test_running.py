"""A process that is to end lets its GPU come to the end of what it was given, within a limit."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine import running
from tests.programs import python


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process goes on."""
    monkeypatch.setattr(running, "_waits", [])
    yield
    running._is_ending.clear()
    running.end()


def test_without_a_gpu_nothing_is_waited_for_and_nothing_held() -> None:
    assert running.finish(limit_s=0.0)
    running.begin()  # returns


def test_a_forward_that_is_launched_kernel_by_kernel_is_launched_whole() -> None:
    waited: list[str] = []
    running.wait_at_end(lambda: waited.append("for the device"))
    running.begin()
    assert not running.finish(limit_s=0.05)
    assert not waited
    running.end()
    assert running.finish(limit_s=10)
    assert "for the device" in waited


def test_what_runs_comes_to_its_end_and_nothing_more_begins() -> None:
    done = threading.Event()
    running.wait_at_end(lambda: done.wait(10))
    begun = threading.Event()

    def go_on() -> None:
        running.begin()
        begun.set()

    ending: list[bool] = []
    first = threading.Thread(target=lambda: ending.append(running.finish(limit_s=10)))
    first.start()
    while not running._is_ending.is_set():
        time.sleep(0.001)
    threading.Thread(target=go_on, daemon=True).start()
    assert not begun.wait(0.05)
    assert not ending
    done.set()
    first.join(10)
    assert ending == [True]
    assert not begun.is_set()


def test_a_device_that_hangs_holds_nobody_for_longer_than_the_limit() -> None:
    hangs = threading.Event()
    running.wait_at_end(lambda: hangs.wait(10))
    assert not running.finish(limit_s=0.01)
    hangs.set()


# A node whose forward is under way when the pipe to whoever started it closes.
NODE = """
import os, sys, threading, time
from engine import running
from node import process
ended = threading.Event()
running.wait_at_end(lambda: ended.wait(10))
reading, writing = os.pipe()
os.dup2(reading, 0)
threading.Thread(target=process.end_with_parent, args=(os.getppid(),), daemon=True).start()
os.close(writing)
while not running._is_ending.is_set():
    time.sleep(0.001)
print("its forward has ended", flush=True)
ended.set()
time.sleep(10)
print("too late", flush=True)
"""


def test_a_node_ends_behind_its_forward() -> None:
    done = python(NODE)
    assert (done.returncode, done.stdout) == (0, "its forward has ended\n")
