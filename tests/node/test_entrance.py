"""The entrance of a node: what breaks the terms of its text is dropped, and that is said."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.entrance import TELL_EVERY_S, Entrance, Own
from node.events import Arrived, Send, Tick
from proto.messages import Close, Fault, FaultCode, Features, Message, Role, Welcome
from tests.texts import draft, opening, verdict

NUM_IDS = 100
OPENED = replace(opening(1, 2), num_ids=NUM_IDS)
TARGET = Own(Role.TARGET, NUM_IDS, 40, 4)
HEAD = Own(Role.DRAFTER, features={"float32": 8, "float16": 4})
BAD = draft((1, 2), NUM_IDS, incarnation=7)


class Inner:
    """Machines that take notes."""

    marks = ()

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Take a note."""
        self.heard.append(event.message if isinstance(event, Arrived) else event)
        return ()

    def story(self, session: int | None = None) -> str:
        """There is none."""
        return ""


def entered(own: Own, *messages: Message) -> tuple[Entrance[Any, Any], Inner, list[Any]]:
    """An entrance to which these messages have come at once, and what it has said."""
    inner = Inner()
    entrance: Entrance[Any, Any] = Entrance(inner, own)
    said = [action for one in messages for action in entrance.handle(Arrived(one), 0.0)]
    return entrance, inner, said


def test_what_keeps_to_the_terms_is_let_in_and_a_tick_too() -> None:
    good = draft((1, 2), NUM_IDS - 1)
    entrance, inner, said = entered(TARGET, OPENED, good, Close(1, "stop"))
    entrance.handle(Tick(), 0.0)
    assert inner.heard == [OPENED, good, Close(1, "stop"), Tick()]
    assert (said, entrance.num_dropped) == ([], 0)


def test_what_breaks_them_is_dropped_and_its_life_is_named() -> None:
    entrance, inner, said = entered(TARGET, OPENED, BAD)
    assert inner.heard == [OPENED]
    line = "Draft with token 100: ids must be below 100"
    assert said == [Send(Fault(1, 7, FaultCode.OUTSIDE, line))]
    assert entrance.num_dropped == 1


def test_that_is_said_once_in_a_while_however_much_comes() -> None:
    entrance, _, said = entered(TARGET, OPENED, *[BAD] * 1000)
    assert len(said) == 1
    assert entrance.num_dropped == 1000
    assert not entrance.handle(Arrived(BAD), TELL_EVERY_S - 0.01)
    assert entrance.handle(Arrived(BAD), TELL_EVERY_S)


def test_a_text_that_its_target_cannot_take_ends_with_the_reason() -> None:
    _, inner, said = entered(TARGET, replace(OPENED, tokens=(1, 100), num_ids=NUM_IDS))
    assert inner.heard == []
    line = "the target: token 100: ids must be below 100"
    assert said == [Send(Fault(1, 1, FaultCode.FAILED, line))]


def test_messages_of_texts_that_are_not_open_go_on_as_before() -> None:
    stray = replace(BAD, session=9)
    _, inner, said = entered(TARGET, OPENED, stray, Close(1, "stop"), BAD)
    assert inner.heard == [OPENED, stray, Close(1, "stop"), BAD]
    assert not said


@pytest.mark.parametrize(("own", "kind"), [(TARGET, verdict((1, 2), 3)), (HEAD, BAD)])
def test_a_node_takes_what_its_role_is_sent(own: Own, kind: Message) -> None:
    entrance, inner, _ = entered(own, kind)
    assert (inner.heard, entrance.num_dropped) == ([], 1)


def test_features_keep_to_one_type_until_there_is_another_coordinator() -> None:
    wide = Features(1, 1, 3, 7, 1, "float32", bytes(8))
    narrow = replace(wide, dtype="float16", data=bytes(4))
    entrance, inner, _ = entered(HEAD, OPENED, wide, narrow, wide)
    assert inner.heard == [OPENED, wide, wide]
    for message in (Welcome(100, 0), OPENED, narrow):
        entrance.handle(Arrived(message), 1.0)
    assert inner.heard[-1] == narrow
