"""Chooses which nodes of the drafter's tree to expand next: the likeliest first (pure).

Theory of operation
-------------------
A node is expanded once: a forward feeds it and chooses its children, which are drafts from then on.
The *frontier* is the set of nodes that have not been expanded, or the root if it has not. The
likeliest of them come first: the chance of a node is the product of the estimated chances along its
path. So a chain is drafted if one child is kept of each node, and otherwise a tree that is deep
where the drafter is sure and broad where it is not.

A node that no draft may follow is never expanded: a token that ends the text, or a node at the end
of the window, of the text's greatest length or of the model's.

A draft step is not made if the text will hardly ever reach one of its nodes: it would be of no use,
and a verdict that arrives meanwhile would have to wait for its end. In a tree the sum of the nodes'
chances counts: unlikely nodes may together be worth a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from proto.messages import MAX_WINDOW, Open
from proto.tree import SpeculationTree

WIDTH_MIN = 8  # least limit of a step's nodes, however many steps are made: less misses too much
NEWEST = 0.15  # weight of the newest number of steps in the running mean


@dataclass(frozen=True, slots=True)
class Tip:
    """A node to expand, and the estimated chance that the text will reach it."""

    key: int
    chance: float


class Pace:
    """Limits how many nodes one step may expand, by how many steps are made between two verdicts.

    An expanded node takes one of few tree slots in the cache. If all are taken, the drafter has to
    wait for the next verdict, and narrower steps would have gone deeper. So the slots are divided
    among the steps that are usually made between two verdicts.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_steps = 0  # steps since the last verdict
        self._usual: float | None = None  # mean steps between two verdicts; None: unknown yet

    def stepped(self) -> None:
        """Count one draft step."""
        self._num_steps += 1

    def heard(self) -> None:
        """Note that a verdict has come: the steps since the last one enter the mean."""
        number, self._num_steps = self._num_steps, 0
        if self._usual is not None:
            self._usual += (number - self._usual) * NEWEST
        elif number:
            self._usual = float(number)

    def num_nodes(self, width: int) -> int:
        """Return the most nodes that the next step may expand; never more than `width`."""
        if self._usual is None:
            return width
        return min(width, max(WIDTH_MIN, int(self._num_places / max(1.0, self._usual))))


class Frontier:
    """The unexpanded nodes of one life of a text, with their chances.

    max_len  most tokens that the drafter's model can read
    depth    most tokens in a row that the model can draft
    """

    def __init__(
        self, opened: Open, tree: SpeculationTree, max_len: int, depth: int = MAX_WINDOW
    ) -> None:
        self._opened = opened
        self._tree = tree
        self._max_len = max_len
        self._window = min(opened.policy.window, depth)
        # For the root and every live node: log of the chance of its path, and how many nodes on the
        # path are not first children (detours). Both include nodes that are committed by now.
        self._paths: dict[int, tuple[float, int]] = {tree.root: (0.0, 0)}
        self._expanded: set[int] = set()
        # `_start`: the last node that is certain (of another vocabulary's tail), or the root.
        # `_above`: hashes from the root to the parent of the last certain node.
        self._start: int = tree.root
        self._above: tuple[int, ...] = ()
        # For live nodes that were not expanded and do not end the text: position, chance, detours.
        self._open: dict[int, tuple[int, float, int]] = {}

    # -- questions --------------------------------------------------------------------------------

    def tips(self) -> list[Tip]:
        """Return the nodes to expand next, the likeliest first; empty if no step should be made."""
        tree, policy = self._tree, self._opened.policy
        text = tree.text
        end = self.end
        if len(text) >= end:
            return []
        if tree.root not in self._expanded:
            is_generated = len(text) > self._opened.num_prompt
            is_end = is_generated and text.tokens[-1] in self._opened.limits.stop_ids
            return [] if is_end else [Tip(tree.root, 1.0)]
        origin, detours_so_far = self._paths[self._start]
        most = detours_so_far + policy.detours
        open_ = [
            (score, key)
            for key, (position, score, detours) in self._open.items()
            if detours <= most and position + 1 < end
        ]
        if len(open_) > 1:
            open_.sort(reverse=True)
        tips = [Tip(key, min(1.0, exp(score - origin))) for score, key in open_[: policy.width]]
        # Only the first few count: nodes that merely add breadth are no reason for a step.
        chance = sum(tip.chance for tip in tips[:WIDTH_MIN])
        return tips if chance >= exp(policy.min_score) else []

    @property
    def end(self) -> int:
        """Return the length of a path (tokens) at which no draft follows it any more."""
        num_text = len(self._tree.text)
        most = min(self._window + len(self._above), self._opened.limits.max_drafts(num_text))
        return min(num_text + most, self._max_len)

    @property
    def has_tail(self) -> bool:
        """True if nodes behind the root are certain, so that the root itself is not expanded."""
        return bool(self._above)

    def least_below(self, key: int, least_chance: float) -> float:
        """Return the least sum of scores below this node at which a node is still expanded.

        key           path hash of the root or of a live node; scores are natural logs of chances
        least_chance  a node must be as likely as that; 0: the policy alone decides
        """
        least = self._opened.policy.min_score
        if least_chance > 0:
            least = max(least, log(least_chance))
        return self._paths[self._tree.root][0] + least - self._paths[key][0]

    # -- facts ------------------------------------------------------------------------------------

    def knows(self, tail: Sequence[int]) -> None:
        """Note the nodes that are certain (path hashes, from the root on): drafts follow the last.

        They were added to the tree, and those above the last are not expanded.
        """
        path = (self._tree.root, *tail)
        for above, key in pairwise(path):
            self.expanded(above)
            if key not in self._paths:
                self.grew(above, (key,))
        self._start, self._above = path[-1], path[:-1]

    def expanded(self, key: int) -> None:
        """Note that the children of the root or of a live node have been chosen."""
        self._expanded.add(key)
        self._open.pop(key, None)

    def grew(self, parent: int, children: Sequence[int]) -> None:
        """Add the new children of a node, the likeliest first."""
        nodes, stop_ids = self._tree.nodes, self._opened.limits.stop_ids
        above, detours = self._paths[parent]
        for key in children:
            node = nodes[key]
            score = above + node.score
            self._paths[key] = score, detours
            if node.token not in stop_ids:
                self._open[key] = node.position, score, detours
            if key == children[0]:
                detours += 1  # every later child is a detour

    def moved(self) -> None:
        """Drop the nodes that died when the root moved."""
        root, nodes, paths = self._tree.root, self._tree.nodes, self._paths
        self._start, self._above = root, ()
        self._paths = {key: paths[key] for key in nodes}
        self._paths[root] = paths.get(root, (0.0, 0))
        self._expanded.intersection_update(self._paths)
        self._open = {key: tip for key, tip in self._open.items() if key in nodes}

    def ask_again(self) -> None:
        """Let the root be expanded once more, because a better feature of it is known."""
        self._expanded.discard(self._tree.root)

    def forget(self) -> None:
        """Forget all nodes, since the tree was cleared; the root is to be expanded again."""
        self._expanded.clear()
        self._open.clear()
        self._paths = {self._tree.root: (0.0, 0)}
        self._start, self._above = self._tree.root, ()

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert set(self._paths) == {self._tree.root, *self._tree.nodes}
        assert all(key in self._paths for key in self._expanded)
        stop_ids = self._opened.limits.stop_ids
        assert self._open == {
            key: (node.position, *self._paths[key])
            for key, node in self._tree.nodes.items()
            if key not in self._expanded and node.token not in stop_ids
        }
        known = {self._tree.root, *self._expanded}
        for node in self._tree.nodes.values():
            assert node.parent in known, "a node hangs on one that was not expanded"
