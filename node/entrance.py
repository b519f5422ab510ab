"""What comes in at a node: messages that keep to the terms of their text (pure).

It stands between the loop and the machines, which are then given nothing that they could not use:
token ids have a row in the model, positions have a place in the cache, features have the size that
a head reads (`proto/terms.py`).

    Open                      its terms count for the messages of the text from now on
      a target cannot take    dropped: the text ends, with the reason     -> Send(Fault(failed))
    Draft, Verdict, Features  dropped if they break the text's terms      -> Send(Fault(outside))
    Close                     its text's terms are forgotten
    Welcome                   everything before it is forgotten
    what a node of this role does not take: dropped                       -> Send(Fault(outside))

A Fault names the incarnation of the dropped message, by which the coordinator knows who sent it. At
most one is sent in TELL_EVERY_S, so that a peer cannot make this node talk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from node.dispatcher import MAX_REMEMBERED
from node.events import Afterwards, Arrived, Send, SharedAction, Tick
from proto.messages import (
    ANY_ID,
    MAX_TEXT_LEN,
    Close,
    Draft,
    Fault,
    FaultCode,
    Features,
    Message,
    Open,
    Role,
    SessionMark,
    Verdict,
    Welcome,
)
from proto.terms import SENT_TO, Terms, breach_of, breach_of_open

TELL_EVERY_S = 1.0
ANY_LAYER = 1 << 16

Result = TypeVar("Result")
Action = TypeVar("Action")
Result_contra = TypeVar("Result_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


class Handles(Protocol[Result_contra, Action_co]):
    """The node's state machine as the loop sees it: an `Entrance`, a `Dispatcher`, or another."""

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""

    def handle(
        self, event: Arrived | Tick | Afterwards | Result_contra, now: float, /
    ) -> Sequence[Action_co]:
        """Handle an event at `now` (seconds); returns the actions that it asks for."""

    def story(self, session: int | None = None, /) -> str:
        """Return the last events of an open text, or of all texts; "" if there are none."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a node's model can take.

    num_ids, max_len, num_layers  of a target: its logits, its longest text, its layers
    features  of a drafter that is a head: bytes of one token's features, by their number type
    """

    role: Role
    num_ids: int = ANY_ID
    max_len: int = MAX_TEXT_LEN
    num_layers: int = ANY_LAYER
    features: Mapping[str, int] = field(default_factory=dict)


class Entrance(Generic[Result, Action]):
    """Lets in the messages that keep to the terms of their text; has the interface of `Handles`.

    num_dropped  messages that were not let in
    """

    def __init__(self, inner: Handles[Result, Action], own: Own) -> None:
        self._inner = inner
        self._own = own
        self._terms: dict[int, Terms] = {}  # by session; the latest MAX_REMEMBERED
        self._dtype = ""  # number type of all features here, which one forward reads together
        self._told_at = -TELL_EVERY_S
        self.num_dropped = 0

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""
        return self._inner.marks

    def story(self, session: int | None = None) -> str:
        """Return the last events of an open text, or of all texts; "" if there are none."""
        return self._inner.story(session)

    def handle(
        self, event: Arrived | Tick | Afterwards | Result, now: float
    ) -> Sequence[Action | SharedAction]:
        """Handle an event at `now` (seconds); returns the actions that it asks for."""
        if isinstance(event, Arrived):
            if why := self._breach_of(event.message):
                return self._drop(event.message, why, now)
            self._note(event.message)
        return self._inner.handle(event, now)

    def _breach_of(self, message: Message) -> str:
        """Return why a message is not let in; "": it is."""
        own = self._own
        if type(message) not in SENT_TO[own.role]:
            return f"no place in what a {own.role} takes"
        if isinstance(message, Open) and own.role is Role.TARGET:
            return breach_of_open(message, own.num_ids, own.max_len, own.num_layers)
        if isinstance(message, Features) and self._dtype not in ("", message.dtype):
            return f"features of type {message.dtype!r}, and those before were {self._dtype}"
        if isinstance(message, Draft | Verdict | Features):
            terms = self._terms.get(message.session)
            return "" if terms is None else breach_of(message, terms)
        return ""

    def _note(self, message: Message) -> None:
        """Note what a message that is let in says of terms."""
        match message:
            case Open(session=session):
                self._terms.pop(session, None)
                self._terms[session] = Terms.of(message, self._own.features)
                if len(self._terms) > MAX_REMEMBERED:
                    del self._terms[next(iter(self._terms))]
            case Features(session=session) if session in self._terms:
                self._dtype = message.dtype
            case Close(session=session):
                self._terms.pop(session, None)
            case Welcome():
                self._terms.clear()
                self._dtype = ""

    def _drop(self, message: Message, why: str, now: float) -> Sequence[SharedAction]:
        """Count a message that is not let in; return a Fault about it, now and then."""
        self.num_dropped += 1
        session, incarnation = getattr(message, "session", 0), getattr(message, "incarnation", 0)
        if isinstance(message, Open):
            return (Send(Fault(session, incarnation, FaultCode.FAILED, f"the target: {why}")),)
        if now - self._told_at < TELL_EVERY_S:
            return ()
        self._told_at = now
        line = f"{type(message).__name__} with {why}"
        return (Send(Fault(session, incarnation, FaultCode.OUTSIDE, line)),)
