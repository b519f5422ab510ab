"""Drafts that the target makes by itself, of what was written before (pure).

Theory of operation
-------------------
Right when a pass starts, what followed the text's last tokens earlier (`engine/ngram.py`) joins the
tree: under the root, and then behind the best chain for as long as there is room, since a draft of
a model can be continued in this way too. So the source costs nothing while the target computes, and
is never late. With a drafter besides, both grow one tree, and the pass takes the chain of which
most is expected to be accepted. That needs coupled verification: there it does not matter which.

How much is expected of a token depends on the length of its n-gram, and is learnt from what became
of earlier ones. What is at least as often right as the drafter is worth starting a pass with, in
place of waiting for the drafter as usual.
"""

import math
from collections.abc import Sequence

from engine.ngram import Match, NgramIndex
from node.acceptance import FIRST_OF_MODEL, Acceptance, Kind
from proto.messages import NGRAM_SOURCE, Open, Proposal, Rule
from proto.tree import Graft, Node, SpeculationTree


class LookupSource:
    """The n-gram drafts of one life of a text."""

    def __init__(self, acceptance: Acceptance, opened: Open, tokens: Sequence[int]) -> None:
        self._acceptance = acceptance
        self._index: NgramIndex | None = None  # None: this text is written without them
        # Classical rules: each draft is all that it was sampled from.
        self._is_certain = opened.rule is not Rule.COUPLED
        self._ngram_lens: dict[int, int] = {}  # of the nodes that were added here
        self._found: tuple[int, Match | None] = (0, None)  # (length of the text, match at its end)
        if (lookup := opened.lookup) is not None:
            self._index = NgramIndex(
                ngram_min=lookup.ngram_min,
                ngram_max=lookup.ngram_max,
                seed=opened.sampling.seed,
                reference=lookup.reference,
            )
            self._index.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        if self._index is not None:
            self._index.extend(tokens)

    def is_worth_starting(self, wanted: int) -> bool:
        """Whether to start a pass with what is found at the root, without the drafter's drafts."""
        if self._index is None:
            return False
        if self._found[0] != len(self._index):
            self._found = (len(self._index), self._index.find(wanted))
        match = self._found[1]
        if match is None or len(match.tokens) < wanted:
            return False
        chance = self._acceptance.chance
        return chance((NGRAM_SOURCE, match.ngram_len)) >= chance(FIRST_OF_MODEL)

    def kind_of(self, node: Node) -> Kind:
        """What a copied draft counts as, when it is asked how often such drafts are right."""
        return NGRAM_SOURCE, self._ngram_lens[node.key]

    def grow(self, tree: SpeculationTree, limit: int) -> None:
        """Add drafts for a pass that verifies at most `limit` of them."""
        lens = self._ngram_lens
        self._ngram_lens = {key: lens[key] for key in lens if key in tree.nodes}
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
        match = index.find(limit, [node.token for node in chain])
        if match is None:
            return False
        number = len(match.tokens)
        score = math.log(self._acceptance.chance((NGRAM_SOURCE, match.ngram_len)))
        before = set(tree.nodes)
        tree.attach(
            Graft(
                source=NGRAM_SOURCE,
                parent_hash=chain[-1].key if chain else tree.root,
                parent_len=len(tree.text) + len(chain),
                tokens=match.tokens,
                parents=tuple(range(-1, number - 1)),
                scores=(score,) * number,
                proposals=tuple(Proposal((token,), (1.0,)) for token in match.tokens)
                if self._is_certain
                else (),
            )
        )
        new = [key for key in tree.nodes if key not in before]
        self._ngram_lens.update(dict.fromkeys(new, match.ngram_len))
        return bool(new)

    def check(self, tree: SpeculationTree) -> None:
        """Assert every invariant (for tests and the simulator)."""
        is_right = self._index is None or self._index.tokens == tree.text.tokens
        assert is_right, "another text than this one is indexed"
