"""The end of a text that is not committed: of a drafter with another vocabulary (pure).

Theory of operation
-------------------
Such a drafter knows how the text goes on only in bytes (`translation/text.py`). Its own tokens of
that end, the *tail*, are nodes of its tree: certain, but they may change. So

    drafts that contradict the end die, also those of a forward that is still running
    nodes of the tail are fed when something below them is expanded
    no node above the last one of the tail is expanded: what follows it is known

except where the text may end within one of the drafter's tokens ("hel" of "hello"). Its model has
not learned to go on there. So if the last token of the tail was not drafted, the node above it is
asked as well, for the longer tokens that begin like the end.
"""

from collections.abc import Sequence

from drafter_node.compute import Children
from engine.layout.slots import SlotMap
from proto.tree import Follows, Node, SpeculationTree


class TextEnd:
    """The end of one text in one life.

    above  the node above the last token of the tail, if it is to be asked as well; else None
    """

    def __init__(self, tree: SpeculationTree, slots: SlotMap[int], source: int) -> None:
        self._tree = tree
        self._slots = slots
        self._source = source
        # By the root and the nodes of the tail, but its last one: what is known behind it.
        self._rests: dict[int, bytes] = {}
        self._follows: Follows = lambda _, __: b""
        self.above: int | None = None

    def prune(self, tail: Sequence[int], said: bytes, follows: Follows) -> None:
        """Remove the drafts that contradict the end, which is `said`, or say no more than it."""
        self._follows = follows
        self._tree.prune(tail, said, follows)

    def grow(self, tail: Sequence[int], said: bytes, *, may_be_longer: bool) -> list[int]:
        """Add the tokens of the tail to the tree; return their path hashes.

        may_be_longer  True: longer tokens begin like the last one
        """
        tree, keys = self._tree, []
        self._rests.clear()
        self.above = None
        parent, rest = tree.root, said
        for index, token in enumerate(tail):
            is_alone = not tree.children(parent)
            self._rests[parent] = rest
            new = tree.grow(parent, (token,), (0.0,), self._source)
            if (node := tree.child(parent, token)) is None:
                break  # the tree is full
            if may_be_longer and new and is_alone and index == len(tail) - 1:
                self.above = parent
            rest = self._follows(rest, token) or b""
            parent = node.key
            keys.append(parent)
        return keys

    def rest_behind(self, key: int) -> bytes:
        """Return what is known to follow the root or a node; b"" at the end of what is known."""
        return self._rests.get(key, b"")

    def fitting(self, parent: int, chosen: Children) -> Children:
        """Return those of the children chosen for a node that say the end, or more."""
        if not (rest := self.rest_behind(parent)):
            return chosen
        kept = [
            pair
            for pair in zip(chosen.tokens, chosen.scores, strict=True)
            if self._follows(rest, pair[0]) == b""
        ]
        return Children(tuple(token for token, _ in kept), tuple(score for _, score in kept))

    def unfed_above(self, keys: Sequence[int]) -> list[Node]:
        """Return the nodes above these that the cache lacks, parents first: parts of the tail."""
        tree, found = self._tree, dict[int, Node]()
        for key in keys:
            above: list[Node] = []
            while key != tree.root and (key := tree.nodes[key].parent) != tree.root:
                if key in self._slots or key in found:
                    break
                above.append(tree.nodes[key])
            found |= {node.key: node for node in reversed(above)}
        return list(found.values())

    def asked_with(self, keys: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes to ask when these are expanded, and forget the one above.

        If the node above the tail's last token is asked as well, it is fed anew: it leaves the
        cache, in which nothing lies below it.
        """
        above, self.above = self.above, None
        if above is None or len(keys) != 1 or self._tree.nodes[keys[0]].parent != above:
            return tuple(keys)  # what is expanded is not the text's end
        slots, root = self._slots, self._tree.root
        if above == root:
            slots.truncate(min(slots.prefix_len, len(self._tree.text) - 1))
        else:
            slots.rename(above, None)
        return (above, *keys)
