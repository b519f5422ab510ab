"""What followed the last tokens in earlier texts (pure): drafts for what says itself again.

Theory of operation
-------------------
Edited code, agents and chats repeat what stood in another text. As in SuffixDecoding (Oliaro et
al., arXiv 2411.04975) the longest suffix of the text is looked for that stands in earlier texts,
and what followed it there is the draft: a small tree, what was said most often first. There the
earlier texts are a suffix tree; here they lie in a ring, and chains lead through it as through the
window of DEFLATE (RFC 1951, section 4), which costs far less in Python:

    ring     tokens of texts, piece by piece, an END between two; the newest overwrite the oldest
    place    the number of tokens written before; its slot is what is left of it modulo the ring
    level    a number of tokens, of `LEVELS`: places behind the same last so many tokens are a chain
    heads    of a level: hash of those tokens -> the newest place of their chain
    before   of a level: slot -> the next older place of its chain; of another hash by coincidence

A lookup follows the chains of the longest tokens first, up to `MAX_PLACES` places of each, and
compares what stands before them, up to `MAX_MATCH` tokens. Those with the longest match count.

A piece begins with a copy of the tokens before it, which lead nowhere, so that a match may go over
its beginning. A token is named by a hash of the whole text up to it, and no name is kept twice: not
if a text is opened again, nor what several texts begin with alike, such as the turns of a chat.

A token costs an insertion for each level, a lookup at most `MAX_PLACES * MAX_MATCH` comparisons a
level, whatever is kept: 3 us, and 20 us, at worst some 110 (docs/LOG.md). Memory: 76 bytes a slot,
and some 70 for each name, 36 MiB in all; nothing before the first text.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

NUM_TOKENS = 1 << 18  # of all texts together
MIN_MATCH, MAX_MATCH = 2, 32
LEVELS = (16, 8, 4, MIN_MATCH)
MAX_PLACES = 32
PIECE_LEN = 256

END = (1 << 32) - 1  # no token: those have 31 bits


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of a text was kept: its first `length` tokens, whose name is `name`."""

    length: int = 0
    name: int = 0


NOTHING = Kept()


@dataclass(frozen=True, slots=True)
class Continuations:
    """What followed the last `match_len` tokens in other places: a tree, at least one token.

    parents  of each token, the index of its parent, or -1; parents come first
    shares   of the places that its parent was seen at and went on from, those where it came next
    """

    match_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    shares: tuple[float, ...]


class _Level:
    """The chains of places that follow the same `length` tokens."""

    def __init__(self, length: int, num_tokens: int) -> None:
        self.length = length
        self._mask = num_tokens - 1
        self.heads = array("Q", bytes(8 * num_tokens))  # 0: none
        self.before = array("Q", bytes(8 * num_tokens))  # by slot, of those in a chain

    def head(self, tokens: tuple[int, ...]) -> int:
        """Where the chain begins of what follows these `length` tokens."""
        return self.heads[hash(tokens) & self._mask]

    def add(self, tokens: tuple[int, ...], place: int, slot: int) -> None:
        """What is at `place` follows these tokens."""
        key = hash(tokens) & self._mask
        self.before[slot] = self.heads[key]
        self.heads[key] = place


class EarlierTexts:
    """The last `num_tokens` (a power of two) tokens of texts, and what followed what in them."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        assert num_tokens >= 4 * MAX_MATCH
        assert num_tokens.bit_count() == 1
        self.num_tokens = num_tokens
        self._piece_len = min(PIECE_LEN, num_tokens // 4)
        self._end = 0  # the newest place; an END, but while a piece is written
        self._names: set[int] = set()  # of the tokens in the ring that are no copies
        # By slot; all empty before the first text.
        self._tokens = array("I")
        self._name_at = array("q")  # 0: a copy, or an END
        self._levels: tuple[_Level, ...] = ()

    def __len__(self) -> int:
        """Number of tokens that are kept, without copies."""
        return len(self._names)

    # -- keeping ----------------------------------------------------------------------------------

    def add(self, text: Sequence[int], kept: Kept = NOTHING, *, most: int | None = None) -> Kept:
        """Keep `text` beyond `kept`, but at most so many tokens; returns how far it is kept now."""
        start = kept.length
        stop = len(text) if most is None else min(len(text), start + most)
        names = [kept.name]
        for token in text[start:stop]:
            names.append(hash((names[-1], token)))
        del names[0]
        index = 0
        while index < len(names):
            if names[index] in self._names:
                index += 1
                continue
            # Of a text that was kept its beginning may be overwritten, and its end not yet.
            number = self._num_missing(names[index : index + self._piece_len])
            self._write(text, start + index, names[index : index + number])
            index += number
        return Kept(stop, names[-1] if names else kept.name)

    def _num_missing(self, names: Sequence[int]) -> int:
        """How many of the first of these are not kept."""
        return next((i for i, name in enumerate(names) if name in self._names), len(names))

    def _write(self, text: Sequence[int], start: int, names: Sequence[int]) -> None:
        """Write a piece of `text` from `start` on, whose tokens have these names."""
        if not self._levels:
            self._allocate()
        first = max(0, start - MAX_MATCH)
        piece = tuple(text[first : start + len(names)])
        num_copied = start - first
        while self._end % self.num_tokens + len(piece) + 1 >= self.num_tokens:
            self._put(END)  # a piece does not go over the end of the ring
        for token in piece[:num_copied]:
            self._put(token)
        for index, name in enumerate(names, num_copied):
            slot = self._put(piece[index], name)
            for level in self._levels:
                if index >= level.length:
                    level.add(piece[index - level.length : index], self._end, slot)
        self._put(END)

    def _allocate(self) -> None:
        self._tokens = array("I", [END]) * self.num_tokens
        self._name_at = array("q", bytes(8 * self.num_tokens))
        self._levels = tuple(_Level(length, self.num_tokens) for length in LEVELS)

    def _put(self, token: int, name: int = 0) -> int:
        """Write one token, over the oldest; returns its slot."""
        self._end += 1
        slot = self._end % self.num_tokens
        self._names.discard(self._name_at[slot])
        self._tokens[slot], self._name_at[slot] = token, name
        if name:
            self._names.add(name)
        return slot

    # -- finding ----------------------------------------------------------------------------------

    def find(
        self, recent: Sequence[int], *, least: int, limit: int, is_tree: bool
    ) -> Continuations | None:
        """At most `limit` tokens that may follow a text that ends with `recent`.

        recent   its last tokens; more than `MAX_MATCH` are of no use
        least    so many tokens must match, and at least `MIN_MATCH`
        is_tree  wherever the places differ, follow several; else only what came most often

        None: it ends with nothing that is kept.
        """
        assert limit >= 1
        recent = tuple(recent[-MAX_MATCH:])
        for level in self._levels:
            if level.length > len(recent):
                continue
            match_len, slots = self._longest(level, recent, max(least, level.length))
            if slots:
                return self._tree(match_len, slots, limit, 1 if not is_tree else MAX_PLACES)
            if level.length <= least:
                break
        return None

    def _longest(
        self, level: _Level, recent: tuple[int, ...], least: int
    ) -> tuple[int, Sequence[int]]:
        """Places of a chain with the longest match, of at least so many tokens; newest first."""
        longest, slots = least, list[int]()
        backwards = recent[::-1]
        oldest = max(0, self._end - self.num_tokens)  # it is overwritten, or none
        place = level.head(recent[-level.length :])
        for _ in range(MAX_PLACES):
            if place <= oldest:
                break
            slot = place % self.num_tokens
            match_len = self._num_alike(slot, backwards)
            if match_len > longest:
                longest, slots = match_len, []
            if match_len == longest:
                slots.append(slot)
            place = level.before[slot]
        return longest, slots

    def _num_alike(self, slot: int, backwards: Iterable[int]) -> int:
        """How many of these tokens stand before a slot. An END does at last, at slot 0 always."""
        number = 0
        for token in backwards:
            if self._tokens[slot - 1 - number] != token:
                break
            number += 1
        return number

    def _tree(
        self, match_len: int, slots: Sequence[int], limit: int, branches: int
    ) -> Continuations:
        """What stands at these slots and behind them, at most `branches` children of each node."""
        tokens: list[int] = []
        parents: list[int] = []
        shares: list[float] = []
        # Minus how often, number in order of discovery, parent, share, and where it stands.
        pending: list[tuple[int, int, int, float, Sequence[int]]] = []
        num_found = 0

        def discover(parent: int, slots: Sequence[int]) -> None:
            nonlocal num_found
            following: dict[int, list[int]] = {}
            for slot in slots:
                if (token := self._tokens[slot]) != END:
                    following.setdefault(token, []).append(slot)
            total = sum(map(len, following.values()))
            by_number = sorted(following.values(), key=len, reverse=True)  # the newest first
            for places in by_number[:branches]:
                share = len(places) / total
                heappush(pending, (-len(places), num_found, parent, share, places))
                num_found += 1

        discover(-1, slots)
        while pending and len(tokens) < limit:
            _, _, parent, share, places = heappop(pending)
            tokens.append(self._tokens[places[0]])
            parents.append(parent)
            shares.append(share)
            discover(len(tokens) - 1, [place + 1 for place in places])
        return Continuations(match_len, tuple(tokens), tuple(parents), tuple(shares))

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        names = [name for name in self._name_at if name]
        assert len(names) == len(set(names)), "a token is kept twice"
        assert set(names) == self._names
        if self._levels:
            assert self._tokens[self._end % self.num_tokens] == END
            assert self._tokens[0] == END
