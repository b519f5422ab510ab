"""The one entrance of a node's machine: which texts it follows, and in which life (pure).

Theory of operation
-------------------
Every message of the coordinator comes through here, and nobody behind it asks again whose it is:

    Open            closed for good, or not newer than the newest of its text  -> nothing
                    no room for it (below)                                     -> nothing
                    else its machine begins a life with it
    Draft, Verdict, Features  of a text that is open here                      -> its machine
    Close           its machine is told; the text is closed for good, also if it was never open
    Heartbeat       open here and not listed: closed, until there is a newer Open; unless it was
                    opened less than a heartbeat ago
                    listed and not open here, with another text, or with a newer
                    Open, which may be lost                                    -> Send(Fault(gap))
                    listed with a beginning of ours             -> Confirmed, to its machine
    Welcome         a coordinator's first word: all that was before means nothing

Incarnations are compared within a text. A text that a heartbeat leaves out is not closed for good:
the heartbeat may be older than the Open that it seems to deny. What a machine is told is therefore
always of its present life. Results of the node's own forwards go to its schedule.

A result is handled in two halves, because a device that waits for its next forward is the dearest
thing here. With the result itself text, tree and cache go on, so that a Tick can launch the next
forward; with Afterwards the rest follows. Nothing but a Tick ever comes between the two.

A text has a machine for each of its lives, made with the Open that began it, and a lane of the
cache. There is room for as many texts as there are lanes. One more is not opened: one of ours must
be closed, and the next heartbeat says which.

A lane outlives its texts: what is cached of the last one is kept, and the next text that begins
alike goes on from there, or takes a copy of it. The device works in order, so that holds also for a
lane whose last pass is still running.

Of each open text the last events are kept for people who look for a mistake: their kinds and
lengths, and no token (`story`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from engine.layout.slots import MAX_MISSING, NUM_TREE_SLOTS, Move, SlotMap
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    SESSION_KEY_BYTES,
    Close,
    Draft,
    Fault,
    FaultCode,
    Features,
    Heartbeat,
    Message,
    Open,
    SessionMark,
    Verdict,
    Welcome,
)
from proto.tree import CommittedText, SpeculationTree

# -- events and actions ----------------------------------------------------------------------------

# What a node's machines are told, facts, and what they ask for, imperatives.


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A heartbeat shows that the coordinator has the first `length` tokens of our text."""

    length: int


@dataclass(frozen=True, slots=True)
class Tick:
    """All messages that were there have been handled."""


@dataclass(frozen=True, slots=True)
class Afterwards:
    """The result of a forward has been handled, and the next one launched if it could be.

    What nobody waits for as the device does comes now: messages, and what is learnt.
    """


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new text begins, in the only lane: the cache must hold `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Move cache rows, after every Compute that was asked for before; one move of a lane."""

    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the first `length` slots of a lane to another, likewise."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """Write zeros to all slots of a lane from `start` on, likewise: some hold NaN or infinity."""

    lane: int
    start: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Tick again at `deadline` (seconds) at the latest."""

    deadline: float


TextEvent = Arrived | Confirmed  # what the machine of a text is told
# What every machine may ask for, besides its own Compute.
SharedAction = Allocate | CopyPrefix | MoveRows | Send | WaitUntil | Wipe


def gap(session: int, incarnation: int, length: int) -> Send:
    """Ask to be told the text anew, by an Open.

    incarnation, length  of the text that is here; zeros if there is none
    """
    detail = f"the text here has {length} tokens and is another"
    return Send(Fault(session, incarnation, FaultCode.GAP, detail))


# -- lanes -----------------------------------------------------------------------------------------

# Where the texts of a node lie in its cache: a lane each.

MIN_COPIED = 32  # tokens; fewer are read again as quickly


class Lane:
    """One lane.

    slots  its layout
    text   whose first `slots.prefix_len` tokens are cached; that of the text that is open in it
    """

    def __init__(self, number: int, num_slots: int, *, is_head: bool = False) -> None:
        # A head reads tokens once more beside its tree.
        num_tree_slots = NUM_TREE_SLOTS - MAX_MISSING if is_head else NUM_TREE_SLOTS
        self.slots: SlotMap[int] = SlotMap(num_slots, num_tree_slots, lane=number)
        self._is_head = is_head
        self.text = CommittedText(bytes(SESSION_KEY_BYTES))

    def num_cached_of(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text are cached here."""
        # What a head drafted itself it has read without the target's features.
        num_cached = self.slots.fed_len if self._is_head else self.slots.prefix_len
        return min(num_cached, self.text.common_len(tokens))

    def begin(self, text: CommittedText, *, keep: bool = True) -> None:
        """A text begins here, or begins anew. keep: with what is cached of it."""
        # The last token is always fed again.
        kept = min(self.num_cached_of(text.tokens), len(text) - 1) if keep else 0
        self.slots.truncate(kept)
        self.text = text


class Reader(Protocol):
    """A text that is not all in its lane yet.

    may_copy  its lane may have what another has computed
    """

    opened: Open
    lane: Lane

    @property
    def may_copy(self) -> bool: ...


AnyReader = TypeVar("AnyReader", bound=Reader)


def next_reader(readers: Sequence[AnyReader]) -> AnyReader | None:
    """The first that has something to read by itself.

    One that begins as an older one does waits until that one is read, and takes a copy.
    """
    return next((one for one in readers if not _has_elder(one, readers)), None)


def _has_elder(reader: Reader, readers: Sequence[Reader]) -> bool:
    if not reader.may_copy:
        return False
    tokens, num_read = reader.lane.text.tokens, reader.lane.slots.prefix_len
    return any(
        other.opened.session < reader.opened.session
        and other.lane.text.common_len(tokens) - num_read > MIN_COPIED
        for other in readers
    )


class Lanes:
    """All lanes of a node.

    is_head  what runs in them reads a target's features
    """

    def __init__(self, count: int, num_slots: int, *, is_head: bool = False) -> None:
        self._lanes = [Lane(number, num_slots, is_head=is_head) for number in range(count)]
        self._taken: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def num_free(self) -> int:
        """Texts that can still be opened."""
        return len(self._lanes) - len(self._taken)

    def take(self, tokens: Sequence[int], key: bytes) -> Lane:
        """The free lane that the text of this key was in, or else the one that has most of it; of
        several, or if none has much, the one that was free for longest."""

        def suits(lane: Lane) -> tuple[bool, int]:
            num_cached = lane.num_cached_of(tokens)
            # All texts begin with the same few tokens: for those no lane is worth taking.
            return lane.text.key == key, num_cached if num_cached >= MIN_COPIED else 0

        lane = max((lane for lane in self._lanes if lane not in self._taken), key=suits)
        self._taken.append(lane)
        return lane

    def give_back(self, lane: Lane) -> None:
        """Its text is closed."""
        self._taken.remove(lane)
        # The next text without a beginning here takes what was not used for longest.
        self._lanes.remove(lane)
        self._lanes.append(lane)

    def copy_for(self, lane: Lane, tokens: Sequence[int]) -> CopyPrefix | None:
        """What another lane has of a text and its own has not; from now on it has it."""
        # The last token is always fed again.
        best = max(self._lanes, key=lambda other: other.num_cached_of(tokens))
        length = min(best.num_cached_of(tokens), len(tokens) - 1)
        if best is lane or length < lane.slots.prefix_len + MIN_COPIED:
            return None
        lane.slots.adopt(length)
        return CopyPrefix(best.slots.lane, lane.slots.lane, length)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert len(set(map(id, self._taken))) == len(self._taken), "a lane is given to two texts"
        for lane in self._lanes:
            lane.slots.check()
            assert lane.slots.prefix_len <= len(lane.text) or not lane.text.tokens


# -- texts -----------------------------------------------------------------------------------------

CLOSED = 1 << 32  # above every incarnation
MAX_PAST = 32  # events of a text that are kept
MAX_REMEMBERED = 1024  # texts; at most `messages.MAX_SESSIONS` are open at a time


@dataclass(frozen=True, slots=True)
class Past:
    """An event of a text: when it came, what it was, and how many tokens it had."""

    at: float
    kind: str
    length: int


class Machine(Protocol):
    """The machine of one text in one of its lives.

    opened  the Open that it was made with
    """

    opened: Open
    lane: Lane
    tree: SpeculationTree

    def begin(self) -> Sequence[SharedAction]:
        """What it says at once."""

    def handle(self, event: TextEvent, now: float) -> Sequence[SharedAction]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""

    def check(self) -> None:
        """Assert every invariant."""


Text = TypeVar("Text", bound=Machine)
Result = TypeVar("Result")
Action = TypeVar("Action")
Result_contra = TypeVar("Result_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


class Schedule(Protocol[Text, Result_contra, Action_co]):
    """What is computed next, and for which texts."""

    def make(self, message: Open, lane: Lane, earlier: Text | None, now: float) -> Text:
        """The machine of a text; `earlier`: of its life before."""

    def tick(self, texts: Mapping[int, Text], now: float) -> Sequence[SharedAction | Action_co]:
        """All messages that were there have been handled."""

    def done(
        self, result: Result_contra, texts: Mapping[int, Text], now: float
    ) -> Sequence[SharedAction | Action_co]:
        """What was asked for has been computed; some of its texts may be closed."""

    def afterwards(
        self, texts: Mapping[int, Text], now: float
    ) -> Sequence[SharedAction | Action_co]:
        """What of it could wait until the next forward was launched; see `Afterwards`."""


class Follower(Generic[Text, Result, Action]):
    """The texts of one node, a machine and a lane for each, and the schedule of them all."""

    def __init__(self, lanes: Lanes, schedule: Schedule[Text, Result, Action]) -> None:
        self._lanes = lanes
        self._schedule = schedule
        self._texts: dict[int, Text] = {}  # by session, in the order in which they were opened
        # By session: incarnation of the newest Open that was obeyed, or CLOSED. Of the newest
        # texts: should one of the others come to life again, a heartbeat ends it.
        self._newest: dict[int, int] = {}
        self._opened_at: dict[int, float] = {}  # of the open ones, by session
        self._past: dict[int, deque[Past]] = {}  # of the open ones, by session; MAX_PAST at most
        self._last: dict[Lane, Text] = {}  # the newest machine of each lane; its text may be closed

    def handle(
        self, event: Arrived | Tick | Afterwards | Result, now: float
    ) -> Sequence[SharedAction | Action]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        match event:
            case Tick():
                return self._schedule.tick(self._texts, now)
            case Afterwards():
                return self._schedule.afterwards(self._texts, now)
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
        """Those that are open, by session, the oldest first."""
        return MappingProxyType(self._texts)

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """How far every open text is here."""
        return tuple(map(_mark, self._texts.values()))

    def story(self, session: int | None = None) -> str:
        """The last events of an open text, or of all, in one line; "": there are none.

        Each with its number of tokens, and how many seconds it came before the last one.
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
        text = self._schedule.make(message, lane, earlier, now)
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
        """Its machine is nobody's any more; only `_newest` says whether it may come back."""
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
        """Compare the coordinator's texts with ours."""
        for session in self._texts.keys() - {mark.session for mark in marks}:
            # This heartbeat may be older than an Open that overtook it; the next one is not.
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
        # Of a newer Open that is still on its way, the coordinator knows that it may be.
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
    """Whether a text is open, in this very life; else what was computed for it means nothing."""
    return texts.get(text.opened.session) is text


def _mark(text: Machine) -> SessionMark:
    committed = text.tree.text
    return SessionMark(text.opened.session, text.opened.incarnation, len(committed), committed.root)
