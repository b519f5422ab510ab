"""Which drafts go into one message, how messages are numbered, and when they are repeated (pure).

Theory of operation
-------------------
The verdicts that follow a lost draft do not acknowledge it, and then it is sent again. But a target
that waits for this draft sends no verdict until its own time limit, which is long if answers have
been slow. So a drafter that has sent all its drafts, and gets no verdict for much longer than
answers have taken before, sends them again by itself. The target recognises drafts that it has, so
an unnecessary repetition costs only one message. Each further repetition waits twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from node.costs import Replies
from node.economics import overdue_s
from proto.messages import Verdict
from proto.tree import Node, SpeculationTree

# -- saying ----------------------------------------------------------------------------------------

# The nodes of a Draft message, and the paths below which they hang.


@dataclass(frozen=True, slots=True)
class Said:
    """The nodes of one Draft message, parents before children.

    parent  path hash of the parent of those nodes whose parent is not in the message
    length  number of tokens on that path
    """

    parent: int
    length: int
    nodes: Sequence[Node]

    @property
    def parents(self) -> tuple[int, ...]:
        """Return each node's index of its parent within the message; -1 if that is `parent`."""
        where = {node.key: index for index, node in enumerate(self.nodes)}
        where[self.parent] = -1
        assert where.keys() >= {node.parent for node in self.nodes}, "a node hangs elsewhere"
        return tuple([where[node.parent] for node in self.nodes])


def all_of(tree: SpeculationTree) -> Said:
    """Return all live nodes, for one message."""
    return Said(tree.root, len(tree.text), tree.below(tree.root))


def some_of(tree: SpeculationTree, keys: Sequence[int]) -> Said:
    """Return these live nodes (parents first) for one message, with more nodes above if needed.

    If they have several parents outside the message, the paths from the root to them are included,
    which the target has already.
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

# Which numbered Draft messages the target has; there `Received` counts (`drafts_at_hand.py`).


class Numbers:
    """Numbers the Draft messages of one life of a text, and notices which are lost.

    source  the drafter's number as a source
    life    incarnation of this life at the drafter
    last    number of the newest message; 0: none was sent
    """

    def __init__(self, source: int, life: int) -> None:
        self._source = source
        self._life = life
        self.last = 0
        self._acked = 0  # <= last; every draft up to this number has arrived
        self._suspect = 0  # <= last; lost if the next verdict does not acknowledge this number
        self._target_life = 0  # newest incarnation of the target in a verdict; 0: no verdict yet

    @property
    def are_acked(self) -> bool:
        """True if all messages have arrived."""
        return self._acked == self.last

    def heard(self, message: Verdict) -> bool:
        """Read a verdict's acks; True if the target lacks drafts that it should have by now."""
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
        """Expect the next verdict to acknowledge all messages sent so far."""
        self._suspect = self.last

    def trust(self) -> None:
        """Expect no acks of the next verdict: all drafts are sent again, too late for it."""
        self._suspect = 0

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert self._acked <= self.last
        assert self._suspect <= self.last


# -- reminding -------------------------------------------------------------------------------------

WAIT_S_MIN, WAIT_S_FIRST, WAIT_S_MAX = 0.02, 0.5, 2.0


class Answers:
    """How long the target has taken to answer drafts, over all texts."""

    def __init__(self) -> None:
        self._replies = Replies()

    def add(self, seconds: float) -> None:
        """Add one answer that took so many seconds."""
        self._replies.add(seconds)

    @property
    def limit_s(self) -> float:
        """Return the seconds after which an answer is overdue: much longer than answers take."""
        if not self._replies.num:
            return WAIT_S_FIRST
        # The quickest answer shows what link and pass take; others were late for other reasons too.
        limit_s = overdue_s(self._replies.quickest_s, self._replies.slow_s)
        return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))


class Reminder:
    """Decides when the unanswered drafts of one life of a text are sent again."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        # When the first draft after a verdict was sent; None: no draft is unanswered.
        self._since: float | None = None
        self._due_at = 0.0  # when to send again; valid while _since is not None
        self._wait_s = 0.0  # seconds that the next repetition waits; likewise

    def said(self, now: float) -> None:
        """Note that a draft is sent at `now`."""
        if self._since is None:
            self._since = now
            self._wait_s = self._answers.limit_s
            self._due_at = now + self._wait_s

    def answered(self, now: float) -> None:
        """Note that a verdict has come at `now`."""
        if self._since is not None:
            self._answers.add(now - self._since)
            self._since = None

    def due_at(self) -> float | None:
        """Return when to send the drafts again (seconds); None if no draft is unanswered."""
        return None if self._since is None else self._due_at

    def reminded(self, now: float) -> None:
        """Note that the drafts were sent again at `now`; the next wait is twice as long."""
        self._wait_s = min(WAIT_S_MAX, 2 * self._wait_s)
        self._due_at = now + self._wait_s
