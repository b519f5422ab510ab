"""Drafts that the target makes by itself, of what was written before (pure).

Theory of operation
-------------------
Right when a pass starts, what followed the text's last tokens earlier joins the tree: under the
root, and then behind the best chain for as long as there is room, since a draft of a model can be
continued in this way too. So the source costs nothing while the target computes, and is never late.
With a drafter besides, both grow one tree, and the pass takes the chain of which most is expected
to be accepted. That needs coupled verification: there it does not matter which.

    engine/layout/ngram.py    earlier in this text, or in a reference
    engine/layout/earlier.py  in other texts, where that is asked for (`Lookup.remember`)

How much is expected of a token depends on how many tokens before it are the same there, and is
learnt from what became of earlier ones. What is at least as often right as the drafter is worth
starting a pass with, in place of waiting for the drafter as usual.

A text that may copy from others is kept for them too: a piece of it with a pass at most, so that no
pass waits for the whole of a long prompt, and the rest when it ends or is closed.
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
    """A tree of drafts that were found in one place, or in several that are alike.

    kinds  what each of them counts as
    """

    source: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    kinds: tuple[Kind, ...]


class LookupSource:
    """The copied drafts of one life of a text.

    earlier  texts to copy from, and where this one is kept, if its Open says so
    is_tree  a pass may verify several that follow the same token
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
        self._index: NgramIndex | None = None  # None: this text is written without them
        self._earlier: EarlierTexts | None = None  # None: without those of other texts
        self._kept = NOTHING  # of this text
        self._least = 0  # tokens before a copy of another text that must be the same
        self._is_tree = is_tree
        # Classical rules: each draft is all that it was sampled from.
        self._is_certain = opened.rule is not Rule.COUPLED
        self._kinds: dict[int, Kind] = {}  # of the nodes that were added here
        # (length of the text, what is found at its end)
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
        """The text goes on."""
        if self._index is not None:
            self._index.extend(tokens)
            if len(self._index) - self._kept.length >= PIECE_LEN:
                self._keep(PIECE_LEN)

    def end(self) -> None:
        """It does not, for all that is known here: the rest of it is kept as well."""
        self._keep(None)

    def _keep(self, most: int | None) -> None:
        if self._index is not None and self._earlier is not None:
            self._kept = self._earlier.add(self._index.tokens, self._kept, most=most)

    # -- drafts -----------------------------------------------------------------------------------

    def is_worth_starting(self, wanted: int) -> bool:
        """Whether to start a pass with what is found at the root, without the drafter's drafts."""
        if self._index is None:
            return False
        if self._found[0] != len(self._index):
            self._found = (len(self._index), self._find(self._index, (), wanted, is_tree=False))
        return any(
            len(copy.tokens) >= wanted and self._is_as_good(copy.kinds) for copy in self._found[1]
        )

    def _is_as_good(self, kinds: Sequence[Kind]) -> bool:
        """Whether such drafts are at least as often right as the drafter's."""
        chance = self._acceptance.chance
        return min(map(chance, kinds)) >= chance(FIRST_OF_MODEL)

    @property
    def kinds(self) -> Mapping[int, Kind]:
        """What the copied drafts count as, when it is asked how often such drafts are right.

        `grow` makes another mapping, so this one goes on saying it of drafts that have died.
        """
        return self._kinds

    def grow(self, tree: SpeculationTree, limit: int) -> None:
        """Add drafts for a pass that verifies at most `limit` of them."""
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
        """Add what follows `chain`; returns whether anything new did."""
        path = [node.token for node in chain]
        copies = self._find(index, path, limit, is_tree=self._is_tree)
        # Of two sources that say the same, the one that is right more often has said it.
        copies.sort(key=lambda copy: -self._acceptance.chance(copy.kinds[0]))
        above = chain[-1].key if chain else tree.root
        num_known = len(self._kinds)
        for copy in copies:
            self._attach(tree, copy, above, len(tree.text) + len(chain))
        return len(self._kinds) > num_known

    def _find(
        self, index: NgramIndex, path: Sequence[int], limit: int, *, is_tree: bool
    ) -> list[_Copy]:
        """What may follow the text and `path`, of each source."""
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
        """Hang a copy below the path (`length`, `above`), and note what is new of it."""
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
            is_there = parent < 0 or before is not None  # there may have been no room for it
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
