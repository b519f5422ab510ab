"""A drafter's machine whose model is the test."""

from collections.abc import Sequence

from drafter_node.drafting import Drafting
from drafter_node.events import Action, Compute, Proposed
from node.events import Arrived, Send, Tick, WaitUntil
from node.follower import Follower
from proto.messages import Draft, Message


class Drafter:
    """A machine behind its entrance; its model proposes what the test says, and all is checked."""

    def __init__(self, max_len: int = 100) -> None:
        self.machine = Drafting(max_len=max_len, num_slots=max_len + 64)
        self.follower = Follower(self.machine)
        self.now = 0.0

    def hears(self, message: Message) -> list[Action]:
        """A message comes."""
        return self._checked(self.follower.handle(Arrived(message), self.now))

    def ticks(self) -> list[Action]:
        """All messages have been handled."""
        return self._checked(self.machine.handle(Tick(), self.now))

    def is_idle(self) -> bool:
        """Whether it has nothing to do at a tick but to wait for an answer."""
        return all(isinstance(action, WaitUntil) for action in self.ticks())

    def proposes(self, ticket: int, *tokens: int) -> list[Action]:
        """The model has answered."""
        event = Proposed(ticket, tokens, (-0.5,) * len(tokens), 0)
        return self._checked(self.machine.handle(event, self.now))

    def drafts(self, *tokens: int) -> list[Draft]:
        """Run the model once per token; returns the drafts that were sent."""
        sent: list[Draft] = []
        for token in tokens:
            (compute,) = self.ticks()
            assert isinstance(compute, Compute)
            for action in self.proposes(compute.ticket, token):
                assert isinstance(action, Send)
                assert isinstance(action.message, Draft)
                sent.append(action.message)
        return sent

    def _checked(self, actions: Sequence[Action]) -> list[Action]:
        self.machine.check()
        self.follower.check()
        return list(actions)
