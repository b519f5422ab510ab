"""Drafts copied from earlier texts: find what followed the last tokens there (pure).

Theory of operation
-------------------
Edited code, agents and chats repeat passages of earlier texts. As in SuffixDecoding (Oliaro et al.,
arXiv 2411.04975) we look for the longest suffix of the current text that occurs in an earlier text,
and draft the tokens that followed it there: a small tree, the most frequent token first.
SuffixDecoding keeps the earlier texts in a suffix tree. Here their tokens lie in a ring buffer with
hash chains through it, like the window of DEFLATE (RFC 1951, section 4); in Python that costs far
less:

    ring     the tokens of all texts, in pieces with an END between two; the newest tokens overwrite
             the oldest
    place    names a written token: the number of tokens written up to it; its slot (array index)
             is the place modulo the ring's size
    level    a context length n, one of `LEVELS`; each level has chains, and a chain links the
             places that follow the same n tokens
    heads    per level: hash of the n tokens -> the newest place of their chain
    before   per level: slot -> the next older place of its chain (hash collisions may mix chains)

A lookup tries the longest context first. It visits up to `MAX_PLACES` places of the chain, compares
up to `MAX_MATCH` tokens before each place, and keeps the places with the longest match.

A piece begins with a copy of up to `MAX_MATCH` tokens of the text before it, so that a match may
reach back over the piece's beginning; the copied tokens are in no chain. A token's name is a hash
of the whole text up to it, and no name is stored twice. So a text that is opened again, or a
beginning that several texts share (the turns of a chat), is stored once.

Storing a token costs one insertion per level: 3 us. A lookup costs at most `MAX_PLACES * MAX_MATCH`
comparisons per level, however much is stored: 20 us, at worst some 110 (docs/LOG.md). Memory: 76
bytes per slot and some 70 per name, 36 MiB in all; nothing before the first text.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

NUM_TOKENS = 1 << 18  # size of the ring: tokens of all texts together
MIN_MATCH, MAX_MATCH = 2, 32
LEVELS = (16, 8, 4, MIN_MATCH)
MAX_PLACES = 32
PIECE_LEN = 256

END = (1 << 32) - 1  # separator between pieces; token ids have at most 31 bits


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of a text is stored: its first `length` tokens; `name` is their hash."""

    length: int = 0
    name: int = 0


NOTHING = Kept()


@dataclass(frozen=True, slots=True)
class Continuations:
    """A tree of draft tokens that followed the text's last `match_len` tokens elsewhere.

    tokens   the drafted token ids, at least one; a parent comes before its children
    parents  per token, the index of its parent in `tokens`; -1: it follows the text directly
    shares   per token, its relative frequency after its parent: of the places where the parent
             occurred and the stored text went on, the fraction that went on with this token
    """

    match_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    shares: tuple[float, ...]


class _Level:
    """Hash chains for contexts of `length` tokens: each links the places after one context."""

    def __init__(self, length: int, num_tokens: int) -> None:
        self.length = length
        self._mask = num_tokens - 1
        self.heads = array("Q", bytes(8 * num_tokens))  # context hash -> newest place; 0: none
        self.before = array("Q", bytes(8 * num_tokens))  # slot -> next older place of its chain

    def head(self, tokens: tuple[int, ...]) -> int:
        """Return the newest place that follows these `length` tokens; 0 if there is none."""
        return self.heads[hash(tokens) & self._mask]

    def add(self, tokens: tuple[int, ...], place: int, slot: int) -> None:
        """Record that the token at `place` (stored in `slot`) follows these `length` tokens."""
        key = hash(tokens) & self._mask
        self.before[slot] = self.heads[key]
        self.heads[key] = place


class EarlierTexts:
    """Store of the last `num_tokens` (a power of two) tokens of earlier texts, to draft from."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        assert num_tokens >= 4 * MAX_MATCH
        assert num_tokens.bit_count() == 1
        self.num_tokens = num_tokens
        self._piece_len = min(PIECE_LEN, num_tokens // 4)
        self._end = 0  # the newest place; it holds an END except while a piece is being written
        self._names: set[int] = set()  # names of the tokens in the ring, copied ones excepted
        # Indexed by slot; allocated with the first text.
        self._tokens = array("I")
        self._name_at = array("q")  # name of the token; 0: a copied token, or an END
        self._levels: tuple[_Level, ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens stored, without copied tokens and separators."""
        return len(self._names)

    # -- keeping ----------------------------------------------------------------------------------

    def add(self, text: Sequence[int], kept: Kept = NOTHING, *, most: int | None = None) -> Kept:
        """Store the tokens of `text` after `kept`, at most `most`; return how far it is stored."""
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
            # The beginning of a stored text may be overwritten while its end is still there.
            number = self._num_missing(names[index : index + self._piece_len])
            self._write(text, start + index, names[index : index + number])
            index += number
        return Kept(stop, names[-1] if names else kept.name)

    def _num_missing(self, names: Sequence[int]) -> int:
        """Return how many names stand before the first one that is already stored."""
        return next((i for i, name in enumerate(names) if name in self._names), len(names))

    def _write(self, text: Sequence[int], start: int, names: Sequence[int]) -> None:
        """Write the piece of `text` that begins at `start` into the ring; one name per token."""
        if not self._levels:
            self._allocate()
        first = max(0, start - MAX_MATCH)
        piece = tuple(text[first : start + len(names)])
        num_copied = start - first
        while self._end % self.num_tokens + len(piece) + 1 >= self.num_tokens:
            self._put(END)  # a piece does not wrap around the end of the ring
        for token in piece[:num_copied]:
            self._put(token)
        for index, name in enumerate(names, num_copied):
            slot = self._put(piece[index], name)
            for level in self._levels:
                if index >= level.length:
                    level.add(piece[index - level.length : index], self._end, slot)
        self._put(END)

    def _allocate(self) -> None:
        """Allocate the ring and the chains, before the first text is stored."""
        self._tokens = array("I", [END]) * self.num_tokens
        self._name_at = array("q", bytes(8 * self.num_tokens))
        self._levels = tuple(_Level(length, self.num_tokens) for length in LEVELS)

    def _put(self, token: int, name: int = 0) -> int:
        """Write one token into the ring, overwriting the oldest; return its slot."""
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
        """Return at most `limit` draft tokens for a text that ends with `recent`, or None.

        recent   the last tokens of the text; only the last `MAX_MATCH` are used
        limit    most tokens to return
        least    fewest tokens that must match (never fewer than `MIN_MATCH`)
        is_tree  True: draft a tree, with several continuations where the places found differ;
                 False: a chain of the most frequent continuations

        Returns None if no suffix of `recent` that is long enough occurs in the stored texts.
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
        """Return the longest match in one chain: its length in tokens, and the slots that have it.

        The slots are newest first; empty if no place of the chain matches `least` tokens.
        """
        longest, slots = least, list[int]()
        backwards = recent[::-1]
        oldest = max(0, self._end - self.num_tokens)  # places up to here are overwritten; 0: none
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
        """Return how many of the tokens `backwards` stand before `slot`, counted from it.

        The count ends at the first difference, at the latest at an END (slot 0 always holds one).
        """
        number = 0
        for token in backwards:
            if self._tokens[slot - 1 - number] != token:
                break
            number += 1
        return number

    def _tree(
        self, match_len: int, slots: Sequence[int], limit: int, branches: int
    ) -> Continuations:
        """Return the tree of the tokens at `slots` and after them, the most frequent first.

        The tree has at most `limit` tokens, and each node at most `branches` children.
        """
        tokens: list[int] = []
        parents: list[int] = []
        shares: list[float] = []
        # Per candidate: minus its count, its order of discovery, parent index, share, its slots.
        pending: list[tuple[int, int, int, float, Sequence[int]]] = []
        num_found = 0

        def discover(parent: int, slots: Sequence[int]) -> None:
            nonlocal num_found
            following: dict[int, list[int]] = {}
            for slot in slots:
                if (token := self._tokens[slot]) != END:
                    following.setdefault(token, []).append(slot)
            total = sum(map(len, following.values()))
            by_number = sorted(following.values(), key=len, reverse=True)  # ties: newest first
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
