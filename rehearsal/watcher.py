"""Who looks on while the machines run: a judge in tests, a ledger in the predictor."""

from typing import TYPE_CHECKING, Any, Protocol

from coordinator.cluster.routing import Router
from coordinator.text.running import Result
from coordinator.text.session import Emit, EmitPrompt, NodeId, Session
from drafter_node import events as drafter
from proto.messages import Message
from rehearsal.setting import Text
from target_node import events as target

if TYPE_CHECKING:
    from rehearsal.node import Node


class Watcher(Protocol):
    """Is told each fact when it happens."""

    def begun(self, session: Session, text: Text) -> None:
        """A text begins."""

    def disturbed(self) -> None:
        """A node has come or gone, or a link has done wrong."""

    def told(self, node_id: NodeId, message: Message, router: Router) -> None:
        """The router sends a message of its own."""

    def passed_on(self, receiver: NodeId, frame: bytes, router: Router) -> None:
        """The router passes on what a node has sent."""

    def routed(self, router: Router) -> None:
        """The router has handled an event."""

    def delivered(self, session: int, item: Emit | EmitPrompt) -> None:
        """The reader of a text is handed something."""

    def completed(self, session: int, result: Result) -> None:
        """The reader of a text is told that this is all."""

    def launched(self, node: "Node", action: drafter.Compute | target.Compute) -> None:
        """A node begins what its machine asks for: a forward, or the first of a chain of them."""

    def occupied(self, node: "Node", began: float, until: float) -> None:
        """The device of a node computes one forward in this time, each step of a chain apart."""

    def sent(self, node: "Node", message: Message) -> None:
        """A node sends a message."""

    def heard(self, node: "Node", event: Any) -> None:
        """A node has been told of an event; its actions are still to be done."""

    def handled(self, node: "Node", event: Any) -> None:
        """A node has handled an event and its actions are done."""

    def rested(self, node: "Node") -> None:
        """A node has handled all that was there and has ticked."""

    def watch_clock(self) -> None:
        """Time has passed."""

    def ended(self) -> None:
        """The last text is complete."""
