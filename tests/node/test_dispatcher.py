"""The entrance of a node: lives of texts, with machines and a schedule that only take notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.dispatcher import MAX_PAST, MAX_REMEMBERED, Dispatcher
from node.events import Afterwards, Allocate, Arrived, Confirmed, SharedAction, Tick, gap
from node.lanes import Lane, Lanes
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Close, Heartbeat, Message, Open, SessionMark, Welcome
from proto.tree import SpeculationTree
from tests.texts import LIMITS, draft, name, opening, verdict

WELCOME = Welcome(100, 0)
NUM_SLOTS = 100


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a forward."""


@dataclass(frozen=True, slots=True)
class Noted:
    """The schedule's answer: how many texts are open."""

    num_texts: int


Event = Arrived | Confirmed | Tick | Afterwards | Done


class Notes:
    """The machine of one life: writes down what it is told."""

    def __init__(self, opened: Open, lane: Lane, told: list[Event]) -> None:
        self.opened = opened
        self.lane = lane
        self.tree = SpeculationTree(opened.key, opened.tokens, max_nodes=0)
        self._told = told
        lane.begin(self.tree.text)

    @property
    def num_read(self) -> int:
        """All but the last token."""
        return len(self.tree.text) - 1

    def begin(self) -> Sequence[SharedAction]:
        """Say something."""
        return (gap(7, 7, 7),)

    def handle(self, event: Arrived | Confirmed, now: float) -> Sequence[SharedAction]:
        """Take a note and answer."""
        self._told.append(event)
        return (gap(8, 8, 8),)

    def check(self) -> None:
        """There is nothing to check."""


class Desk:
    """A schedule that makes such machines, and writes down what it and they are told."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.earlier: Notes | None = None  # as it was given with the newest Open

    def make(
        self,
        message: Open,
        lane: Lane,
        earlier: Notes | None,
        texts: Mapping[int, Notes],
        now: float,
    ) -> Notes:
        """Begin a life, which is also told."""
        self.told.append(Arrived(message))
        self.earlier = earlier
        return Notes(message, lane, self.told)

    def tick(self, texts: Mapping[int, Notes], now: float) -> Sequence[SharedAction | Noted]:
        """Take a note."""
        self.told.append(Tick())
        return (Noted(len(texts)),)

    def done(
        self, result: Done, texts: Mapping[int, Notes], now: float
    ) -> Sequence[SharedAction | Noted]:
        """Take a note."""
        self.told.append(result)
        return (Noted(len(texts)),)

    def afterwards(self, now: float) -> Sequence[SharedAction | Noted]:
        """Take a note."""
        self.told.append(Afterwards())
        return (Noted(0),)


class Entrance:
    """A dispatcher with such a schedule; every step checks every invariant."""

    def __init__(self, num_lanes: int = 1) -> None:
        self.desk = Desk()
        self.now = 0.0
        self.dispatcher: Dispatcher[Notes, Done, Noted] = Dispatcher(
            Lanes(num_lanes, NUM_SLOTS), self.desk
        )

    def hears(self, *messages: Message) -> list[object]:
        """Messages come, a heartbeat apart; returns what the last of them led to."""
        actions: list[object] = []
        for message in messages:
            self.now += HEARTBEAT_INTERVAL_S
            actions = list(self.dispatcher.handle(Arrived(message), self.now))
            self.dispatcher.check()
        return actions

    def passes(self, *messages: Message) -> list[Event]:
        """What the machines are told of these messages."""
        before = len(self.desk.told)
        self.hears(*messages)
        return self.desk.told[before:]

    @property
    def lives(self) -> list[tuple[int, int]]:
        """Session and incarnation of each open text."""
        return [(mark.session, mark.incarnation) for mark in self.dispatcher.marks]


def text(session: int, incarnation: int = 1) -> Open:
    """The text (1, 2) under this session."""
    return opening(1, 2, session=session, incarnation=incarnation)


def beat(*marks: tuple[int, tuple[int, ...]]) -> Heartbeat:
    """The coordinator's heartbeat with these texts, by session."""
    listed = (
        SessionMark(session, 1, len(path), name(*path, session=session)) for session, path in marks
    )
    return Heartbeat(tuple(listed), 0, "")


def test_what_belongs_to_an_open_text_reaches_its_machine() -> None:
    entrance = Entrance()
    messages = opening(1, 2), draft((1, 2), 3), verdict((1, 2), 3)
    assert entrance.passes(*messages) == [Arrived(message) for message in messages]
    assert entrance.hears(draft((1, 2), 4)) == [gap(8, 8, 8)]  # what the machine has answered


def test_what_belongs_to_no_open_text_reaches_nobody() -> None:
    entrance = Entrance()
    assert entrance.passes(draft((1, 2), 3), verdict((1, 2), 3)) == []
    assert entrance.passes(text(2))
    assert entrance.passes(draft((1, 2), 3), verdict((1, 2), 3)) == []
    closing = Close(2, "stop")
    assert entrance.passes(closing, verdict((1, 2), 3)) == [Arrived(closing)], "it hears of its end"
    assert entrance.passes(closing) == []


def test_ticks_and_results_go_to_the_schedule_with_all_texts_and_so_does_what_follows() -> None:
    entrance = Entrance(num_lanes=2)
    assert entrance.dispatcher.handle(Tick(), 0.0) == (Noted(0),)
    entrance.hears(text(1), text(2))
    assert entrance.dispatcher.handle(Done(), 0.0) == (Noted(2),)
    assert entrance.dispatcher.handle(Afterwards(), 0.0) == (Noted(0),)
    assert [event for event in entrance.desk.told if not isinstance(event, Arrived)] == [
        Tick(),
        Done(),
        Afterwards(),
    ]


def test_the_only_lane_is_made_as_long_as_its_text() -> None:
    assert Entrance().hears(text(1)) == [Allocate(LIMITS.max_len), gap(7, 7, 7)]
    assert Entrance(num_lanes=2).hears(text(1)) == [gap(7, 7, 7)]


def test_an_open_must_be_newer_than_those_of_its_own_text() -> None:
    entrance = Entrance(num_lanes=2)
    entrance.hears(text(1, 7))
    assert entrance.passes(text(1, 7), text(1, 6)) == []
    assert entrance.passes(text(2, 1)) == [Arrived(text(2, 1))]
    assert entrance.lives == [(1, 7), (2, 1)]
    assert entrance.passes(text(2, 3)) == [Arrived(text(2, 3))]
    assert entrance.lives == [(1, 7), (2, 3)]


def test_a_closed_text_stays_closed_whatever_comes_late() -> None:
    entrance = Entrance()
    entrance.hears(text(1), Close(1, "stop"))
    assert entrance.dispatcher.marks == ()
    assert entrance.passes(text(1, 1), text(1, 2), draft((1, 2), 3)) == []
    assert entrance.hears(beat((1, (1, 2)))) == []  # a late heartbeat is no gap


def test_a_close_that_overtakes_its_open_closes_it() -> None:
    entrance = Entrance()
    entrance.hears(Close(1, "cancelled"))
    assert entrance.passes(text(1)) == []


def test_a_close_of_another_text_ends_nothing() -> None:
    entrance = Entrance()
    entrance.hears(text(2), Close(1, "stop"))
    assert entrance.lives == [(2, 1)]


def test_with_no_free_lane_an_open_is_not_obeyed_until_a_text_is_closed() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    assert entrance.passes(text(2)) == []
    assert entrance.hears(text(2)) == []
    assert entrance.lives == [(1, 1)]
    # The heartbeat says which text is closed, and so there is room for one more.
    assert entrance.hears(beat((2, (1, 2)))) == [gap(2, 0, 0)]
    assert entrance.lives == []
    assert entrance.passes(text(2)) == [Arrived(text(2))]


def test_what_there_is_no_room_for_is_not_asked_for() -> None:
    entrance = Entrance()
    entrance.hears(text(1), text(2))
    assert entrance.hears(beat((1, (1, 2)), (2, (1, 2)))) == [gap(8, 8, 8)]


def test_a_text_that_is_open_has_room_for_a_new_life() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    lane = entrance.dispatcher.texts[1].lane
    assert entrance.passes(text(1, 2)) == [Arrived(text(1, 2))]
    assert entrance.dispatcher.texts[1].lane is lane


def test_a_late_open_of_an_earlier_text_is_not_obeyed_while_another_is_open() -> None:
    entrance = Entrance()
    entrance.hears(text(1), Close(1, "stop"), text(2))
    assert entrance.passes(text(1, 5)) == []
    entrance.hears(beat())  # which may be older than the text that it leaves out
    assert entrance.passes(text(1, 6)) == []
    assert entrance.passes(text(2, 2)) == [Arrived(text(2, 2))]


def test_every_message_reaches_the_machine_of_its_own_text() -> None:
    entrance = Entrance(num_lanes=3)
    entrance.hears(text(1), text(2), text(3), Close(2, "stop"))
    entrance.hears(verdict((1, 2), 3, session=3), draft((1, 2), 3, session=2))
    assert entrance.desk.told[-1] == Arrived(verdict((1, 2), 3, session=3))
    assert entrance.lives == [(1, 1), (3, 1)]


def test_a_new_life_is_made_with_the_machine_of_the_one_before() -> None:
    entrance = Entrance(num_lanes=2)
    entrance.hears(text(1), text(2))
    assert entrance.desk.earlier is None
    first = entrance.dispatcher.texts[1]
    entrance.hears(text(1, 2))
    assert entrance.desk.earlier is first


def test_also_if_a_heartbeat_had_closed_the_text_in_between() -> None:
    entrance = Entrance(num_lanes=2)
    entrance.hears(text(1), text(2))
    first = entrance.dispatcher.texts[1]
    entrance.hears(beat((2, (1, 2))), text(1, 2))
    assert entrance.desk.earlier is first
    assert entrance.dispatcher.texts[1].lane is first.lane


def test_but_not_if_another_text_has_had_its_lane() -> None:
    entrance = Entrance()
    entrance.hears(text(1), beat(), text(2), Close(2, "stop"), text(1, 2))
    assert entrance.lives == [(1, 2)]
    assert entrance.desk.earlier is None


def test_a_text_is_opened_again_after_another_one_that_is_over() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 1), beat(), text(2, 1), Close(2, "stop"))
    assert entrance.passes(text(1, 2)) == [Arrived(text(1, 2))]
    assert entrance.lives == [(1, 2)]


def test_a_welcome_starts_afresh_with_any_session() -> None:
    entrance = Entrance(num_lanes=2)
    entrance.hears(text(7, 5), Close(7, "stop"), text(8, 5), text(9, 5), WELCOME)
    assert entrance.dispatcher.marks == ()
    assert entrance.passes(text(3, 1)) == [Arrived(text(3, 1))]
    assert entrance.passes(text(7, 1)) == [Arrived(text(7, 1))]


def test_a_text_that_no_heartbeat_lists_is_closed_until_a_newer_open() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 2))
    assert entrance.passes(beat()) == []
    assert entrance.dispatcher.marks == ()
    assert entrance.passes(text(1, 2), draft((1, 2), 3)) == []
    assert entrance.hears(beat((1, (1, 2)))) == [gap(1, 0, 0)]
    assert entrance.passes(text(1, 3)) == [Arrived(text(1, 3))]


def test_a_heartbeat_that_an_open_has_overtaken_closes_nothing() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    late = entrance.now + HEARTBEAT_INTERVAL_S / 2
    assert list(entrance.dispatcher.handle(Arrived(beat()), late)) == []
    assert entrance.lives == [(1, 1)]
    assert entrance.hears(beat()) == []
    assert entrance.lives == []


def test_a_heartbeat_that_knows_of_a_newer_open_is_a_gap() -> None:
    entrance = Entrance()
    entrance.hears(text(1, 4))
    path = name(1, 2, session=1)
    for newest, answer in ((3, gap(8, 8, 8)), (4, gap(8, 8, 8)), (5, gap(1, 4, 2))):
        marks = (SessionMark(1, newest, 2, path),)
        assert entrance.hears(Heartbeat(marks, 0, "")) == [answer]


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
    entrance = Entrance(num_lanes=3)
    entrance.hears(text(1), text(3))
    every = beat((1, (1, 2)), (2, (5,)), (3, (7,)))
    assert entrance.hears(every) == [gap(8, 8, 8), gap(2, 0, 0), gap(3, 1, 2)]
    assert entrance.desk.told[-1] == Confirmed(2)


def test_what_is_remembered_of_closed_texts_is_bounded() -> None:
    entrance = Entrance()
    entrance.hears(text(1))
    for session in range(2, 2 * MAX_REMEMBERED):
        entrance.hears(Close(session, "stop"))
    assert entrance.lives == [(1, 1)]
    newest = 2 * MAX_REMEMBERED - 1
    assert entrance.passes(text(newest, 2), text(newest - MAX_REMEMBERED // 2, 2)) == []
    assert entrance.passes(text(1, 1)) == []


# -- what is left of a text for people who look for a mistake --------------------------------------


def test_the_last_events_of_a_text_are_told_without_a_token() -> None:
    entrance = Entrance(num_lanes=2)
    entrance.hears(text(1), text(2), draft((1, 2), 1234, 1235))
    entrance.dispatcher.handle(Done(), entrance.now)
    before = f"{-HEARTBEAT_INTERVAL_S:.3f}"
    assert entrance.dispatcher.story(2) == f"Open 2 {before}, Done 0 0.000"
    last = entrance.dispatcher.story(1).split(", ")
    assert last[1:] == ["Draft 2 0.000", "Done 0 0.000"]
    assert entrance.dispatcher.story().count("Open 2") == 2
    entrance.hears(Close(1, "stop"))
    assert entrance.dispatcher.story(1) == ""


def test_only_so_many_events_of_a_text_are_kept() -> None:
    entrance = Entrance()
    entrance.hears(text(1), *[draft((1, 2), 9)] * MAX_PAST)
    assert entrance.dispatcher.story(1).count("Draft 1") == MAX_PAST
    assert "Open" not in entrance.dispatcher.story(1)
