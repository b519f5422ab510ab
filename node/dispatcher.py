"""Passes messages on to the machines of open texts (pure).

Theory of operation
-------------------
Words of ours: a *life* of a text is the time from one Open of it to the next; the Opens are counted
by the *incarnation*. The *machine* of a text is the state machine that drafts or verifies it in one
life. A *lane* is the part of the KV cache that one text uses.

Every message that the entrance (`entrance.py`) lets in comes through here, and the code behind does
not check again to which text it belongs:

    Open            its text is closed for good, or has had this or a newer Open -> ignored
                    there is no room for it (below)                              -> ignored
                    else a new life begins, with a new machine
    Draft, Verdict, Features  if their text is open here                         -> its machine
    Close           its machine is told; the text is closed for good, also if it was never open
    Heartbeat       a text is open here and not listed: it is closed until there is a newer Open;
                    but not if it was opened less than a heartbeat ago
                    a text is listed and not open here, differs from ours, or is listed with
                    a newer Open, which may be lost                 -> Send(Fault(gap))
                    a text is listed with a prefix of our tokens    -> Confirmed, to its machine
    Welcome         the first message of a coordinator: everything before it is forgotten

Incarnations are compared within a text. A text that a heartbeat does not list is not closed for
good: the heartbeat may be older than the Open that it seems to contradict. Drafts, verdicts and
features of an earlier life of the text come to its machine, too: each says to which committed
tokens it belongs, and the machine takes what fits. Results of the node's own forwards go to its
schedule.

A result is handled in two halves, because it costs most if a device waits for its next forward. The
event with the result updates text, tree and cache, so that a Tick can launch the next forward; the
event Afterwards does the rest. Only a Tick ever comes between the two.

There is room for as many texts as there are lanes. If they are all in use, an Open of another text
is ignored: one of ours must have been closed, and the next heartbeat shows which.

A lane keeps what it has cached after its text is closed. The next text with the same beginning goes
on from there, or gets a copy of it. The device works in order, so this is also right for a lane
whose last pass is still running.

The last events of each open text are kept for debugging: their kinds and lengths, and no tokens
(`story`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    Confirmed,
    SharedAction,
    TextEvent,
    Tick,
    gap,
)
from node.lanes import Lane, Lanes
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    Close,
    Draft,
    Features,
    Heartbeat,
    Open,
    SessionMark,
    Verdict,
    Welcome,
)
from proto.tree import SpeculationTree

CLOSED = 1 << 32  # greater than every incarnation
MAX_PAST = 32  # events that are kept of a text
MAX_REMEMBERED = 1024  # texts whose newest incarnation is kept; at most MAX_SESSIONS are open


@dataclass(frozen=True, slots=True)
class Past:
    """A past event of a text: when it came (seconds), its kind, and how many tokens it had."""

    at: float
    kind: str
    length: int


class Machine(Protocol):
    """The state machine of one text in one life: it drafts or verifies that text.

    opened  the Open with which this life began
    lane    the lane of the text
    tree    the committed text, and the drafts beyond it
    """

    opened: Open
    lane: Lane
    tree: SpeculationTree

    @property
    def num_read(self) -> int:
        """Return how many tokens of the text the model has read."""

    def begin(self) -> Sequence[SharedAction]:
        """Return the actions with which the life begins."""

    def handle(self, event: TextEvent, now: float) -> Sequence[SharedAction]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""

    def check(self) -> None:
        """Assert every invariant of the text's machine."""


Text = TypeVar("Text", bound=Machine)
Result = TypeVar("Result")
Action = TypeVar("Action")
Result_contra = TypeVar("Result_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


class Schedule(Protocol[Text, Result_contra, Action_co]):
    """Decides what is computed next, and for which of the node's texts."""

    def make(
        self,
        message: Open,
        lane: Lane,
        earlier: Text | None,
        texts: Mapping[int, Text],
        now: float,
    ) -> Text:
        """Return the machine for a text that was opened.

        earlier  the machine of its last life
        texts    the texts that are open already, by session
        """

    def tick(self, texts: Mapping[int, Text], now: float) -> Sequence[SharedAction | Action_co]:
        """Return the next actions; all messages that had arrived have been handled."""

    def done(
        self, result: Result_contra, texts: Mapping[int, Text], now: float
    ) -> Sequence[SharedAction | Action_co]:
        """Handle the result of a Compute; some of its texts may be closed. Returns actions."""

    def afterwards(self, now: float) -> Sequence[SharedAction | Action_co]:
        """Do the part of the last result's work for which no device waits (see `Afterwards`)."""


class Dispatcher(Generic[Text, Result, Action]):
    """Gives each open text of a node a machine and a lane, and passes messages to the machines."""

    def __init__(self, lanes: Lanes, schedule: Schedule[Text, Result, Action]) -> None:
        self._lanes = lanes
        self._schedule = schedule
        self._texts: dict[int, Text] = {}  # by session, in the order in which they were opened
        # By session: incarnation of the newest Open that was accepted, or CLOSED. Only the newest
        # MAX_REMEMBERED texts: if an older one is opened by a late Open, a heartbeat closes it.
        self._newest: dict[int, int] = {}
        self._opened_at: dict[int, float] = {}  # of the open texts, by session
        self._past: dict[int, deque[Past]] = {}  # of the open texts, by session; MAX_PAST at most
        self._last: dict[Lane, Text] = {}  # the newest machine of each lane; its text may be closed

    def handle(
        self, event: Arrived | Tick | Afterwards | Result, now: float
    ) -> Sequence[SharedAction | Action]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Tick():
                return self._schedule.tick(self._texts, now)
            case Afterwards():
                return self._schedule.afterwards(now)
            case Arrived(Open() as message):
                return self._on_open(message, now)
            case Arrived(
                (
                    Draft(session=session) | Verdict(session=session) | Features(session=session)
                ) as message
            ):
                self._note(session, message, now)
                text = self._texts.get(session)
                return () if text is None else text.handle(event, now)
            case Arrived(Close(session=session)):
                if (text := self._texts.get(session)) is not None:
                    text.handle(event, now)
                self._close(session)
                self._remember(session, CLOSED)
                return ()
            case Arrived(Heartbeat(marks=marks)):
                return self._on_marks(marks, now)
            case Arrived(Welcome()):
                self._begin_afresh()
                return ()
            case Arrived():
                return ()
        for past in self._past.values():
            past.append(Past(now, type(event).__name__, 0))
        return self._schedule.done(event, self._texts, now)

    @property
    def texts(self) -> Mapping[int, Text]:
        """Return the machines of the open texts, by session, the oldest first."""
        return MappingProxyType(self._texts)

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""
        return tuple(map(_mark, self._texts.values()))

    def story(self, session: int | None = None) -> str:
        """Return the last events of an open text, or of all texts, in one line; "": no events.

        Each event is shown with its number of tokens, and its time in seconds relative to the last
        one.
        """
        texts = self._past.values() if session is None else (self._past.get(session, ()),)
        events = sorted((one for past in texts for one in past), key=lambda one: one.at)
        events = events[-MAX_PAST:]
        return ", ".join(f"{one.kind} {one.length} {one.at - events[-1].at:.3f}" for one in events)

    def _note(self, session: int, message: Open | Draft | Verdict | Features, now: float) -> None:
        if (past := self._past.get(session)) is not None:
            length = message.num_rows if isinstance(message, Features) else len(message.tokens)
            past.append(Past(now, type(message).__name__, length))

    # -- lives ------------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> Sequence[SharedAction]:
        session = message.session
        if message.incarnation <= self._newest.get(session, 0) or not self._has_room(session):
            return ()
        self._remember(session, message.incarnation)
        if (text := self._texts.get(session)) is not None:
            lane = text.lane
        else:
            lane = self._lanes.take(message.tokens, message.key)
        last = self._last.get(lane)
        earlier = last if last is not None and last.opened.key == message.key else None
        text = self._schedule.make(message, lane, earlier, self._texts, now)
        self._texts[session] = self._last[lane] = text
        self._opened_at[session] = now
        self._past.setdefault(session, deque(maxlen=MAX_PAST))
        self._note(session, message, now)
        if len(self._lanes) > 1:
            return text.begin()
        return (Allocate(message.limits.max_len), *text.begin())

    def _has_room(self, session: int) -> bool:
        return session in self._texts or self._lanes.num_free > 0

    def _close(self, session: int) -> None:
        """Drop the machine of a text and free its lane.

        `_newest` decides whether it may come back.
        """
        text = self._texts.pop(session, None)
        if text is not None:
            del self._opened_at[session], self._past[session]
            self._lanes.give_back(text.lane)

    def _remember(self, session: int, incarnation: int) -> None:
        self._newest[session] = incarnation
        if len(self._newest) > MAX_REMEMBERED:
            del self._newest[min(self._newest.keys() - self._texts.keys() - {session})]

    def _begin_afresh(self) -> None:
        for session in tuple(self._texts):
            self._close(session)
        self._newest.clear()

    # -- heartbeats -------------------------------------------------------------------------------

    def _on_marks(self, marks: Sequence[SessionMark], now: float) -> Sequence[SharedAction]:
        """Compare the coordinator's list of texts with the texts here; returns actions."""
        for session in self._texts.keys() - {mark.session for mark in marks}:
            # An Open may have overtaken this heartbeat; it cannot overtake the next one.
            if now - self._opened_at[session] >= HEARTBEAT_INTERVAL_S:
                self._close(session)
        actions: list[SharedAction] = []
        for mark in marks:
            if self._newest.get(mark.session) != CLOSED and self._has_room(mark.session):
                actions += self._on_mark(mark, now)
        return actions

    def _on_mark(self, mark: SessionMark, now: float) -> Sequence[SharedAction]:
        text = self._texts.get(mark.session)
        if text is None:
            return (gap(mark.session, 0, 0),)
        is_ours = text.tree.text.is_prefix(mark.length, mark.path_hash)
        # A newer Open may still be on its way rather than lost; the coordinator allows for that.
        if not is_ours or mark.incarnation > text.opened.incarnation:
            return (gap(mark.session, text.opened.incarnation, len(text.tree.text)),)
        self._past[mark.session].append(Past(now, Confirmed.__name__, mark.length))
        return text.handle(Confirmed(mark.length), now)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert len(self._newest) <= MAX_REMEMBERED
        self._lanes.check()
        assert len(self._texts) == len(self._lanes) - self._lanes.num_free
        assert self._past.keys() == self._texts.keys()
        assert len({id(text.lane) for text in self._texts.values()}) == len(self._texts)
        for text in self._texts.values():
            assert text.lane.text is text.tree.text, "a lane holds another text"
            text.check()


def is_open(text: Machine, texts: Mapping[int, Machine]) -> bool:
    """True if the text is open in this same life; else results computed for it are void."""
    return texts.get(text.opened.session) is text


def _mark(text: Machine) -> SessionMark:
    committed, opened = text.tree.text, text.opened
    num_read = min(len(committed), text.num_read)
    return SessionMark(opened.session, opened.incarnation, len(committed), committed.root, num_read)
