"""A target machine under test, and what is said to it and by it."""

from engine.slots import Feed
from node.costs import NOTHING_KNOWN, Costs, PassCosts
from node.events import Arrived, Send, Tick
from node.follower import Follower
from proto.messages import (
    Draft,
    Fault,
    FaultCode,
    Heartbeat,
    Message,
    SessionMark,
    Verdict,
)
from target_node.events import Action, Compute, Computed
from target_node.verifying import Verifying
from tests.texts import PIPELINED, SPEC, name, opening


class Target:
    """A machine behind its entrance; its model says what the test says, and all is checked."""

    def __init__(self, fixed_rows: int | None = None, pass_s: PassCosts = NOTHING_KNOWN) -> None:
        self.machine = Verifying(num_slots=1000, fixed_rows=fixed_rows, costs=Costs(pass_s))
        self.follower = Follower(self.machine)
        self.now = 0.0

    def hears(self, *messages: Message) -> list[Action]:
        """Messages come; returns what the last of them made it do."""
        actions: list[Action] = []
        for message in messages:
            actions = list(self.follower.handle(Arrived(message), self.now))
            self.machine.check()
            self.follower.check()
        return actions

    def ticks(self) -> list[Action]:
        """All messages have been handled."""
        actions = self.machine.handle(Tick(), self.now)
        self.machine.check()
        return actions

    def computes(self, ticket: int, *tokens: int, pass_s: float = 0.0) -> list[Action]:
        """The model has answered after `pass_s`."""
        self.now += pass_s
        actions = self.machine.handle(Computed(ticket, tokens, round(pass_s * 1e6)), self.now)
        self.machine.check()
        return actions


def rows(ticket: int, tokens: tuple[int, ...], start: int) -> Compute:
    """A pass over a chain behind the last committed token, which is asked at every row."""
    where = tuple(range(start, start + len(tokens)))
    masks = tuple((1 << (index + 1)) - 1 for index in range(len(tokens)))
    feed = Feed(tokens, where, where, start, masks)
    return Compute(ticket, feed, len(tokens), tuple(p + 1 for p in where), SPEC)


def marked(*tokens: int, session: int = 1, incarnation: int = 1) -> Heartbeat:
    """The coordinator's heartbeat with this text."""
    mark = SessionMark(session, incarnation, len(tokens), name(*tokens))
    return Heartbeat((mark,), 0, "")


def gap(incarnation: int, length: int, session: int = 1) -> list[Action]:
    """What a node says that has another text of so many tokens."""
    detail = f"the text here has {length} tokens and is another"
    return [Send(Fault(session, incarnation, FaultCode.GAP, detail))]


def said(actions: list[Action]) -> Verdict:
    """The verdict that was sent."""
    (send,) = actions
    assert isinstance(send, Send)
    assert isinstance(send.message, Verdict)
    return send.message


def ready(*drafts: Draft) -> Target:
    """A target with the text (1, 2, 3) whose cache holds 1 and 2, and these drafts."""
    target = Target()
    target.hears(opening(1, 2, policy=PIPELINED))
    target.ticks()
    target.computes(1, 3)
    target.hears(*drafts)
    return target
