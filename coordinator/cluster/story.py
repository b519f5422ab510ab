"""Keeps the last events of the coordinator, to be told when something unexpected ends it (pure).

Of an event it keeps what it was, of whom, of which text, and its number of tokens; no tokens. Ticks
and heartbeats, which come all the time, are left out.
"""

from collections import deque
from dataclasses import dataclass

from coordinator.cluster.router_events import (
    Arrived,
    Event,
    Garbled,
    NodeEnded,
    Outside,
    TextLeft,
    TextSubmitted,
    Tick,
)
from coordinator.cluster.snapshot import number_of
from coordinator.text.session_events import NodeId
from proto.errors import printable
from proto.messages import Features, Heartbeat, Message

MAX_PAST = 32  # events that are kept
MAX_TOLD = 800  # characters: a line of the log has 1000 at most


@dataclass(frozen=True, slots=True)
class Past:
    """A past event.

    at       when it came, in seconds
    what     its kind, or that of its message
    node     who sent it; "": no node
    session  0: it is of no text
    length   its tokens, or rows of features; None: it has none
    """

    at: float
    what: str
    node: str = ""
    session: int = 0
    length: int | None = None

    def told(self, now: float) -> str:
        """Return the event in words, with its time in seconds relative to `now`."""
        text = f"text {number_of(self.session)}" if self.session else ""
        length = "" if self.length is None else str(self.length)
        words = (self.what, length, self.node, text, f"{self.at - now:.3f}")
        return " ".join(word for word in words if word)


class Story:
    """The last `MAX_PAST` events, oldest first."""

    def __init__(self) -> None:
        self._past: deque[Past] = deque(maxlen=MAX_PAST)

    def note(self, event: Event, now: float) -> None:
        """Add an event that came at `now` (seconds, monotonic)."""
        match event:
            case Tick() | Arrived(_, Heartbeat()):
                return
            case Arrived(node, message):
                session, length = getattr(message, "session", 0), _length(message)
                past = Past(now, type(message).__name__, _name(node), session, length)
            case TextSubmitted(text):
                machine = text.machine
                past = Past(now, "TextSubmitted", "", machine.session, machine.num_prompt)
            case TextLeft(session):
                past = Past(now, "TextLeft", "", session)
            case Outside(node, session, _):
                past = Past(now, "Outside", _name(node), session)
            case Garbled(node) | NodeEnded(node):
                past = Past(now, type(event).__name__, _name(node))
        self._past.append(past)

    def passed_on(self, node: NodeId, kind: type[Message], session: int, now: float) -> None:
        """Add a frame that was passed on without being decoded."""
        self._past.append(Past(now, kind.__name__, _name(node), session))

    def told(self, session: int | None = None) -> str:
        """Return the last events of a text, or of all texts and of none, in one line.

        Times are in seconds, relative to the last of these events. "nothing": there are none. Where
        the line would be too long, the oldest events are left out.
        """
        past = [one for one in self._past if session in (None, one.session)]
        words = [one.told(past[-1].at) for one in past]
        while len(line := ", ".join(words)) > MAX_TOLD:
            del words[0]
        return line or "nothing"


def _length(message: Message) -> int | None:
    if isinstance(message, Features):
        return message.num_rows
    tokens = getattr(message, "tokens", None)
    return None if tokens is None else len(tokens)


def _name(node: NodeId) -> str:
    return printable(node.decode(errors="replace"))
