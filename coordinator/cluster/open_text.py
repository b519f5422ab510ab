"""A text that is being generated, and the nodes that work on it (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.cluster.conduct import Flow
from coordinator.cluster.registry import Node
from coordinator.text.session import NodeId, TimedSession
from proto.messages import (
    Draft,
    Fault,
    FaultCode,
    Heartbeat,
    Message,
    PromptLogprobs,
    Role,
    Rule,
    SessionMark,
    Verdict,
)
from proto.terms import breach_of, breach_of_node

NOBODY: tuple[NodeId, ...] = ()


@dataclass(slots=True)
class SessionNodes:
    """An open text and the nodes that work on it.

    targets, drafters  ids of the nodes that work on it and are there; at most one target
    sources            source numbers of all drafters that ever worked on it
    flow               its drafts on their way to the target
    """

    timed: TimedSession
    targets: tuple[NodeId, ...] = NOBODY
    drafters: tuple[NodeId, ...] = NOBODY
    sources: set[int] = field(default_factory=set)
    flow: Flow = field(default_factory=Flow)

    def workers(self, role: Role) -> tuple[NodeId, ...]:
        """Return the ids of the nodes of this role that work on the text."""
        return self.targets if role is Role.TARGET else self.drafters

    def set_workers(self, role: Role, nodes: tuple[NodeId, ...]) -> None:
        """Replace the nodes of this role that work on the text."""
        if role is Role.TARGET:
            self.targets = nodes
        else:
            self.drafters = nodes

    def wants(self, node: NodeId, role: Role) -> bool:
        """True if the text could use this node and the node does not work on it yet."""
        return node not in self.workers(role) and self.has_room_for(role)

    def has_room_for(self, role: Role) -> bool:
        """True if one more node of this role may work on the text."""
        machine = self.timed.machine
        if role is Role.TARGET:
            return not self.targets
        is_coupled = machine.rule is Rule.COUPLED
        return machine.policy.has_drafter and (is_coupled or not self.drafters)

    def breach_of_life(self, node: NodeId, incarnation: int) -> str:
        """Return "" if this node was told the text with this incarnation, else that it was not."""
        is_its_own = self.timed.machine.node_of(incarnation) == node
        return "" if is_its_own else f"incarnation {incarnation}, of which it was not told"

    def breach_of(self, node: NodeId, message: Message | SessionMark) -> str:
        """Return how a node's message about this text breaks the terms; "": it does not."""
        machine = self.timed.machine
        match message:
            case Verdict() | PromptLogprobs() | Draft():
                life = self.breach_of_life(node, message.incarnation)
                return life or breach_of(message, machine.terms)
            case SessionMark():
                life = self.breach_of_life(node, message.incarnation)
                length = max(message.length, message.num_read)
                is_longer = length > machine.limits.max_len
                return life or (f"a text of {length} tokens" if is_longer else "")
            case Fault(incarnation=incarnation, code=FaultCode.GAP | FaultCode.FAILED):
                return self.breach_of_life(node, incarnation) if incarnation else ""
        return ""


OpenTexts = Mapping[int, SessionNodes]  # by session


def breach_in(texts: OpenTexts, node: Node, message: Message, now: float) -> str:
    """Return how a node's message is outside of what it may say, for people; "": it is not."""
    name = type(message).__name__
    if reason := breach_of_node(message, node.role, round(now * 1e6)):
        return f"{name} with {reason}"
    said = message.marks if isinstance(message, Heartbeat) else (message,)
    for one in said:
        text = texts.get(getattr(one, "session", 0))
        if text is not None and (reason := text.breach_of(node.id, one)):
            return f"{name} with {reason}"
    return ""


def sender_of(texts: OpenTexts, complaint: Fault) -> NodeId:
    """Return the node whose message another node has dropped; b"": it is not known."""
    text = texts.get(complaint.session)
    sender = None if text is None else text.timed.machine.node_of(complaint.incarnation)
    return sender or b""


def floods_in(texts: OpenTexts) -> list[NodeId]:
    """Return the drafters that send more than their texts can use."""
    return sorted({node for text in texts.values() for node in text.flow.floods})
