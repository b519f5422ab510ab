"""Which nodes there are and whether they fit together (pure).

Theory of operation
-------------------
A node is *expected* from the moment its process is started, *ready* once its Hello was accepted,
*silent* while nothing is heard from it for too long (it may come back), and *gone* when its process
has ended or has failed: nothing that it sends counts any more. A node whose Hello does not fit is
refused with a reason that says how it differs.
"""

from dataclasses import dataclass
from enum import Enum, auto

from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import PROTOCOL_VERSION, Fault, FaultCode, Hello, Role, SessionMark, Welcome

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
    num_bad_frames  frames of it that could not be decoded
    """

    role: Role
    identity: bytes
    detector: FaultDetector
    health: Health = Health.EXPECTED
    hello: Hello | None = None
    source: int = -1
    state: str = "starting"
    progress: int = 0
    marks: tuple[SessionMark, ...] = ()
    times_us: tuple[int, ...] = ()
    num_uncaptured: int = 0
    num_bad_frames: int = 0


class Registry:
    """The nodes of one coordinator, at most one of each role."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._looked_at = 0.0  # when the nodes' silence was last asked for
        self._nodes: dict[bytes, Node] = {}

    def expect(self, role: Role, identity: bytes, now: float) -> None:
        """A process of this role was started and will introduce itself by `identity`."""
        # A target is waited for longer: without it nothing goes on, without a drafter all does.
        limit = SILENCE_LIMIT_S * (3 if role is Role.TARGET else 1)
        self._nodes[identity] = Node(role, identity, FaultDetector(now, limit))

    def find(self, identity: bytes) -> Node | None:
        """The node that sends by this identity, unless it is gone."""
        node = self._nodes.get(identity)
        return node if node is not None and node.health is not Health.GONE else None

    def of(self, role: Role) -> Node | None:
        """The node of this role, whatever its health."""
        return next((node for node in self._nodes.values() if node.role is role), None)

    def ready(self, role: Role) -> Node | None:
        """The node of this role, if it can work."""
        node = self.of(role)
        return node if node is not None and node.health is Health.READY else None

    def none_expected(self) -> bool:
        """Whether nobody is waited for: every node that was started was ready once, or is gone."""
        return all(node.health is not Health.EXPECTED for node in self._nodes.values())

    def greet(self, node: Node, hello: Hello, source: int) -> Welcome | Fault:
        """Answer a Hello. The node is ready, and has this source number, if it is Welcome."""
        reason = self._why_not(node, hello)
        if reason is not None:
            return Fault(0, 0, FaultCode.REFUSED, reason)
        node.hello = hello
        node.source = source
        node.health = Health.READY
        # Ids that only one of the two knows, or no tokenizer, are padding: never drafted.
        sizes = [hello.logits_size]
        other = self._other(node)
        if other is not None:
            sizes.append(other.logits_size)
        if hello.fingerprint.digest:
            sizes.append(hello.fingerprint.vocab_size)
        return Welcome(min(sizes), source)

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
            for node in self._nodes.values():
                node.detector.heard(now)
        self._looked_at = now
        silent = [
            node
            for node in self._nodes.values()
            if node.health is Health.READY and node.detector.is_lost(now)
        ]
        for node in silent:
            node.health = Health.SILENT
        return silent

    def gone(self, node: Node) -> None:
        """The node's process has ended, or is as good as that."""
        node.health = Health.GONE

    def _other(self, node: Node) -> Hello | None:
        other = next((n for n in self._nodes.values() if n is not node), None)
        return None if other is None else other.hello

    def _why_not(self, node: Node, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"the {node.role} speaks protocol version {hello.version}, this coordinator "
                f"{PROTOCOL_VERSION}; run the same release on every host"
            )
        if hello.secret != self._secret or hello.role is not node.role:
            return "the node was not started by this coordinator"
        other = self._other(node)
        return None if other is None else _tokenizer_difference(hello, other)


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
