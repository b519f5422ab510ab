"""What a pass verifies, and what of it is right (pure).

Theory of operation
-------------------
Under coupled verification a pass takes the likeliest nodes of the tree, a *subtree* that hangs on
the root: a node is never likelier than its parent. Its rows come in the order in which the
likeliest path comes first, so that this path lies where committed tokens belong and its acceptance
moves nothing in the cache. The target's own choices are then walked down the subtree, to the first
that no row carries: that one is the token that the pass adds by itself.

Under the classical rules, and where every row must see its cache in one order (reproducible mode),
a pass takes a chain, which is a subtree of one path.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from proto.messages import FinishReason, Hit, Open, Rule
from proto.tree import Node, SpeculationTree
from target_node.events import NO_TOKEN, Judge, Outcome, Part

Chances = Mapping[int, float]
"""Of nodes by their path hash: that the text comes to them. Likeliest first, parents first."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The drafts that hung where the text went on with `token`."""

    token: int
    drafts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a pass says about the drafts of a text. Nothing has followed from it yet.

    verified  the drafts that were in the pass, by row
    accepted  those of them that the target has chosen too, along one path
    rejected  the likeliest path of the others below it
    tokens    what the text goes on with, up to its end
    finish    why the text ends with them; None: it goes on
    hit       what became of the drafts of the first token
    along     what hung at each token that was chosen, also beyond the end, as far as drafts did
    outcome   what all this was read from
    """

    verified: tuple[Node, ...]
    accepted: tuple[Node, ...]
    rejected: tuple[Node, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None
    hit: Hit
    along: tuple[Siblings, ...]
    outcome: Outcome

    @property
    def has_rejected(self) -> bool:
        """Whether some draft of the pass was not accepted."""
        return len(self.accepted) < len(self.verified)

    @property
    def num_accepted(self) -> int:
        """Accepted drafts that the text has room for."""
        return min(len(self.accepted), len(self.tokens))


def likeliest(tree: SpeculationTree, limit: int, chance: Callable[[Node], float]) -> Chances:
    """The nodes that the text will most probably come to.

    chance  of a node: that it is right, given that its parent is
    """
    found: dict[int, float] = {}
    open_: list[tuple[float, int, int]] = []  # minus its chance, number in order of discovery, key

    def discover(parent: int, above: float) -> None:
        for key in tree.children(parent):
            heappush(open_, (-above * chance(tree.nodes[key]), len(open_) + len(found), key))

    discover(tree.root, 1.0)
    while open_ and len(found) < limit:
        minus, _, key = heappop(open_)
        found[key] = -minus
        discover(key, -minus)
    return found


def likeliest_chain(tree: SpeculationTree, limit: int, chance: Callable[[Node], float]) -> Chances:
    """The same of the best chain alone."""
    found: dict[int, float] = {}
    above = 1.0
    for node in tree.best_chain(limit):
        above *= chance(node)
        found[node.key] = above
    return found


def laid_out(tree: SpeculationTree, chosen: Iterable[int]) -> tuple[list[Node], tuple[int, ...]]:
    """The nodes of a subtree in the order of their rows, and which row each follows.

    chosen  likeliest first, parents first
    Rows count from 0, the root's, on; the first node's is row 1.
    """
    children: dict[int, list[int]] = {}
    for key in chosen:
        children.setdefault(tree.nodes[key].parent, []).append(key)
    nodes: list[Node] = []
    parents: list[int] = []
    pending = [(key, 0) for key in reversed(children.get(tree.root, ()))]
    while pending:
        key, parent = pending.pop()
        nodes.append(tree.nodes[key])
        parents.append(parent)
        row = len(nodes)
        pending += [(child, row) for child in reversed(children.get(key, ()))]
    return nodes, tuple(parents)


def rest_of(nodes: Sequence[Node], parents: Sequence[int], row: int) -> list[Node]:
    """The likeliest path of a subtree below a row, as `laid_out` made it."""
    rest: list[Node] = []
    for index in range(row, len(nodes)):
        if parents[index] != index:
            break
        rest.append(nodes[index])
    return rest


def judge_of(opened: Open, chain: Sequence[Node]) -> Judge | None:
    """How the drafts of a pass are judged; None: by equality."""
    if opened.rule is Rule.COUPLED:
        return None
    proposals = tuple(node.proposal for node in chain if node.proposal is not None)
    drafts = tuple(node.token for node in chain)
    return Judge(opened.rule, drafts, proposals, opened.incarnation)


def walk(drafted: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The rows that the target's choices lead through, from the root's on.

    drafted  token of each row but the root's
    parents  the row that each of them follows
    chosen   the target's choice at each row
    """
    path = [0]
    while True:
        here = path[-1]
        token = chosen[here]
        following = (
            row
            for row, (draft, parent) in enumerate(zip(drafted, parents, strict=True), 1)
            if parent == here and draft == token
        )
        if (row := next(following, None)) is None:
            return path
        path.append(row)


def chosen_of(
    drafted: Sequence[int], parents: Sequence[int], outcome: Outcome
) -> tuple[list[int], tuple[int, ...]]:
    """The rows that an outcome leads through, from the root's on, and the tokens that it chooses.

    drafted, parents  as in `walk`
    """
    if outcome.num_accepted is not None:
        return list(range(outcome.num_accepted + 1)), outcome.tokens
    rows = walk(drafted, parents, outcome.tokens)
    chosen = (outcome.tokens[row] for row in rows)
    return rows, tuple(token for token in chosen if token != NO_TOKEN)


def rows_on_text(part: Part, outcome: Outcome) -> list[int]:
    """The rows of a pass that lie on the text as it goes on: committed tokens, accepted drafts."""
    num_before = len(part.feed.tokens) - part.num_asked
    rows = list(range(num_before))
    if outcome.num_accepted is not None:
        rows += range(num_before, num_before + outcome.num_accepted + 1)
    elif part.num_asked:
        rows += (num_before + row for row in walk(part.drafted, part.parents, outcome.tokens))
    return rows
