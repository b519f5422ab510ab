"""Which drafts are right: how a pass is judged, and what its verdict says of drafts (pure)."""

from collections.abc import Sequence

from proto.messages import Open, Rule
from proto.tree import Node
from target_node.events import Judge


def judge_of(opened: Open, chain: Sequence[Node]) -> Judge | None:
    """How the drafts of a pass are judged; None: by equality."""
    if opened.rule is Rule.COUPLED:
        return None
    proposals = tuple(node.proposal for node in chain if node.proposal is not None)
    drafts = tuple(node.token for node in chain)
    return Judge(opened.rule, drafts, proposals, opened.incarnation)


def num_equal(chain: Sequence[Node], tokens: Sequence[int]) -> int:
    """How many nodes of `chain` carry these tokens, up to the first that does not."""
    pairs = enumerate(zip(chain, tokens, strict=False))
    alike = min(len(chain), len(tokens))
    return next((index for index, (node, token) in pairs if node.token != token), alike)


def judged(
    opened: Open, at_hand: Sequence[Node], num_verified: int, accepted: int, tokens: Sequence[int]
) -> tuple[Sequence[Node], int]:
    """The drafts of which it is known what became of them, and how many of them were right.

    Where a draft is right if it is what the target says, that is known also of drafts that were at
    hand and not verified, up to the last token of `tokens`, the target's own.
    """
    if opened.rule is not Rule.COUPLED:
        return at_hand[:num_verified], accepted
    known = at_hand[: len(tokens)]
    return known, num_equal(known, tokens)
