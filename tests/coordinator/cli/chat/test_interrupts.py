"""Ctrl-C stops an answer or empties a line, and cuts nothing else in two."""

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from coordinator.cli.chat import answer as module
from coordinator.cli.chat.answer import Interrupts, LineInterruptedError
from proto.errors import NodeError


def press() -> None:
    """Ctrl-C, as it comes to this thread."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Something else has Ctrl-C before and afterwards."""

    def other(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("this Ctrl-C went elsewhere")

    was = signal.signal(signal.SIGINT, other)
    yield
    assert signal.getsignal(signal.SIGINT) is other
    signal.signal(signal.SIGINT, was)


def entered(typed: str = "") -> Interrupts:
    return Interrupts(lambda: None, lambda: typed)


def test_ctrl_c_empties_the_line_that_is_typed_and_says_what_it_was() -> None:
    with entered("half") as interrupts:
        with pytest.raises(LineInterruptedError) as caught, interrupts.reading():
            press()
        assert caught.value.line == "half"
        with interrupts.reading():
            pass


def test_ctrl_c_stops_the_answer_once() -> None:
    stopped: list[int] = []
    with entered() as interrupts:
        with interrupts.answering(lambda: stopped.append(1)):
            press()
            press()
        assert stopped == [1]
        with interrupts.reading():
            pass
        with interrupts.answering(lambda: stopped.append(2)):
            pass
        assert stopped == [1]


def test_ctrl_c_before_an_answer_begins_stops_it_as_it_begins() -> None:
    stopped: list[int] = []
    with entered() as interrupts:
        with interrupts.reading():
            pass
        press()
        with interrupts.answering(lambda: stopped.append(1)):
            assert stopped == [1]


def test_ctrl_c_after_an_answer_is_forgotten_when_the_next_line_is_read() -> None:
    stopped: list[int] = []
    with entered() as interrupts:
        with interrupts.answering(lambda: stopped.append(1)):
            pass
        press()
        with interrupts.reading():
            pass
        with interrupts.answering(lambda: stopped.append(1)):
            pass
    assert stopped == []


def test_an_answer_that_does_not_stop_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)
    with entered() as interrupts, interrupts.answering(lambda: None):
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_the_end_of_the_nodes_is_noticed_while_a_line_is_typed() -> None:
    def ended() -> None:
        raise NodeError("the target has ended")

    mine, its_end = os.pipe()
    with (
        Interrupts(ended, lambda: "") as interrupts,
        pytest.raises(NodeError, match="the target has ended"),
        interrupts.reading(),
    ):
        os.read(mine, 1)  # for ever, if nobody interrupts it
    os.close(mine)
    os.close(its_end)
    assert "watch" not in {thread.name for thread in threading.enumerate()}


def test_presses_within_a_second_of_an_answer_that_was_stopped_do_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "now_s", lambda: now)
    with entered() as interrupts:
        with interrupts.answering(lambda: None):
            press()
        with interrupts.reading():
            press()
            now += 0.9
            press()
            now += 0.2
            with pytest.raises(LineInterruptedError):
                press()


def test_what_is_typed_within_that_second_can_be_emptied() -> None:
    with entered("half a line") as interrupts:
        with interrupts.answering(lambda: None):
            press()
        with pytest.raises(LineInterruptedError), interrupts.reading():
            press()


def test_an_answer_that_nobody_stopped_is_followed_by_no_grace() -> None:
    with entered() as interrupts:
        with interrupts.answering(lambda: None):
            pass
        with pytest.raises(LineInterruptedError), interrupts.reading():
            press()
