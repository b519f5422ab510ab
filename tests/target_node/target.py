"""A target under test, and what is said to it and by it."""

from collections.abc import Sequence

from engine.layout.slots import Feed
from node.costs import NOTHING_KNOWN, Costs, Measured
from node.dispatcher import Dispatcher
from node.events import Afterwards, Arrived, Remember, Send, Tick
from node.lanes import Lanes
from node.placing import Placing
from proto.messages import (
    Draft,
    Fault,
    FaultCode,
    Heartbeat,
    Message,
    Policy,
    SessionMark,
    Verdict,
)
from target_node.compute import Action, Compute, Computed, Outcome, Part
from target_node.known import Known
from target_node.scheduling import Schedule
from target_node.verifying import Verifying
from tests.texts import PIPELINED, name, opening


class Target:
    """A whole target but for its model, which says what the test says; and all is checked."""

    def __init__(
        self,
        fixed_rows: int | None = None,
        pass_s: Measured = NOTHING_KNOWN,
        *,
        num_lanes: int = 1,
        num_per_pass: int | None = None,
        scored_chunk: int | None = None,
        placing: Placing | None = None,
    ) -> None:
        chunks = {} if scored_chunk is None else {"scored_chunk": scored_chunk}
        costs = Costs(pass_s)
        self.known = Known(fixed_rows=fixed_rows, costs=costs, placing=placing, **chunks)
        self.lanes = Lanes(num_lanes, 1000)
        schedule = Schedule(self.lanes, self.known, num_per_pass=num_per_pass or num_lanes)
        self.dispatcher: Dispatcher[Verifying, Computed, Action] = Dispatcher(self.lanes, schedule)
        self.now = 0.0
        self._said: list[Action] = []

    @property
    def machine(self) -> Verifying:
        """The machine of the only text."""
        (text,) = self.dispatcher.texts.values()
        return text

    def hears(self, *messages: Message) -> list[Action]:
        """Messages come; returns what the last of them made it do."""
        actions: list[Action] = []
        for message in messages:
            actions = self._handle(Arrived(message))
        return actions

    def ticks(self) -> list[Action]:
        """All messages have been handled."""
        return self._handle(Tick())

    def computes(self, ticket: int, *tokens: int, pass_s: float = 0.0) -> list[Action]:
        """The model has answered after `pass_s`; one text was asked about."""
        return self.answers(ticket, Outcome(tokens), pass_s=pass_s)

    def answers(self, ticket: int, *outcomes: Outcome, pass_s: float = 0.0) -> list[Action]:
        """The model has answered, for each text of the pass, after `pass_s`."""
        self.goes_on(ticket, *outcomes, pass_s=pass_s)
        return self.tells()

    def goes_on(self, ticket: int, *outcomes: Outcome, pass_s: float = 0.0) -> None:
        """The same, but for what comes afterwards: `tells`."""
        self.now += pass_s
        said = self._handle(Computed(ticket, outcomes, round(pass_s * 1e6)))
        self._said += said

    def tells(self) -> list[Action]:
        """What could wait for the next launch, behind what could not."""
        said, self._said = self._said, []
        return [*said, *self._handle(Afterwards())]

    def _handle(self, event: Arrived | Tick | Afterwards | Computed) -> list[Action]:
        actions = list(self.dispatcher.handle(event, self.now))
        self.dispatcher.check()
        return actions

    def asks(
        self,
        ticket: int,
        feed: Feed,
        num_asked: int,
        positions: tuple[int, ...],
        *,
        number: int | None = None,
        scored: tuple[int, ...] = (),
    ) -> Compute:
        """A pass over the only text. number: in this life, if not that of the pass."""
        text = self.machine
        committed = text.tree.text.tokens
        number = ticket if number is None else number
        chain = tuple(range(max(0, num_asked - 1)))
        part = Part(text.opened, number, committed, feed, num_asked, positions, None, scored, chain)
        return Compute(ticket, (part,))

    def rows(
        self, ticket: int, tokens: tuple[int, ...], start: int, *, number: int | None = None
    ) -> Compute:
        """A pass over a chain behind the last committed token, which is asked at every row."""
        where = tuple(range(start, start + len(tokens)))
        masks = tuple((1 << (index + 1)) - 1 for index in range(len(tokens)))
        feed = Feed(tokens, where, where, start, masks)
        return self.asks(ticket, feed, len(tokens), tuple(p + 1 for p in where), number=number)


def parts_of(actions: Sequence[Action]) -> tuple[Part, ...]:
    """The parts of the pass that starts, and nothing else."""
    (compute,) = actions
    assert isinstance(compute, Compute)
    return compute.parts


def part_of(actions: Sequence[Action]) -> Part:
    """Its only part."""
    (part,) = parts_of(actions)
    return part


def marked(*tokens: int, session: int = 1, incarnation: int = 1) -> Heartbeat:
    """The coordinator's heartbeat with this text."""
    path_hash = name(*tokens, session=session)
    return Heartbeat((SessionMark(session, incarnation, len(tokens), path_hash),), 0, "")


def gap(incarnation: int, length: int, session: int = 1) -> list[Action]:
    """What a node says that has another text of so many tokens."""
    detail = f"the text here has {length} tokens and is another"
    return [Send(Fault(session, incarnation, FaultCode.GAP, detail))]


def said(actions: list[Action]) -> Verdict:
    """The verdict that was sent."""
    (send,) = [action for action in actions if not isinstance(action, Remember)]
    assert isinstance(send, Send)
    assert isinstance(send.message, Verdict)
    return send.message


def ready(*drafts: Draft, policy: Policy = PIPELINED) -> Target:
    """A target with the text (1, 2, 3) whose cache holds 1 and 2, and these drafts."""
    target = Target()
    target.hears(opening(1, 2, policy=policy))
    target.ticks()
    target.computes(1, 3)
    target.hears(*drafts)
    return target
