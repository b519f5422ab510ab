"""The events and actions of the `Router` (pure). Events are facts, actions are imperatives."""

from dataclasses import dataclass

from coordinator.text.session_events import Emit, EmitPrompt, EmitRead, NodeId
from coordinator.text.timed_session import Result, TimedSession
from proto.errors import SlipstreamError
from proto.messages import Draft, Features, Message, Verdict

UNREAD = (Draft, Features)  # messages that are passed on and not decoded
PASSED_ON = (*UNREAD, Verdict)


@dataclass(frozen=True, slots=True)
class TextSubmitted:
    """A user has asked for this text. It waits until the nodes have room for it."""

    text: TimedSession


@dataclass(frozen=True, slots=True)
class TextLeft:
    """Nobody reads the text any more: its reader has left, or found its end (`is_complete`)."""

    session: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message has come from a node; if it is a verdict, it was passed on already."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Garbled:
    """A frame has come from a node that cannot be decoded; `reason` says why.

    is_hello  by its kind byte it is a Hello
    """

    node: NodeId
    reason: str
    is_hello: bool = False


@dataclass(frozen=True, slots=True)
class Outside:
    """A frame from a node is outside of what its text allows (`reason`); it was not passed on."""

    node: NodeId
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """A node's process has ended, or the node has failed; `line` says how, for people.

    is_unusable  with this configuration the node can never work
    is_last      it was started here, and no other process takes its place
    """

    node: NodeId
    line: str
    is_unusable: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at regular intervals."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to a node. The frame may be lost."""

    node: NodeId
    frame: bytes


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of a node that was started here and says nothing any more."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give new tokens, the prompt's logprobs or how far it was read to the reader of a text."""

    session: int
    item: Emit | EmitPrompt | EmitRead


@dataclass(frozen=True, slots=True)
class End:
    """Give the result of a text, or the error that ended it, to its reader; the text is over."""

    session: int
    last: Result | SlipstreamError


@dataclass(frozen=True, slots=True)
class Warn:
    """Show a line to people and write it to the log."""

    line: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End the coordinator with this error: no text can go on."""

    error: SlipstreamError


Event = TextSubmitted | TextLeft | Arrived | Garbled | Outside | NodeEnded | Tick
Action = Send | Kill | Deliver | End | Warn | Abort
