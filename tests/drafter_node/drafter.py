"""A drafter whose model is the test."""

from collections.abc import Sequence
from dataclasses import replace

from drafter_node.compute import Action, Children, Compute, Part, Proposed
from drafter_node.drafting import Drafting
from drafter_node.known import Known
from drafter_node.scheduling import Schedule
from engine.layout.slots import Feed
from node.costs import NOTHING_KNOWN, Measured, Passes
from node.dispatcher import Dispatcher
from node.events import Afterwards, Arrived, Send, Tick, WaitUntil
from node.lanes import Lanes
from proto.messages import Draft, Message


class Drafter:
    """A whole drafter but for its model, which proposes what the test says; and all is checked.

    goes_on  forwards show the steps that may follow at once; else it is as if a message came
    """

    def __init__(
        self,
        max_len: int = 100,
        step_s: Measured = NOTHING_KNOWN,
        *,
        num_lanes: int = 1,
        num_per_pass: int | None = None,
        goes_on: bool = False,
    ) -> None:
        self.goes_on = goes_on
        self.known = Known(max_len=max_len, steps=Passes(step_s))
        self.lanes = Lanes(num_lanes, max_len + 64)
        schedule = Schedule(self.lanes, self.known, num_per_pass=num_per_pass or num_lanes)
        self.dispatcher: Dispatcher[Drafting, Proposed, Action] = Dispatcher(self.lanes, schedule)
        self.now = 0.0

    @property
    def machine(self) -> Drafting:
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

    def is_idle(self) -> bool:
        """Whether it has nothing to do at a tick but to wait for an answer."""
        return all(isinstance(action, WaitUntil) for action in self.ticks())

    def proposes(self, ticket: int, *tokens: int) -> list[Action]:
        """The model has answered; one text was asked about."""
        return self.answers(ticket, chosen(*tokens))

    def answers(
        self, ticket: int, *children: Children, step_s: float = 0.0, model_us: int = 0
    ) -> list[Action]:
        """The model has answered, for one node of each text of the forward, after `step_s`."""
        asked = [() if child == NOT_ASKED else (child,) for child in children]
        return self.answers_rows(ticket, *asked, step_s=step_s, model_us=model_us)

    def answers_rows(
        self, ticket: int, *children: tuple[Children, ...], step_s: float = 0.0, model_us: int = 0
    ) -> list[Action]:
        """The model has answered, for every node of each text of the forward, after `step_s`."""
        at_once = self.ends(ticket, *children, step_s=step_s, model_us=model_us)
        return [*at_once, *self.tells()]

    def ends(
        self, ticket: int, *children: tuple[Children, ...], step_s: float = 0.0, model_us: int = 0
    ) -> list[Action]:
        """The same, but for what comes afterwards: `tells`."""
        self.now += step_s
        return self._handle(Proposed(ticket, children, model_us))

    def tells(self) -> list[Action]:
        """What could wait until the next forward was launched."""
        return self._handle(Afterwards())

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

    def _handle(self, event: Arrived | Tick | Afterwards | Proposed) -> list[Action]:
        actions = list(self.dispatcher.handle(event, self.now))
        self.dispatcher.check()
        return actions if self.goes_on else list(map(_called, actions))

    def asks(
        self, ticket: int, feed: Feed, num_asked: int = 1, *, number: int | None = None
    ) -> Compute:
        """A forward for the only text. number: in this life, if not that of the forward."""
        text = self.machine
        number = ticket if number is None else number
        return Compute(ticket, (Part(text.opened, number, text.tree.text.tokens, feed, num_asked),))

    def row(
        self,
        ticket: int,
        token: int,
        position: int,
        prefix_len: int,
        mask: int = 1,
        *,
        number: int | None = None,
    ) -> Compute:
        """A forward of one row, which lies at its position."""
        feed = Feed((token,), (position,), (position,), prefix_len, (mask,))
        return self.asks(ticket, feed, number=number)


def _called(action: Action) -> Action:
    if not isinstance(action, Compute):
        return action
    return replace(action, parts=tuple(replace(p, ahead=(), least=0.0) for p in action.parts))


NOT_ASKED = Children((), ())  # of a text whose prompt is read


def chosen(*tokens: int, score: float = -0.5) -> Children:
    """What the model has chosen for one text."""
    return Children(tokens, (score,) * len(tokens))


def parts_of(actions: Sequence[Action]) -> tuple[Part, ...]:
    """The parts of the forward that starts, and nothing else."""
    (compute,) = actions
    assert isinstance(compute, Compute)
    return compute.parts


def part_of(actions: Sequence[Action]) -> Part:
    """Its only part."""
    (part,) = parts_of(actions)
    return part
