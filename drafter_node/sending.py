"""Which drafts are sent together, how they are numbered, and when they are said again (pure).

Theory of operation
-------------------
A lost draft is usually missed by the verdicts that follow, and sent again then. But a target that
waits for that very draft says nothing until its own limit, which is long where answers have been
slow. So a drafter that has said all it can, and hears nothing for much longer than an answer has
taken before, says it again by itself: the target knows what it has already, so a reminder that was
not needed costs one message. Each further one waits twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from node.economics import Replies, overdue_s
from proto.messages import Verdict
from proto.tree import Node, SpeculationTree

# -- saying ----------------------------------------------------------------------------------------

# How drafts are said: the nodes of a message, and what they hang on.


@dataclass(frozen=True, slots=True)
class Said:
    """Nodes that are sent together, each behind the one that it hangs on.

    parent  path hash of what those hang on whose parent is not among them
    length  tokens on that path
    """

    parent: int
    length: int
    nodes: Sequence[Node]

    @property
    def parents(self) -> tuple[int, ...]:
        """The index of the node that each hangs on; -1: `parent`."""
        where = {node.key: index for index, node in enumerate(self.nodes)}
        where[self.parent] = -1
        assert where.keys() >= {node.parent for node in self.nodes}, "a node hangs elsewhere"
        return tuple([where[node.parent] for node in self.nodes])


def all_of(tree: SpeculationTree) -> Said:
    """Every live node."""
    return Said(tree.root, len(tree.text), tree.below(tree.root))


def some_of(tree: SpeculationTree, keys: Sequence[int]) -> Said:
    """These live nodes, parents first.

    What hangs on several nodes is sent with the paths to them, which the target has already.
    """
    nodes, chosen = [tree.nodes[key] for key in keys], set(keys)
    first = nodes[0]
    if all(node.parent in chosen or node.parent == first.parent for node in nodes):
        return Said(first.parent, first.position, nodes)
    above = []
    for node in nodes:
        key = node.parent
        while key != tree.root and key not in chosen:
            chosen.add(key)
            above.append(tree.nodes[key])
            key = tree.nodes[key].parent
    by_depth = sorted((*above, *nodes), key=lambda node: node.position)
    return Said(tree.root, len(tree.text), by_depth)


# -- numbers ---------------------------------------------------------------------------------------

# Which of the numbered drafts the target has; it counts in `Received` (`target_node/drafts.py`).


class Numbers:
    """The numbers of the drafts that one life of a text has sent.

    last  of the newest; 0: none was sent
    """

    def __init__(self, source: int, life: int) -> None:
        self._source = source
        self._life = life
        self.last = 0
        self._acked = 0  # <= last; every draft up to it has arrived
        self._suspect = 0  # <= last; lost, if the next verdict does not acknowledge it
        self._target_life = 0  # newest incarnation of the target in a verdict; 0: none heard yet

    @property
    def are_acked(self) -> bool:
        """Whether all have arrived."""
        return self._acked == self.last

    def heard(self, message: Verdict) -> bool:
        """A verdict has come. Returns whether the target lacks what it should have by now."""
        if message.incarnation < self._target_life:
            return False
        reopened = 0 < self._target_life < message.incarnation
        self._target_life = message.incarnation
        if reopened:
            self._acked = 0
        for ack in message.acks:
            if (ack.source, ack.incarnation) == (self._source, self._life):
                self._acked = max(self._acked, min(ack.number, self.last))
        return self._acked < (self.last if reopened else self._suspect)

    def suspect(self) -> None:
        """The next verdict has to acknowledge all that was sent."""
        self._suspect = self.last

    def trust(self) -> None:
        """All is sent again: the next verdict comes too early to say that it was lost."""
        self._suspect = 0

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert self._acked <= self.last
        assert self._suspect <= self.last


# -- reminding -------------------------------------------------------------------------------------

WAIT_S_MIN, WAIT_S_FIRST, WAIT_S_MAX = 0.02, 0.5, 2.0


class Answers:
    """How long answers have taken, over all texts."""

    def __init__(self) -> None:
        self._replies = Replies()

    def add(self, seconds: float) -> None:
        """One more has come."""
        self._replies.add(seconds)

    @property
    def limit_s(self) -> float:
        """Much longer than one takes."""
        if not self._replies.num:
            return WAIT_S_FIRST
        # The quickest is what link and pass take: many things make an answer late.
        limit_s = overdue_s(self._replies.quickest_s, self._replies.slow_s)
        return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))


class Reminder:
    """How long the newest drafts of one life of a text have been unanswered."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._since: float | None = None  # when the first draft after a verdict was sent
        self._due_at = 0.0  # means something while _since does
        self._wait_s = 0.0  # of the next reminder, likewise

    def said(self, now: float) -> None:
        """A draft is sent."""
        if self._since is None:
            self._since = now
            self._wait_s = self._answers.limit_s
            self._due_at = now + self._wait_s

    def answered(self, now: float) -> None:
        """A verdict has come."""
        if self._since is not None:
            self._answers.add(now - self._since)
            self._since = None

    def due_at(self) -> float | None:
        """When to say it again; None: nothing is unanswered."""
        return None if self._since is None else self._due_at

    def reminded(self, now: float) -> None:
        """It was said again."""
        self._wait_s = min(WAIT_S_MAX, 2 * self._wait_s)
        self._due_at = now + self._wait_s
