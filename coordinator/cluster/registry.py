"""Which nodes there are and whether they fit together (pure).

Theory of operation
-------------------
A node is *expected* from the moment its process is started, *ready* once its Hello was accepted,
*silent* while nothing is heard from it for too long (it may come back), and *gone* when its process
has ended or has failed: nothing that it sends counts any more. A node whose Hello does not fit is
refused with a reason that says how it differs.

An id names one process. A process that takes the place of another has an id of its own; what is
known of those that are gone is kept until then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from coordinator.cluster.round_trips import RoundTrips
from coordinator.text.session import NodeId
from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import (
    MAX_SOURCES,
    NGRAM_SOURCE,
    OWN_SOURCES,
    PROTOCOL_VERSION,
    Fault,
    FaultCode,
    Heartbeat,
    Hello,
    Role,
    SessionMark,
    Welcome,
)

OWN_PAUSE_S = 1.0


class Health(Enum):
    """What is known of a node."""

    EXPECTED = auto()
    READY = auto()
    SILENT = auto()
    GONE = auto()


@dataclass(slots=True)
class Node:
    """One node process.

    hello     its introduction; None until it was accepted
    source    its number in drafts and acks; -1 until it was accepted
    state     what it says it is doing, for people
    progress  forwards that it has finished
    marks     the sessions that it has open, by its last heartbeat
    times_us  in each phase of its loop, by its last heartbeat
    num_uncaptured  decode passes that no captured graph had room for, by its last heartbeat
    num_overruns    forwards that took longer than its simulated device, by its last heartbeat
    late_us         by how much, together
    num_bad_frames  frames of it that could not be decoded
    round_trips     how long a message takes there, and its answer back
    is_again        it takes the place of one that has ended
    ready_at        when it was first heard after it was accepted
    num_forwards_before, num_overruns_before, late_us_before  of those in whose place it is
    """

    role: Role
    id: NodeId
    detector: FaultDetector
    health: Health = Health.EXPECTED
    hello: Hello | None = None
    source: int = -1
    state: str = "starting"
    progress: int = 0
    marks: tuple[SessionMark, ...] = ()
    times_us: tuple[int, ...] = ()
    num_uncaptured: int = 0
    num_overruns: int = 0
    late_us: int = 0
    num_bad_frames: int = 0
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    is_again: bool = False
    ready_at: float | None = None
    num_forwards_before: int = 0
    num_overruns_before: int = 0
    late_us_before: int = 0

    @property
    def num_lanes(self) -> int:
        """Texts that it has room for at once; none before it was accepted."""
        return self.hello.num_lanes if self.hello is not None else 0


class Registry:
    """The nodes of one coordinator. Other threads may expect a node, and ask.

    host    of the coordinator, within which the ways are not watched
    traced  the nodes are told to record what they do
    """

    host = ""
    traced = False

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._looked_at = 0.0  # when the nodes' silence was last asked for
        self._nodes: dict[NodeId, Node] = {}

    def expect(self, role: Role, node_id: NodeId, now: float, *, is_again: bool = False) -> None:
        """A process of this role is started and will introduce itself by this id."""
        gone = [node for node in self.of_role(role) if node.health is Health.GONE]
        for node in gone:
            del self._nodes[node.id]
        # A target is waited for longer: without it nothing goes on, without a drafter all does.
        limit = SILENCE_LIMIT_S * (3 if role is Role.TARGET else 1)
        self._nodes[node_id] = Node(
            role,
            node_id,
            FaultDetector(now, limit),
            is_again=is_again,
            num_forwards_before=sum(node.progress + node.num_forwards_before for node in gone),
            num_overruns_before=sum(node.num_overruns + node.num_overruns_before for node in gone),
            late_us_before=sum(node.late_us + node.late_us_before for node in gone),
        )

    def find(self, node_id: NodeId) -> Node | None:
        """The node of this id, unless it is gone."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.health is not Health.GONE else None

    @property
    def nodes(self) -> Sequence[Node]:
        """All of them, in the order in which they were expected; those that are gone as well."""
        return tuple(self._nodes.values())

    def of_role(self, role: Role) -> list[Node]:
        """The nodes of this role, whatever their health."""
        return [node for node in self.nodes if node.role is role]

    def of(self, role: Role) -> Node | None:
        """The first node of this role, whatever its health."""
        return next(iter(self.of_role(role)), None)

    def ready(self, role: Role) -> list[Node]:
        """The nodes of this role that can work."""
        return [node for node in self.of_role(role) if node.health is Health.READY]

    def worked_s(self, node_id: NodeId, now: float) -> float | None:
        """For how long the node, which may be gone, has been ready; None: it never was."""
        node = self._nodes.get(node_id)
        if node is None or node.hello is None:
            return None
        return 0.0 if node.ready_at is None else now - node.ready_at

    def none_expected(self) -> bool:
        """Whether nobody is waited for: every node that was started was ready once, or is gone."""
        return all(node.health is not Health.EXPECTED or node.is_again for node in self.nodes)

    def free_source(self, node: Node, known: Iterable[int]) -> int | None:
        """A source number for a node that no other has, nor any text knows. None: all are taken."""
        if node.role is Role.TARGET:
            return NGRAM_SOURCE
        others = [other for other in self.of_role(Role.DRAFTER) if other is not node]
        taken = {other.source for other in others if other.health is not Health.GONE}
        taken |= {*OWN_SOURCES, *known}
        return next((source for source in range(MAX_SOURCES) if source not in taken), None)

    def greet(self, node: Node, hello: Hello, source: int) -> Welcome | Fault:
        """Answer a Hello. The node is ready, and has this source number, if it is Welcome."""
        reason = self._why_not(node, hello)
        if reason is not None:
            return Fault(0, 0, FaultCode.REFUSED, reason)
        node.hello = hello
        node.source = source
        node.health = Health.READY
        # Ids that only one of the two knows, or no tokenizer, are padding: never drafted.
        sizes = [hello.logits_size, *(other.logits_size for other in self._others(node))]
        if hello.fingerprint.digest:
            sizes.append(hello.fingerprint.vocab_size)
        return Welcome(min(sizes), source, self.traced)

    def beaten(self, node: Node, beat: Heartbeat, now: float) -> bool:
        """A node has told how it is. True if the way to another host has just become slower."""
        if node.ready_at is None:
            node.ready_at = now
        node.state, node.progress, node.marks = beat.state, beat.progress, beat.marks
        node.times_us = beat.times_us
        node.num_uncaptured = beat.num_uncaptured
        node.num_overruns, node.late_us = beat.num_overruns, beat.late_us
        is_slower = node.round_trips.add(beat.stamp_us, beat.held_us, now)
        return is_slower and node.hello is not None and node.hello.host != self.host

    def lives(self, node_id: NodeId, now: float) -> None:
        """A node that is ready has said something."""
        self._nodes[node_id].detector.heard(now)

    def heard(self, node: Node, now: float) -> bool:
        """Anything came from the node. True if it had been silent and is back."""
        node.detector.heard(now)
        if node.health is Health.SILENT:
            node.health = Health.READY
            return True
        return False

    def newly_silent(self, now: float) -> list[Node]:
        """The ready nodes that have just passed the limit of silence. Called all the time.

        Whoever has not called for long was stopped itself and has read nothing since: then silence
        counts from now on.
        """
        if now - self._looked_at > OWN_PAUSE_S:
            for node in self.nodes:
                node.detector.heard(now)
        self._looked_at = now
        silent = [
            node
            for node in self.nodes
            if node.health is Health.READY and node.detector.is_lost(now)
        ]
        for node in silent:
            node.health = Health.SILENT
        return silent

    def gone(self, node: Node) -> None:
        """The node's process has ended, or is as good as that."""
        node.health = Health.GONE

    def _others(self, node: Node) -> list[Hello]:
        """How all the others that are or were there have introduced themselves."""
        return [n.hello for n in self.nodes if n is not node and n.hello is not None]

    def _why_not(self, node: Node, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"the {node.role} speaks protocol version {hello.version}, this coordinator "
                f"{PROTOCOL_VERSION}; run the same release on every host"
            )
        if hello.secret != self._secret or hello.role is not node.role:
            return "the node was not started by this coordinator"
        differences = (_tokenizer_difference(hello, other) for other in self._others(node))
        return next(filter(None, differences), None)


def _tokenizer_difference(hello: Hello, other: Hello) -> str | None:
    """How two models' tokenizers differ, or None. A padded tail of the logits may differ."""
    mine, theirs = hello.fingerprint, other.fingerprint
    fix = "choose a drafter with the target's tokenizer"
    if bool(mine.digest) != bool(theirs.digest):
        without = hello if not mine.digest else other
        return f"the {without.role} has no tokenizer.json, the other node has; {fix}"
    if mine.vocab_size != theirs.vocab_size:
        return (
            f"the {hello.role}'s vocabulary has {mine.vocab_size} tokens, the {other.role}'s "
            f"{theirs.vocab_size}; {fix}"
        )
    if mine.digest != theirs.digest:
        return (
            f"the {hello.role} and the {other.role} have {mine.vocab_size} tokens each, but the "
            f"same ids mean different tokens; {fix}"
        )
    return None
