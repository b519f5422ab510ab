"""Which nodes of the drafter's tree to expand next: best first (pure).

Theory of operation
-------------------
A node is expanded once: a forward feeds it and chooses its children, which are drafts from then on.
The *frontier* is the nodes that have not been expanded, or the root if it has not. Among them the
likeliest come first: those that the text will most probably come to, by the product of the chances
along the path. So a chain is drafted where one child is kept of each node, and otherwise a tree
that is deep where the drafter is sure and broad where it is not.

What nothing may follow is never expanded: a token that ends the text, the end of the window, of the
text or of the model.

A step is not made where the text hardly ever comes to one of its nodes: it would bring nothing, and
a verdict that comes meanwhile would have to wait for its end. Of a tree what counts is the sum of
their chances. Nodes that are each unlikely may be worth a step that they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from proto.messages import MAX_WINDOW, Open
from proto.tree import SpeculationTree

WIDTH_MIN = 8  # nodes of a step, however many steps are made: narrower ones miss too much
NEWEST = 0.15  # weight of the newest number of steps among all so far


@dataclass(frozen=True, slots=True)
class Tip:
    """A node to expand, and the estimated chance that the text comes to it."""

    key: int
    chance: float


class Pace:
    """How many nodes one step may expand, by how many steps are made between two verdicts.

    An expanded node takes a place in the cache, and there are few. If they are all taken the
    drafter stands still until the next verdict, and narrower steps would have come deeper. So the
    places are shared out among the steps that usually come between two verdicts.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_steps = 0  # since the last verdict
        self._usual: float | None = None  # between two verdicts; None: nothing is known

    def stepped(self) -> None:
        """A step is done."""
        self._num_steps += 1

    def heard(self) -> None:
        """A verdict has come."""
        number, self._num_steps = self._num_steps, 0
        if self._usual is not None:
            self._usual += (number - self._usual) * NEWEST
        elif number:
            self._usual = float(number)

    def num_nodes(self, width: int) -> int:
        """Most nodes of the next step, of a policy that expands at most `width`."""
        if self._usual is None:
            return width
        return min(width, max(WIDTH_MIN, int(self._num_places / max(1.0, self._usual))))


class Frontier:
    """The unexpanded nodes of one life of a text.

    max_len  most tokens that the drafter's model can read
    depth    most tokens in a row that it can draft
    """

    def __init__(
        self, opened: Open, tree: SpeculationTree, max_len: int, depth: int = MAX_WINDOW
    ) -> None:
        self._opened = opened
        self._tree = tree
        self._max_len = max_len
        self._window = min(opened.policy.window, depth)
        # Of the root and every live node: log of the chance that the text comes to it, and how many
        # later children are on its path; both with those of what is committed.
        self._paths: dict[int, tuple[float, int]] = {tree.root: (0.0, 0)}
        self._expanded: set[int] = set()
        # Of live nodes that have not been expanded and do not end the text: position, and the same.
        self._open: dict[int, tuple[int, float, int]] = {}

    # -- questions --------------------------------------------------------------------------------

    def tips(self) -> list[Tip]:
        """The nodes to expand next, the likeliest first; empty if nothing is left to offer."""
        tree, policy = self._tree, self._opened.policy
        text = tree.text
        end = self.end
        if len(text) >= end:
            return []
        if tree.root not in self._expanded:
            is_generated = len(text) > self._opened.num_prompt
            is_end = is_generated and text.tokens[-1] in self._opened.limits.stop_ids
            return [] if is_end else [Tip(tree.root, 1.0)]
        origin, detours_so_far = self._paths[tree.root]
        most = detours_so_far + policy.detours
        open_ = [
            (score, key)
            for key, (position, score, detours) in self._open.items()
            if detours <= most and position + 1 < end
        ]
        if len(open_) > 1:
            open_.sort(reverse=True)
        tips = [Tip(key, exp(score - origin)) for score, key in open_[: policy.width]]
        # The first few alone: what is added for the sake of breadth is no reason for a step.
        chance = sum(tip.chance for tip in tips[:WIDTH_MIN])
        return tips if chance >= exp(policy.min_score) else []

    @property
    def end(self) -> int:
        """A draft may follow a path of fewer tokens than that."""
        num_text = len(self._tree.text)
        most = min(self._window, self._opened.limits.max_drafts(num_text))
        return min(num_text + most, self._max_len)

    def least_below(self, key: int) -> float:
        """Below a live node, or the root: what is no likelier than so much is not expanded."""
        origin = self._paths[self._tree.root][0]
        return origin + self._opened.policy.min_score - self._paths[key][0]

    # -- facts ------------------------------------------------------------------------------------

    def expanded(self, key: int) -> None:
        """The children of a live node, or of the root, have been chosen."""
        self._expanded.add(key)
        self._open.pop(key, None)

    def grew(self, parent: int, children: Sequence[int]) -> None:
        """A node has new children, the likeliest first."""
        nodes, stop_ids = self._tree.nodes, self._opened.limits.stop_ids
        above, detours = self._paths[parent]
        for key in children:
            node = nodes[key]
            score = above + node.score
            self._paths[key] = score, detours
            if node.token not in stop_ids:
                self._open[key] = node.position, score, detours
            if key == children[0]:
                detours += 1  # of all that are less likely

    def moved(self) -> None:
        """The root has moved, and with it what lives."""
        root, nodes, paths = self._tree.root, self._tree.nodes, self._paths
        self._paths = {key: paths[key] for key in nodes}
        self._paths[root] = paths.get(root, (0.0, 0))
        self._expanded.intersection_update(self._paths)
        self._open = {key: tip for key, tip in self._open.items() if key in nodes}

    def ask_again(self) -> None:
        """More is known of the root: it is expanded once more."""
        self._expanded.discard(self._tree.root)

    def forget(self) -> None:
        """Every node is gone, and the root is to be expanded again."""
        self._expanded.clear()
        self._open.clear()
        self._paths = {self._tree.root: (0.0, 0)}

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
