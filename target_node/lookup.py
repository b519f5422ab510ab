"""Drafts that the target makes without a model, by copying from earlier text (pure).

Theory of operation
-------------------
Right when a pass starts, the tokens that followed the text's last tokens earlier are added to the
tree: under the root, and then after the best chain as long as there is room, since a draft of a
model can be continued in this way too. So this source costs nothing while the target computes, and
is never late. With a drafter besides, both grow one tree, and the pass takes the drafts with the
most expected acceptances. That needs coupled verification, under which the choice of the drafts
does not change the text.

    engine/layout/ngram.py    earlier in this text, or in a reference
    engine/layout/earlier.py  in other texts, where that is asked for (`Lookup.remember`)

The chance of a copied token depends on how many tokens before it are the same there, and is learnt
from earlier copies. If copies are right at least as often as the drafter, a pass starts with them
at once and does not wait for the drafter.

A text that may copy from other texts is also kept for them: at most one piece of it with each pass,
so that no pass waits while a whole long prompt is added, and the rest when it ends or is closed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.layout.earlier import MAX_MATCH, NOTHING, PIECE_LEN, EarlierTexts
from engine.layout.ngram import NgramIndex
from node.economics import FIRST_OF_MODEL, Acceptance, Kind, kind_of_earlier
from proto.messages import EARLIER_SOURCE, NGRAM_SOURCE, Open, Proposal, Rule
from proto.tree import Graft, Node, SpeculationTree


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tree of tokens that were found in one place, or in several alike places, of earlier text.

    source   NGRAM_SOURCE or EARLIER_SOURCE
    parents  index of each token's parent, or -1; parents come first
    kinds    the kind of each token, by which its acceptance is counted (`economics.Kind`)
    """

    source: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    kinds: tuple[Kind, ...]


class LookupSource:
    """Adds copied drafts to the tree of one text, for one life of it.

    earlier  texts to copy from, and where this one is kept, if its Open says so
    is_tree  True: a pass may verify several drafts that follow the same token
    """

    def __init__(
        self,
        acceptance: Acceptance,
        opened: Open,
        tokens: Sequence[int],
        earlier: EarlierTexts | None = None,
        *,
        is_tree: bool = False,
    ) -> None:
        self._acceptance = acceptance
        self._index: NgramIndex | None = None  # None: no copies for this text
        self._earlier: EarlierTexts | None = None  # None: no copies from other texts
        self._kept = NOTHING  # which part of this text is kept for others already
        self._least = 0  # how many tokens before a copy from another text must be the same
        self._is_tree = is_tree
        # Classical rules: a copied draft has chance 1 in its own proposal.
        self._is_certain = opened.rule is not Rule.COUPLED
        self._kinds: dict[int, Kind] = {}  # of the nodes that were added here
        # (length of the text, copies that were found at its end)
        self._found: tuple[int, Sequence[_Copy]] = (0, ())
        if (lookup := opened.lookup) is not None:
            self._index = NgramIndex(
                ngram_min=lookup.ngram_min,
                ngram_max=lookup.ngram_max,
                seed=opened.sampling.seed,
                reference=lookup.reference,
            )
            self._index.extend(tokens)
            self._earlier = earlier if lookup.remember else None
            self._least = lookup.ngram_min

    # -- the text ---------------------------------------------------------------------------------

    def extend(self, tokens: Sequence[int]) -> None:
        """Add new committed tokens of the text to the index."""
        if self._index is not None:
            self._index.extend(tokens)
            if len(self._index) - self._kept.length >= PIECE_LEN:
                self._keep(PIECE_LEN)

    def end(self) -> None:
        """Keep the rest of the text for other texts: it has ended, or is closed."""
        self._keep(None)

    def _keep(self, most: int | None) -> None:
        if self._index is not None and self._earlier is not None:
            self._kept = self._earlier.add(self._index.tokens, self._kept, most=most)

    # -- drafts -----------------------------------------------------------------------------------

    def is_worth_starting(self, wanted: int) -> bool:
        """True if a pass should start with `wanted` copies at the root, and not wait for drafts."""
        if self._index is None:
            return False
        if self._found[0] != len(self._index):
            self._found = (len(self._index), self._find(self._index, (), wanted, is_tree=False))
        return any(
            len(copy.tokens) >= wanted and self._is_as_good(copy.kinds) for copy in self._found[1]
        )

    def _is_as_good(self, kinds: Sequence[Kind]) -> bool:
        """True if drafts of these kinds are right at least as often as the drafter's."""
        chance = self._acceptance.chance
        return min(map(chance, kinds)) >= chance(FIRST_OF_MODEL)

    @property
    def kinds(self) -> Mapping[int, Kind]:
        """Return the kind of each copied draft, by path hash; its acceptance is counted by kind.

        `grow` makes a new mapping, so this one keeps the kinds of drafts that have died since.
        """
        return self._kinds

    def grow(self, tree: SpeculationTree, limit: int) -> None:
        """Add copied drafts to the tree, for a pass that verifies at most `limit` drafts."""
        self._kinds = {key: kind for key, kind in self._kinds.items() if key in tree.nodes}
        if self._index is None or limit == 0:
            return
        self._add(tree, self._index, (), limit)
        chain = tree.best_chain(limit)
        while len(chain) < limit and self._add(tree, self._index, chain, limit - len(chain)):
            chain = tree.best_chain(limit)

    def _add(
        self, tree: SpeculationTree, index: NgramIndex, chain: Sequence[Node], limit: int
    ) -> bool:
        """Add copies that follow `chain`; True if any of them are new in the tree."""
        path = [node.token for node in chain]
        copies = self._find(index, path, limit, is_tree=self._is_tree)
        # A draft that two sources have found is counted for the one that is right more often.
        copies.sort(key=lambda copy: -self._acceptance.chance(copy.kinds[0]))
        above = chain[-1].key if chain else tree.root
        num_known = len(self._kinds)
        for copy in copies:
            self._attach(tree, copy, above, len(tree.text) + len(chain))
        return len(self._kinds) > num_known

    def _find(
        self, index: NgramIndex, path: Sequence[int], limit: int, *, is_tree: bool
    ) -> list[_Copy]:
        """Return the copies of each source that may follow the text and then `path`."""
        copies: list[_Copy] = []
        if (match := index.find(limit, path)) is not None:
            number = len(match.tokens)
            kinds = ((NGRAM_SOURCE, match.ngram_len),) * number
            copies.append(_Copy(NGRAM_SOURCE, match.tokens, tuple(range(-1, number - 1)), kinds))
        if self._earlier is None:
            return copies
        recent = [*index.tokens[-MAX_MATCH:], *path]
        found = self._earlier.find(recent, least=self._least, limit=limit, is_tree=is_tree)
        if found is not None:
            kinds = tuple(kind_of_earlier(found.match_len, share) for share in found.shares)
            copies.append(_Copy(EARLIER_SOURCE, found.tokens, found.parents, kinds))
        return copies

    def _attach(self, tree: SpeculationTree, copy: _Copy, above: int, length: int) -> None:
        """Attach a copy below the path (`length`, `above`), and note the kinds of its new nodes."""
        scores = tuple(math.log(self._acceptance.chance(kind)) for kind in copy.kinds)
        proposals = tuple(Proposal((token,), (1.0,)) for token in copy.tokens)
        tree.attach(
            Graft(
                copy.source,
                above,
                length,
                copy.tokens,
                copy.parents,
                scores,
                proposals if self._is_certain else (),
            )
        )
        nodes: list[Node | None] = []
        for token, parent, kind in zip(copy.tokens, copy.parents, copy.kinds, strict=True):
            before = None if parent < 0 else nodes[parent]
            is_there = parent < 0 or before is not None  # else it found no room
            node = tree.child(above if before is None else before.key, token) if is_there else None
            nodes.append(node)
            if node is not None and node.source == copy.source:
                self._kinds.setdefault(node.key, kind)

    def check(self, tree: SpeculationTree) -> None:
        """Assert every invariant (for tests and the simulator)."""
        is_right = self._index is None or self._index.tokens == tree.text.tokens
        assert is_right, "another text than this one is indexed"
        if self._earlier is not None:
            assert self._kept.length <= len(tree.text)
