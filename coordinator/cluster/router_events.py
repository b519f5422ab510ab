"""What the router is told, and what it asks for (pure). Events are facts, actions imperatives."""

from dataclasses import dataclass

from coordinator.text.session import Emit, EmitPrompt, NodeId, Result, SessionFigures
from proto.errors import SlipstreamError
from proto.messages import Draft, Features, Message

UNREAD = (Draft, Features)  # what is passed on, and nothing else


@dataclass(frozen=True, slots=True)
class TextSubmitted:
    """Somebody wants this text. It waits until the nodes are free for it."""

    text: SessionFigures


@dataclass(frozen=True, slots=True)
class TextLeft:
    """Nobody reads the text any more: its reader has left, or found its end (`is_complete`)."""

    session: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message has come from a node; a verdict has been passed on before."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Garbled:
    """A frame has come from a node that is no message, for this reason.

    is_hello  it should have been an introduction
    """

    node: NodeId
    reason: str
    is_hello: bool = False


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """A node's process has ended.

    is_unusable  as it was configured it cannot work
    """

    node: NodeId
    line: str
    is_unusable: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to a node. It may be lost."""

    node: NodeId
    frame: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand something new to the reader of a text."""

    session: int
    item: Emit | EmitPrompt


@dataclass(frozen=True, slots=True)
class End:
    """Hand the last to the reader of a text, of which nothing more is heard."""

    session: int
    last: Result | SlipstreamError


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell people."""

    line: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End everything: no text can go on."""

    error: SlipstreamError


Event = TextSubmitted | TextLeft | Arrived | Garbled | NodeEnded | Tick
Action = Send | Deliver | End | Warn | Abort
