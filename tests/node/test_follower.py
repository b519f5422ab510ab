"""The entrance of a node's machine: lives of texts, with a machine that only takes notes."""

from dataclasses import dataclass

from node.events import Arrived, Confirmed, Tick, gap
from node.follower import MAX_REMEMBERED, Follower
from proto.messages import Close, Heartbeat, Message, Open, SessionMark, Welcome
from proto.tree import SpeculationTree
from tests.texts import draft, name, opening, verdict

WELCOME = Welcome(100, 0)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a forward."""


Event = Arrived | Confirmed | Tick | Done


class Notes:
    """A machine that writes down what it is told, and answers with its number."""

    def __init__(self) -> None:
        self.opened: Open | None = None
        self.tree = SpeculationTree(bytes(16), (), max_nodes=0)
        self.told: list[Event] = []

    def handle(self, event: Event, now: float) -> list[int]:
        """Take a note."""
        self.told.append(event)
        if isinstance(event, Arrived) and isinstance(event.message, Open):
            self.opened = event.message
            self.tree = SpeculationTree(event.message.key, event.message.tokens, max_nodes=0)
        return [len(self.told)]

    def close(self) -> None:
        """Nothing is wanted any more."""
        assert self.opened is not None
        self.opened = None


class Entrance:
    """A follower with such a machine; every step checks every invariant."""

    def __init__(self) -> None:
        self.machine = Notes()
        self.follower: Follower[Done, int] = Follower(self.machine)

    def hears(self, *messages: Message) -> list[object]:
        """Messages come; returns what the last of them led to."""
        actions: list[object] = []
        for message in messages:
            actions = list(self.follower.handle(Arrived(message), 0.0))
            self.follower.check()
        return actions

    def passes(self, *messages: Message) -> list[Event]:
        """What the machine is told of these messages."""
        before = len(self.machine.told)
        self.hears(*messages)
        return self.machine.told[before:]

    @property
    def life(self) -> tuple[int, int] | None:
        """Session and incarnation of the open text."""
        marks = self.follower.marks
        return (marks[0].session, marks[0].incarnation) if marks else None


def text(session: int, incarnation: int = 1) -> Open:
    """The text (1, 2) under this session."""
    return opening(1, 2, session=session, incarnation=incarnation)


def beat(*marks: tuple[int, tuple[int, ...]]) -> Heartbeat:
    """The coordinator's heartbeat with these texts, by session."""
    listed = (SessionMark(session, 9, len(path), name(*path)) for session, path in marks)
    return Heartbeat(tuple(listed), 0, "")


def test_what_belongs_to_an_open_text_reaches_its_machine() -> None:
    entrance = Entrance()
    messages = opening(1, 2), draft((1, 2), 3), verdict((1, 2), 3)
    assert entrance.passes(*messages) == [Arrived(message) for message in messages]
    assert entrance.hears(draft((1, 2), 4)) == [4]  # what the machine has answered


def test_what_belongs_to_no_open_text_reaches_nobody() -> None:
    entrance = Entrance()
    assert entrance.passes(draft((1, 2), 3), verdict((1, 2), 3)) == []
    assert entrance.passes(text(2))
    assert entrance.passes(draft((1, 2), 3), verdict((1, 2), 3)) == []
    assert entrance.passes(Close(2, "stop"), verdict((1, 2), 3)) == []


def test_ticks_and_results_pass_by() -> None:
    entrance = Entrance()
    assert entrance.follower.handle(Tick(), 0.0) == [1]
    assert entrance.follower.handle(Done(), 0.0) == [2]
    assert entrance.machine.told == [Tick(), Done()]


def test_an_open_must_be_newer_than_those_of_its_own_text() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 7))
    assert entrance.passes(text(1, 7), text(1, 6)) == []
    assert entrance.passes(text(2, 1)) == [Arrived(text(2, 1))]
    assert entrance.life == (2, 1)
    assert entrance.passes(text(2, 3)) == [Arrived(text(2, 3))]


def test_a_closed_text_stays_closed_whatever_comes_late() -> None:
    entrance = Entrance()
    entrance.hears(text(1), Close(1, "stop"))
    assert entrance.follower.marks == ()
    assert entrance.passes(text(1, 1), text(1, 2), draft((1, 2), 3)) == []
    assert entrance.hears(beat((1, (1, 2)))) == []  # a late heartbeat is no gap


def test_a_close_that_overtakes_its_open_closes_it() -> None:
    entrance = Entrance()
    entrance.hears(Close(1, "cancelled"))
    assert entrance.passes(text(1)) == []


def test_a_close_of_another_text_ends_nothing() -> None:
    entrance = Entrance()
    entrance.hears(text(2), Close(1, "stop"))
    assert entrance.life == (2, 1)


def test_a_later_text_takes_the_machine_of_an_earlier_one() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    assert entrance.passes(text(2)) == [Arrived(text(2))]
    assert entrance.life == (2, 1)


def test_a_late_open_of_an_earlier_text_does_not_take_the_machine() -> None:
    entrance = Entrance()
    entrance.hears(text(1), text(2))
    assert entrance.passes(text(1, 5)) == []
    entrance.hears(beat())  # which may be older than the text that it leaves out
    assert entrance.passes(text(1, 6)) == []
    assert entrance.passes(text(2, 2)) == [Arrived(text(2, 2))]


def test_a_text_is_opened_again_after_another_one_that_is_over() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 1), text(2, 1), Close(2, "stop"))
    assert entrance.passes(text(1, 2)) == [Arrived(text(1, 2))]
    assert entrance.life == (1, 2)


def test_a_welcome_starts_afresh_with_any_session() -> None:
    entrance = Entrance()
    entrance.hears(text(7, 5), Close(7, "stop"), text(9, 5), WELCOME)
    assert entrance.follower.marks == ()
    assert entrance.passes(text(3, 1)) == [Arrived(text(3, 1))]
    assert entrance.passes(text(7, 1)) == [Arrived(text(7, 1))]


def test_a_text_that_no_heartbeat_lists_is_closed_until_a_newer_open() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 2))
    assert entrance.passes(beat()) == []
    assert entrance.follower.marks == ()
    assert entrance.passes(text(1, 2), draft((1, 2), 3)) == []
    assert entrance.hears(beat((1, (1, 2)))) == [gap(1, 0, 0)]
    assert entrance.passes(text(1, 3)) == [Arrived(text(1, 3))]


def test_a_heartbeat_confirms_what_is_a_beginning_of_ours() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    assert entrance.passes(beat((1, (1, 2)))) == [Confirmed(2)]
    assert entrance.passes(beat((1, (1,)))) == [Confirmed(1)]


def test_a_heartbeat_with_another_text_is_a_gap() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 4))
    assert entrance.hears(beat((1, (1, 2, 3)))) == [gap(1, 4, 2)]
    assert entrance.hears(beat((1, (1, 3)))) == [gap(1, 4, 2)]


def test_every_text_of_a_heartbeat_is_looked_at() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    both = beat((1, (1, 2)), (2, (5,)))
    assert entrance.hears(both) == [2, gap(2, 0, 0)]
    assert entrance.machine.told[-1] == Confirmed(2)


def test_what_is_remembered_of_closed_texts_is_bounded() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    for session in range(2, 2 * MAX_REMEMBERED):
        entrance.hears(Close(session, "stop"))
    assert entrance.life == (1, 1)
    newest = 2 * MAX_REMEMBERED - 1
    assert entrance.passes(text(newest, 2), text(newest - MAX_REMEMBERED // 2, 2)) == []
    assert entrance.passes(text(1, 1)) == []
