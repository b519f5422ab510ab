"""The texts of a trace, and what became of each draft: which verdict decided it, and how (pure)."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.tracing.hops import Hop
from proto.messages import Draft, Open, Verdict
from proto.tree import EMPTY_HASH, path_hash


@dataclass(slots=True)
class Text:
    """One text, as far as it was recorded.

    tokens    what is committed, prompt included
    hashes    of its prefixes; `hashes[n]` names the first n tokens
    decided   how long the text was before each of `verdicts`; ascending
    verdicts  those that made it longer, as they came to the coordinator
    """

    session: int
    opened: Open
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=lambda: [EMPTY_HASH])
    decided: list[int] = field(default_factory=list)
    verdicts: list[Hop] = field(default_factory=list)

    def extend(self, tokens: Iterable[int]) -> None:
        """Commit tokens."""
        for token in tokens:
            self.hashes.append(path_hash(self.hashes[-1], token, self.opened.key))
            self.tokens.append(token)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a draft.

    decided   the verdict that moved the text past the draft's parent: for what is off the text's
              path then, the end
    num_right  of its tokens, those that the text has
    """

    decided: Hop
    num_right: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The first verdict after a draft was read that could use it.

    num_accepted  of its tokens, those among the accepted ones
    """

    verdict: Hop
    num_accepted: int


def texts_of(hops: Sequence[Hop]) -> dict[int, Text]:
    """The texts by session, in the order in which they were opened."""
    texts: dict[int, Text] = {}
    for hop in hops:
        match hop.message:
            case Open() as opened if hop.is_to_node:
                text = texts.setdefault(opened.session, Text(opened.session, opened))
                text.extend(opened.tokens[len(text.tokens) :])
            case Verdict() as verdict if not hop.is_to_node and verdict.session in texts:
                text = texts[verdict.session]
                num_known = len(text.tokens) - verdict.base_len
                if 0 <= num_known < len(verdict.tokens):
                    text.decided.append(len(text.tokens))
                    text.verdicts.append(hop)
                    text.extend(verdict.tokens[num_known:])
    return texts


def fate_of(draft: Draft, text: Text) -> Fate | None:
    """What became of a draft; None: the text ended before."""
    if not text.decided or not text.decided[0] <= draft.parent_len < len(text.tokens):
        return None
    decided = text.verdicts[bisect_right(text.decided, draft.parent_len) - 1]
    return Fate(decided, _num_right(draft, text))


def judged(draft: Draft, read_ns: int, text: Text) -> Judged | None:
    """The verdict on a draft that the target has read then; None: it came too late for any."""
    index = bisect_left(text.verdicts, read_ns, key=lambda hop: hop.sent_ns or 0)
    if index == len(text.verdicts):
        return None
    base_len, verdict = text.decided[index], text.verdicts[index]
    if draft.parent_len + _depth(draft) <= base_len:
        return None
    first = max(base_len, draft.parent_len)
    last = base_len + getattr(verdict.message, "num_accepted", 0)
    if draft.parent_len < len(text.tokens):
        last = min(last, draft.parent_len + _num_right(draft, text))
    return Judged(verdict, max(0, last - first))


def _depth(draft: Draft) -> int:
    """The longest path in a draft."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def _num_right(draft: Draft, text: Text) -> int:
    """Nodes of the draft on the path that the text took."""
    if text.hashes[draft.parent_len] != draft.parent_hash:
        return 0
    at, length = -1, draft.parent_len
    for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == at and length < len(text.tokens) and token == text.tokens[length]:
            at, length = index, length + 1
    return length - draft.parent_len
