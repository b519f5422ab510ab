"""The coordinator logs its last events when a mistake ends a text, or an error everything."""

import logging

import pytest

from coordinator.cluster.router_events import (
    Abort,
    Arrived,
    End,
    Garbled,
    NodeEnded,
    Outside,
    TextLeft,
    TextSubmitted,
    Tick,
)
from coordinator.cluster.service import Service
from coordinator.cluster.story import MAX_PAST, MAX_TOLD, Story
from coordinator.launching.logs import MAX_LINE
from coordinator.text.stream import TokenStream
from proto.errors import NodeError
from proto.messages import Draft, Fault, FaultCode, Heartbeat
from tests.coordinator.cluster.routers import FIRST, TARGET, text
from tests.hostile.besieged import by_hand
from tests.texts import verdict

GONE = NodeEnded(FIRST, "it has ended", is_unusable=False)


def test_an_event_is_told_with_its_sender_its_text_its_tokens_and_its_time() -> None:
    story = Story()
    said = Fault(0, 0, FaultCode.FAILED, "x")
    of_two = verdict((1, 2), 4, 5, 6, session=2)
    events = (TextSubmitted(text(1)), Arrived(FIRST, said), Arrived(TARGET, of_two), GONE)
    for second, event in enumerate(events):
        story.note(event, float(second))
    story.passed_on(FIRST, Draft, 2, 4.0)
    for second, event in enumerate(
        (Outside(FIRST, 2, "y"), Garbled(TARGET, "z"), TextLeft(1, True)), 5
    ):
        story.note(event, second + 0.5)
    assert story.told().split(", ") == [
        "TextSubmitted 2 text 1 -7.500",
        "Fault drafter-1 -6.500",
        "Verdict 3 target-1 text 2 -5.500",
        "NodeEnded drafter-1 -4.500",
        "Draft drafter-1 text 2 -3.500",
        "Outside drafter-1 text 2 -2.000",
        "Garbled target-1 -1.000",
        "TextLeft text 1 0.000",
    ]
    assert story.told(2).split(", ") == [
        "Verdict 3 target-1 text 2 -3.500",
        "Draft drafter-1 text 2 -1.500",
        "Outside drafter-1 text 2 0.000",
    ]
    assert story.told(3) == "nothing"


def test_only_the_last_events_are_kept_and_none_that_come_all_the_time() -> None:
    story = Story()
    story.note(GONE, 0.0)
    for second in range(MAX_PAST):
        story.note(Tick(), float(second))
        story.note(Arrived(TARGET, Heartbeat((), 0, "")), float(second))
    assert story.told() == "NodeEnded drafter-1 0.000"
    for second in range(MAX_PAST):
        story.note(TextLeft(second + 1, is_complete=False), float(second))
    assert "NodeEnded" not in story.told()


def test_the_newest_events_of_a_long_story_fit_into_a_line_of_the_log() -> None:
    story = Story()
    for number in range(MAX_PAST):
        story.passed_on(b"drafter\n" * 10, Draft, number + 1, 0.0)
    told = story.told()
    assert 700 < len(told) <= MAX_TOLD < MAX_LINE - 100
    assert told.endswith(f"text {MAX_PAST} 0.000")
    assert "\n" not in told


def log_of(service: Service) -> str:
    """The coordinator's own log."""
    return (service._launcher.logs.folder / "coordinator.log").read_text()


def test_a_loop_that_ends_unexpectedly_leaves_its_story_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(by_hand(None))

    def fail(event: object, now: float) -> None:
        assert isinstance(event, Tick), now

    monkeypatch.setattr(service._router, "handle", lambda *event: fail(*event) or [])
    service._events.append(GONE)
    with caplog.at_level(logging.ERROR), pytest.raises(AssertionError):
        service._run()
    line = "the coordinator's loop ends unexpectedly after NodeEnded drafter-1 0.000"
    assert caplog.messages == [line]
    assert line in log_of(service)
    with pytest.raises(NodeError, match="the coordinator's loop has ended unexpectedly"):
        service.check_alive()
    service.close()


def test_an_error_that_ends_everything_leaves_its_story_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(by_hand(None))

    def handle(event: object, now: float) -> list[Abort]:
        return [Abort(NodeError("the target died"))] if event == GONE and now else []

    monkeypatch.setattr(service._router, "handle", handle)
    service._events.append(GONE)
    service._run()
    first, second = log_of(service).splitlines()[-2:]
    assert first.endswith("everything ends: the target died")
    assert second.endswith("this came after NodeEnded drafter-1 0.000")
    with pytest.raises(NodeError, match="the target died"):
        service.check_alive()
    service.close()


@pytest.mark.parametrize("is_mistake", [True, False], ids=["mistake", "node"])
def test_a_text_that_a_mistake_has_ended_leaves_its_story_in_the_log(is_mistake: object) -> None:
    service = Service(by_hand(None))
    service._streams[7] = TokenStream(lambda: None, lambda: None, lambda: None)
    service._story.note(TextSubmitted(text(7)), 1.0)
    error = NodeError("it ended")
    error.__cause__ = AssertionError() if is_mistake else None
    service._perform(End(7, error))
    story = "text 7 was broken off after TextSubmitted 2 text 7 0.000"
    assert (story in log_of(service)) == bool(is_mistake)
    service.close()
