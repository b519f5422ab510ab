"""Knows which nodes there are (pure); whether they fit together says `fitting.py`.

Theory of operation
-------------------
A node is *expected* from the moment its process is started, *ready* once its Hello was accepted,
*silent* if no message has come from it for too long (it may come back), and *gone* when its process
has ended or has failed: what it sends is then ignored. A node whose Hello does not fit is refused
with a reason that says how it differs.

An id names one process. A process that replaces another one has a new id; what is known of a node
that is gone is kept until then.

Nodes that users start by hand differ: nobody knows when they come, or how many. There an id is the
name of a *place*, `target-1`, `drafter-1`, `drafter-2` ..., and one process after another may take
it, each with its own Hello. A drafter's place that is still free when the target has been there for
JOIN_LIMIT_S is not waited for any longer. Where two nodes do not fit together, the drafter is
refused, whichever came first. So drafters are compared with the target only, and all are accepted
while there is no target: when it comes, drafters that do not fit are sent away (`misfits`). Of
heads that fit the target but read hidden states of different layers, the first one stays. A target
may replace another one in the middle of a text only if it is the same model with the same settings.
Several targets may be there at once (`target-1`, `target-2` ...), if they are all like that.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from coordinator.cluster.fitting import (
    TargetWords,
    companion_difference,
    first_difference,
    release_difference,
    replacement_difference,
    same_bits,
    size_difference,
)
from coordinator.cluster.node import Health, Node, UnderWay, begin_anew, on_host, place_of
from coordinator.text.session_events import NodeId
from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import (
    ANY_ID,
    MAX_SOURCES,
    NGRAM_SOURCE,
    OWN_SOURCES,
    Fault,
    FaultCode,
    Heartbeat,
    Hello,
    Role,
    Welcome,
)
from proto.node_config import MAX_NODES

# -- registry --------------------------------------------------------------------------------------

OWN_PAUSE_S = 1.0
LOADING_LIMIT_S = 300.0  # for news of a target that is started again
LEAVING_LIMIT_S = 5.0  # for the end of a target's process after the target has failed
# A node started by hand that is already running tries to join at least every three seconds.
JOIN_LIMIT_S = 5.0
NOBODY_DRAFTS = (
    "no drafter has joined yet: texts begin with the target alone, and a drafter that joins later "
    "drafts from then on"
)
NOT_JOINED = "has not joined"  # the state of a place that is still free


class Registry:
    """The nodes of one coordinator. Other threads may call `expect` and read.

    host       the coordinator's host name; links to nodes of this host are not watched for slowness
    traced     the nodes are told to record what they do
    tokenizer  digests of the target's tokenizer that the coordinator has read; empty: it has none
    words      that tokenizer, for drafters that have another one; None: those are refused
    """

    host = ""
    traced = False
    tokenizer: frozenset[str] = frozenset()
    words: TargetWords | None = None

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._looked_at = 0.0  # when `newly_silent` was last called
        self._nodes: dict[NodeId, Node] = {}
        # How many nodes that had been ready have ended or fallen silent, by role.
        self.losses: Counter[Role] = Counter()

    def expect(
        self,
        role: Role,
        node_id: NodeId,
        now: float,
        *,
        is_again: bool = False,
        is_by_hand: bool = False,
    ) -> Node:
        """Add a node that will introduce itself with this id, and return it.

        is_again    it replaces a node that is gone
        is_by_hand  a user starts it, at any time; others of this role may be started as well
        """
        gone = [
            node
            for node in self.of_role(role)
            if node.health is Health.GONE and node.place == place_of(node_id)
        ]
        for node in gone:
            del self._nodes[node.id]
        # The limit is longer for a target, because no text can go on without it.
        limit = SILENCE_LIMIT_S * (3 if role is Role.TARGET else 1)
        node = self._nodes[node_id] = Node(
            role,
            node_id,
            FaultDetector(now, limit),
            state=NOT_JOINED if is_by_hand else "starting",
            is_again=is_again,
            is_by_hand=is_by_hand,
            forerunner=next((one.hello or one.forerunner for one in gone), None),
            news_at=now,
            num_forwards_before=sum(node.progress + node.num_forwards_before for node in gone),
            num_overruns_before=sum(node.num_overruns + node.num_overruns_before for node in gone),
            late_us_before=sum(node.late_us + node.late_us_before for node in gone),
        )
        return node

    def take_place(self, node_id: NodeId, role: Role, now: float) -> Node | None:
        """Return the node with this id, added if it is started by hand and may join; else None."""
        node = self.find(node_id)
        if node is not None or not self._is_open(node_id, role):
            return node
        was_there = node_id in self._nodes
        node = self.expect(role, node_id, now, is_again=was_there, is_by_hand=True)
        node.is_awaited = False
        return node

    def take_named(self, node_id: NodeId, now: float) -> Node | None:
        """Take the place with this name, of a node started by hand; return the node, or None."""
        role = next((one for one in Role if node_id.startswith(f"{one}-".encode())), None)
        node = None if role is None else self.take_place(node_id, role, now)
        return node if node is not None and node.is_by_hand else None

    def _is_open(self, node_id: NodeId, role: Role) -> bool:
        """True if a node started by hand may take a place of this name."""
        is_wanted = any(node.is_by_hand for node in self.of_role(role))
        return is_wanted and node_id in names_by_hand(role)

    def stop_awaiting_absent(self, now: float) -> list[Node]:
        """Stop waiting for drafters, started by hand, that have not joined; return these, or []."""
        since = [node.joined_at for node in self.ready(Role.TARGET) if node.joined_at is not None]
        if not since or now - min(since) < JOIN_LIMIT_S:
            return []
        absent = [
            node
            for node in self.of_role(Role.DRAFTER)
            if node.is_by_hand and node.is_awaited and node.health is Health.EXPECTED
        ]
        for node in absent:
            node.is_awaited = False
        return absent

    def title(self, node: Node) -> str:
        """Return the node's name for people: "the drafter", or "drafter-2" of several."""
        name = self.name(node)
        return f"the {name}" if name == str(node.role) else name

    def name(self, node: Node) -> str:
        """Return the node's name without an article: "drafter", or "drafter-2" of several."""
        others = (one for one in self.of_role(node.role) if one.place != node.place)
        is_one_of_several = any(not one.is_by_hand or one.hello is not None for one in others)
        is_second = node.is_by_hand and node.id != names_by_hand(node.role)[0]
        if is_second or is_one_of_several:
            return node.place.decode(errors="replace")
        return str(node.role)

    def has_others(self, node: Node) -> bool:
        """True if another node of this role has joined."""
        others = (one for one in self.of_role(node.role) if one is not node)
        return any(one.hello is not None for one in others)

    def word_of(self, node: Node, hello: Hello) -> str:
        """Return the line that people see if this node is accepted; "" for none."""
        if node.health is Health.SILENT or node.is_replaced_by(hello):
            return f"{self.title(node)} is there again"
        is_late = not node.is_awaited or self.has_others(node)
        joined = f"{self.title(node)} has joined{on_host(hello.host)}"
        if node.role is Role.TARGET and (other := self._of_other_bits(node, hello)) is not None:
            near = f"it and {other.place.decode()} are not known to compute the same bits"
            return f"{joined}; {near}, so texts may differ at near ties"
        return joined if node.is_by_hand and node.hello is None and is_late else ""

    def _of_other_bits(self, target: Node, hello: Hello) -> Node | None:
        """Return another target that may compute other bits than this one; None: there is none."""
        others = (one for one in self._introduced() if one.role is Role.TARGET)
        return next(
            (
                one
                for one in others
                if one is not target and one.hello is not None and not same_bits(hello, one.hello)
            ),
            None,
        )

    def find(self, node_id: NodeId) -> Node | None:
        """Return the node with this id; None if there is none or it is gone."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.health is not Health.GONE else None

    @property
    def nodes(self) -> Sequence[Node]:
        """Return all nodes, in the order in which they were expected; also those that are gone."""
        return tuple(self._nodes.values())

    @property
    def present(self) -> Sequence[Node]:
        """Return the nodes that are there or are waited for."""
        return [
            node
            for node in self.nodes
            if node.health is not Health.GONE
            if node.health is not Health.EXPECTED or node.is_awaited
        ]

    def of_role(self, role: Role) -> list[Node]:
        """Return the nodes of this role, whatever their health."""
        return [node for node in self.nodes if node.role is role]

    def of(self, role: Role) -> Node | None:
        """Return the first node of this role, whatever its health; None if there is none."""
        return next(iter(self.of_role(role)), None)

    def hellos(self, role: Role) -> list[Hello]:
        """Return the Hello messages of the nodes of this role that are there or were.

        For one that is started again it is that of the process before it, until it sends its own.
        """
        found = [node.hello or node.forerunner for node in self.of_role(role)]
        return [hello for hello in found if hello is not None]

    def ready(self, role: Role) -> list[Node]:
        """Return the nodes of this role that can work."""
        return [node for node in self.of_role(role) if node.health is Health.READY]

    def worked_s(self, node_id: NodeId, now: float) -> float | None:
        """Return for how many seconds a node has been ready (0: not yet); None: never accepted."""
        node = self._nodes.get(node_id)
        if node is None or node.hello is None:
            return None
        return 0.0 if node.ready_at is None else now - node.ready_at

    def others(self, node: Node) -> list[Node]:
        """Return the other nodes of its role that are there, may come back, or are awaited."""
        return [one for one in self.present if one.role is node.role and one is not node]

    def num_lanes(self, most: int) -> int:
        """Return for how many texts at once the targets have room, `most` at each of them.

        Those that are ready count; if none is, those that were there.
        """
        ready = [node.num_lanes for node in self.ready(Role.TARGET)]
        lanes = ready or [hello.num_lanes for hello in self.hellos(Role.TARGET)]
        return sum(min(most, number) for number in lanes)

    def none_expected(self) -> bool:
        """True if no node is waited for: each that was started was ready once, or is gone."""
        return all(
            node.health is not Health.EXPECTED or node.is_again or not node.is_awaited
            for node in self.nodes
        )

    def free_source(self, node: Node, known: Iterable[int]) -> int | None:
        """Return a source number no other live drafter has, not of `known` if possible, or None.

        A number that no open text knows is preferred. Otherwise it is that of a drafter that is
        gone. That is safe: the new drafter comes with a new incarnation, so drafts are not
        confused; only the metrics of an open text count the two drafters as one. The target has a
        fixed number.
        """
        if node.role is Role.TARGET:
            return NGRAM_SOURCE
        others = [other for other in self.of_role(Role.DRAFTER) if other is not node]
        taken = {other.source for other in others if other.health is not Health.GONE}
        taken |= set(OWN_SOURCES)
        free = [source for source in range(MAX_SOURCES) if source not in taken]
        unknown = set(free).difference(known)
        return next((source for source in free if source in unknown or not unknown), None)

    def greet(self, node: Node, hello: Hello, source: int) -> Welcome | Fault:
        """Return Welcome and make the node ready with `source`, or a Fault that refuses it."""
        reason = self._why_not(node, hello) or self._why_untold(hello)
        if reason is not None:
            node.has_rival = node.is_by_hand
            return Fault(0, 0, FaultCode.REFUSED, reason)
        if node.is_by_hand:
            begin_anew(node)
        node.hello = hello
        node.source = source
        node.health = Health.READY
        # Token ids that not both models and the tokenizer have are padding, and never drafted.
        own = hello.fingerprint
        alike = [hello, *(one for _, one in self._others(node) if one.fingerprint.is_like(own))]
        sizes = [one.logits_size for one in alike]
        if own.digest:
            sizes += [one.fingerprint.vocab_size for one in alike]
        tokenizer = self.words.packed if self.words and self._has_other_words(hello) else b""
        return Welcome(min(sizes), source, self.traced, tokenizer)

    def _has_other_words(self, hello: Hello) -> bool:
        """True if a drafter has another tokenizer than the target, and may have it."""
        if self.words is None or hello.role is not Role.DRAFTER or hello.layers:
            return False
        digests = hello.fingerprint.digests
        return bool(digests) and not digests & self.words.digests

    def _why_untold(self, hello: Hello) -> str | None:
        """Return why a drafter cannot be given the target's tokenizer, or None."""
        if self.words is None or not self._has_other_words(hello):
            return None
        return size_difference(self.words)

    def joined(self, node: Node, now: float) -> None:
        """Note that a node was accepted; its silence counts from now on.

        Where users start targets, texts can begin once one is there, whichever name it has.
        """
        node.joined_at = now
        node.detector.heard(now)
        if node.is_by_hand and node.role is Role.TARGET:
            for other in self.of_role(Role.TARGET):
                other.is_awaited &= other.health is not Health.EXPECTED

    def misfits(self, target: Node) -> list[tuple[Node, str]]:
        """Return (drafter, reason) of drafters started by hand that do not fit this target."""
        assert target.hello is not None
        found: list[tuple[Node, str]] = []
        kept: list[tuple[NodeId, Hello]] = []
        drafters = (node for node in self._introduced() if node.role is Role.DRAFTER)
        for node in sorted(drafters, key=lambda node: node.joined_at or 0.0):
            assert node.hello is not None
            reason = first_difference(
                node.id, node.hello, [(target.id, target.hello), *kept], self.words
            )
            if reason is not None and node.is_by_hand:
                found.append((node, reason))
            else:
                kept.append((node.id, node.hello))
        return found

    def is_of_newcomer(self, node: Node, beat: Heartbeat) -> bool:
        """True if a heartbeat is from a second process of this name, which was not accepted.

        That process has had no heartbeat of the coordinator yet, but the accepted one has.
        """
        return node.is_by_hand and not beat.stamp_us and node.round_trips.now_s is not None

    def beaten(self, node: Node, beat: Heartbeat, now: float) -> bool:
        """Store a node's heartbeat. True if its link to another host just became slower."""
        if node.ready_at is None:
            node.ready_at = now
        if beat.state != node.state:
            node.news_at = now
        node.state, node.progress, node.marks = beat.state, beat.progress, beat.marks
        node.under_way = UnderWay.of(beat)
        node.times_us, node.beside_us = beat.times_us, beat.beside_us
        node.num_uncaptured = beat.num_uncaptured
        node.num_overruns, node.late_us = beat.num_overruns, beat.late_us
        is_slower = node.round_trips.add(beat.stamp_us, beat.held_us, now)
        return is_slower and node.hello is not None and node.hello.host != self.host

    def readers(self, drafters: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """Return those of these drafters that read hidden states of the target (heads)."""
        return tuple(one for one in drafters if self._nodes[one].layers)

    @property
    def num_ids(self) -> int:
        """Return the number of logits of the target that is there."""
        hellos = (node.hello for node in self.ready(Role.TARGET))
        return next((hello.logits_size for hello in hellos if hello is not None), ANY_ID)

    def is_source(self, node_id: NodeId, source: int) -> bool:
        """True if this is the source number of a node that is there."""
        node = self.find(node_id)
        return node is not None and node.source == source

    def lives(self, node_id: NodeId, now: float) -> None:
        """Note that a message has come from a node that is ready."""
        self._nodes[node_id].detector.heard(now)

    def heard(self, node: Node, now: float) -> bool:
        """Note that a message has come from the node. True if it had been silent and is back."""
        node.detector.heard(now)
        if node.health is Health.SILENT:
            node.health = Health.READY
            return True
        return False

    def newly_silent(self, now: float) -> list[Node]:
        """Mark ready nodes as silent that have just passed the limit; return them. Called often.

        If the last call is long ago, this process itself was stopped and has read no messages
        since. Then the silence of all nodes counts from now on.
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
            self.losses[node.role] += 1
        return silent

    def stuck(self, now: float) -> list[Node]:
        """Return the targets whose processes have to be killed, each once.

        They were started here. Either they were started again and tell nothing new while they load,
        or they have failed and their processes do not end.
        """
        found = [
            node
            for node in self.of_role(Role.TARGET)
            if not node.is_by_hand and not node.has_ended and now - node.news_at > _limit_s(node)
        ]
        for node in found:
            node.news_at = now
        return found

    def lacks_target(self, node: Node) -> bool:
        """True if this was a target, and no other one is there or waited for."""
        targets = self.of_role(Role.TARGET)
        return node in targets and all(one.health is Health.GONE for one in targets)

    def gone(self, node: Node, now: float = 0.0) -> None:
        """Mark a node as gone: its process has ended or failed, or was sent away."""
        self.losses[node.role] += node.health is Health.READY
        node.health = Health.GONE
        node.news_at = now

    def ended(self, node_id: NodeId) -> Node | None:
        """Note that a node's process has ended; return the node, also if it is gone already."""
        if (node := self._nodes.get(node_id)) is not None:
            node.has_ended = True
        return node

    def _introduced(self) -> list[Node]:
        """Return the nodes that were accepted, except nodes started by hand that are gone."""
        return [
            node
            for node in self.nodes
            if node.hello is not None
            if node.health is not Health.GONE or not node.is_by_hand
        ]

    def _others(self, node: Node) -> list[tuple[NodeId, Hello]]:
        """Return (id, Hello) of all other nodes that were accepted."""
        others = ((other.id, other.hello) for other in self._introduced() if other is not node)
        return [(node_id, hello) for node_id, hello in others if hello is not None]

    def _why_not(self, node: Node, hello: Hello) -> str | None:
        if (reason := release_difference(hello.version, node.role)) is not None:
            return reason
        if hello.secret != self._secret or hello.role is not node.role:
            return "the node was not started by this coordinator"
        others = self._others(node)
        if node.is_by_hand:
            if node.role is Role.TARGET:
                return self._why_not_target(node, hello)
            if all(other.role is not Role.TARGET for _, other in others):
                return None  # no target yet: a drafter that does not fit must not exclude others
        return first_difference(node.id, hello, others, self.words)

    def _why_not_target(self, node: Node, hello: Hello) -> str | None:
        """Return why a target started by hand is refused, or None; drafters do not matter."""
        if self.tokenizer and not hello.fingerprint.digests & self.tokenizer:
            return (
                "its tokenizer is not the one that the coordinator has read; give both the same "
                "model, the coordinator with --target"
            )
        if node.hello is not None and (reason := replacement_difference(hello, node.hello)):
            return reason
        others = (one for one in self._introduced() if one.role is Role.TARGET and one is not node)
        reasons = (
            companion_difference(hello, one.place.decode(), one.hello)
            for one in others
            if one.hello
        )
        return next(filter(None, reasons), None)


def names_by_hand(role: Role) -> tuple[NodeId, ...]:
    """Return the names that nodes of this role may have if they are started by hand."""
    return tuple(f"{role}-{number}".encode() for number in range(1, MAX_NODES[role] + 1))


def _limit_s(node: Node) -> float:
    """Return for how many seconds a target's process may do what it does now."""
    if node.health is Health.GONE:
        return LEAVING_LIMIT_S
    return LOADING_LIMIT_S if node.health is Health.EXPECTED and node.is_again else math.inf
