"""How drafts are said: the nodes of a message, and what they hang on (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from proto.tree import Node, SpeculationTree


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
        assert all(node.parent in where or node.parent == self.parent for node in self.nodes)
        return tuple(where.get(node.parent, -1) for node in self.nodes)


def all_of(tree: SpeculationTree) -> Said:
    """Every live node."""
    return Said(tree.root, len(tree.text), list(tree.below(tree.root)))


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
