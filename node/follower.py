"""The one entrance of a node's machine: which texts it follows, and in which life (pure).

Theory of operation
-------------------
Every message of the coordinator comes through here, and nobody behind it asks again whose it is:

    Open            closed for good, or not newer than the newest of its text  -> nothing
                    no room for it (below)                                     -> nothing
                    else its machine begins a life with it
    Draft, Verdict  of a text that is open here                                -> its machine
    Close           the text is closed for good, also if it was never open
    Heartbeat       open here and not listed: closed, until there is a newer Open
                    listed and not open here, or with another text             -> Send(Fault(gap))
                    listed with a beginning of ours             -> Confirmed, to its machine
    Welcome         a coordinator's first word: all that was before means nothing

Incarnations are compared within a text. A text that a heartbeat leaves out is not closed for good:
the heartbeat may be older than the Open that it seems to deny. What a machine is told is therefore
always of its present life. Results of its own forwards come past this entrance: the machine knows
them by their tickets.

There is one machine so far, so one text is open at a time. A text that is over leaves it to any
other, and one that may not be over to a later one only: session ids grow in the order in which
texts begin, so an earlier one comes from a late message.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from node.events import Arrived, Confirmed, Send, Tick, gap
from proto.messages import Close, Draft, Heartbeat, Open, SessionMark, Verdict, Welcome
from proto.tree import SpeculationTree

CLOSED = 1 << 32  # above every incarnation
MAX_REMEMBERED = 1024  # texts; at most `messages.MAX_SESSIONS` are open at a time

Result_contra = TypeVar("Result_contra", contravariant=True)
Result = TypeVar("Result")
Action = TypeVar("Action")


class Machine(Protocol[Result_contra, Action]):
    """The machine of one text.

    opened  the newest Open; None: no text is open
    tree    of that text, or of the last one
    """

    opened: Open | None
    tree: SpeculationTree

    def handle(self, event: Arrived | Confirmed | Tick | Result_contra, now: float) -> list[Action]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""

    def close(self) -> None:
        """Nothing more is wanted of this text."""


class Follower(Generic[Result, Action]):
    """The texts of one node, and the machine behind each."""

    def __init__(self, machine: Machine[Result, Action]) -> None:
        self._machine = machine
        self._texts: dict[int, Machine[Result, Action]] = {}  # by session: those that are open
        # By session: incarnation of the newest Open that was obeyed, or CLOSED. Of the newest
        # texts: should one of the others come to life again, a heartbeat ends it.
        self._newest: dict[int, int] = {}
        self._present: int | None = None  # session of the text that the machine has or had last

    def handle(self, event: Arrived | Tick | Result, now: float) -> Sequence[Action | Send]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        match event:
            case Arrived(Open() as message):
                return self._on_open(message, now)
            case Arrived(Draft(session=session) | Verdict(session=session)):
                machine = self._texts.get(session)
                return [] if machine is None else machine.handle(event, now)
            case Arrived(Close(session=session)):
                self._close(session)
                self._remember(session, CLOSED)
                return []
            case Arrived(Heartbeat(marks=marks)):
                return self._on_marks(marks, now)
            case Arrived(Welcome()):
                self._begin_afresh()
                return []
            case Arrived():
                return []
        return self._machine.handle(event, now)

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """How far every open text is here."""
        found = []
        for session, machine in self._texts.items():
            assert machine.opened is not None
            text = machine.tree.text
            found.append(SessionMark(session, machine.opened.incarnation, len(text), text.root))
        return tuple(found)

    # -- lives ------------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> list[Action]:
        session = message.session
        if message.incarnation <= self._newest.get(session, 0) or not self._has_room(session):
            return []
        self._remember(session, message.incarnation)
        if session not in self._texts:
            self._make_room()
            self._texts[session] = self._machine
            self._present = session
        return self._texts[session].handle(Arrived(message), now)

    def _has_room(self, session: int) -> bool:
        """Whether a text that is not over may be opened."""
        present = self._present
        return present is None or session >= present or self._newest.get(present) == CLOSED

    def _make_room(self) -> None:
        for session in tuple(self._texts):
            self._close(session)

    def _close(self, session: int) -> None:
        """The machine has no text any more; only `_newest` says whether it may come back."""
        machine = self._texts.pop(session, None)
        if machine is not None:
            machine.close()

    def _remember(self, session: int, incarnation: int) -> None:
        self._newest[session] = incarnation
        if len(self._newest) > MAX_REMEMBERED:
            del self._newest[min(self._newest.keys() - self._texts.keys() - {session})]

    def _begin_afresh(self) -> None:
        self._make_room()
        self._newest.clear()
        self._present = None

    # -- heartbeats -------------------------------------------------------------------------------

    def _on_marks(self, marks: Sequence[SessionMark], now: float) -> Sequence[Action | Send]:
        """Compare the coordinator's texts with ours."""
        for session in self._texts.keys() - {mark.session for mark in marks}:
            self._close(session)
        actions: list[Action | Send] = []
        for mark in marks:
            if self._newest.get(mark.session) != CLOSED and self._has_room(mark.session):
                actions += self._on_mark(mark, now)
        return actions

    def _on_mark(self, mark: SessionMark, now: float) -> Sequence[Action | Send]:
        machine = self._texts.get(mark.session)
        if machine is None:
            return [gap(mark.session, 0, 0)]
        assert machine.opened is not None
        text = machine.tree.text
        if not text.is_prefix(mark.length, mark.path_hash):
            return [gap(mark.session, machine.opened.incarnation, len(text))]
        return machine.handle(Confirmed(mark.length), now)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert len(self._newest) <= MAX_REMEMBERED
        for session, machine in self._texts.items():
            assert machine.opened is not None
            assert machine.opened.session == session
            assert machine.opened.incarnation == self._newest[session] < CLOSED
        assert self._texts or self._machine.opened is None
