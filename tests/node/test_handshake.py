"""What a node makes of the answers to its introduction."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from node.process import shake_hands
from proto.codec import encode
from proto.errors import NoAnswerError
from proto.messages import Fault, FaultCode, Message, Role
from tests.coordinator.test_behaviours import hello


class Answer:
    """A connection over which one message comes."""

    is_encrypted = False
    is_remote = False

    def __init__(self, message: Message) -> None:
        self._message = message

    def send(self, _frame: bytes) -> bool:
        """Say something."""
        return True

    def receive(self, _timeout_s: float) -> Iterator[bytes]:
        """What is said to it."""
        yield encode(self._message)


def test_a_coordinator_that_is_about_to_end_has_refused_nobody() -> None:
    connection = cast(Any, Answer(Fault(0, 0, FaultCode.CLOSED, "the coordinator has ended")))
    with pytest.raises(NoAnswerError):
        shake_hands(connection, hello(Role.TARGET))
