"""A text that is being generated, and the nodes that work on it (pure)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.cluster.conduct import Flow
from coordinator.cluster.moves import Home
from coordinator.cluster.node import Health, Node
from coordinator.text.session_events import NodeId
from coordinator.text.timed_session import TimedSession
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
    home               the target that writes it, or the one that wrote it last; None: none did yet
    is_bound           it goes on only at a target that computes the same bits
    """

    timed: TimedSession
    targets: tuple[NodeId, ...] = NOBODY
    drafters: tuple[NodeId, ...] = NOBODY
    sources: set[int] = field(default_factory=set)
    flow: Flow = field(default_factory=Flow)
    home: Home | None = None
    is_bound: bool = False

    def workers(self, role: Role) -> tuple[NodeId, ...]:
        """Return the ids of the nodes of this role that work on the text."""
        return self.targets if role is Role.TARGET else self.drafters

    def set_workers(self, role: Role, nodes: tuple[NodeId, ...]) -> None:
        """Replace the nodes of this role that work on the text."""
        if role is Role.TARGET:
            self.targets = nodes
        else:
            self.drafters = nodes

    def wants(self, node: Node) -> bool:
        """True if the text could use this node and the node does not work on it yet."""
        is_new = node.id not in self.workers(node.role) and self.has_room_for(node.role)
        return is_new and (node.role is Role.DRAFTER or self.may_go_on_at(node))

    def may_go_on_at(self, target: Node) -> bool:
        """True if this target may write on; with `is_bound` not if it may compute other bits."""
        return not self.is_bound or self.home is None or self.home.is_like(target)

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


OpenTexts = Mapping[int, SessionNodes]  # by session, oldest first


def works_on(texts: OpenTexts, session: int, node: Node) -> bool:
    """True if a node works on this text now."""
    text = texts.get(session)
    return text is not None and node.id in text.workers(node.role)


def sessions_of(texts: OpenTexts, node: Node) -> tuple[int, ...]:
    """Return the texts that a node works on, the oldest first."""
    return tuple(session for session in texts if works_on(texts, session, node))


def num_free(texts: OpenTexts, node: Node) -> int:
    """Return the number of a node's lanes that no text uses."""
    return node.num_lanes - len(sessions_of(texts, node))


def stranded(texts: OpenTexts, targets: Collection[Node]) -> list[SessionNodes]:
    """Return the texts with which none of these targets may go on, of those that have no target."""
    alone = [text for text in texts.values() if not text.targets]
    return [text for text in alone if not any(map(text.may_go_on_at, targets))]


def marks_for(texts: OpenTexts, node: Node) -> tuple[SessionMark, ...]:
    """Return what a heartbeat tells a node of the texts that it works on."""
    return tuple(
        texts[session].timed.machine.mark_for(node.id) for session in sessions_of(texts, node)
    )


def check(texts: OpenTexts, nodes: Iterable[Node]) -> None:
    """Assert that texts and nodes have found each other (for tests and the simulator)."""
    for text in texts.values():
        assert len(text.targets) <= 1, "a text is open at two targets"
        assert not text.timed.machine.ended
    for node in nodes:
        assert num_free(texts, node) >= 0, "a node has no lane for a text"
        if node.health is Health.READY and num_free(texts, node):
            waiting = [text for text in texts.values() if text.wants(node)]
            assert not waiting, "a text waits for a lane that is free"


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
