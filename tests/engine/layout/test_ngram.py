"""N-gram drafts, against a source that searches the whole text at every step."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import ngram
from engine.layout.ngram import Match, NgramIndex

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def index(
    tokens: Sequence[int],
    *,
    ngram_min: int = 1,
    ngram_max: int = 3,
    seed: int = 7,
    reference: Sequence[int] = (),
) -> NgramIndex:
    """An index of `tokens`."""
    made = NgramIndex(ngram_min=ngram_min, ngram_max=ngram_max, seed=seed, reference=reference)
    made.extend(tokens)
    return made


def found_by_searching(made: NgramIndex, limit: int, path: Sequence[int]) -> set[Match]:
    """Every draft that could be meant, found by looking at every place."""
    whole = [*made.tokens, *path]
    for length in range(min(made.ngram_max, len(whole)), made.ngram_min - 1, -1):
        suffix = whole[len(whole) - length :]
        continuations = [
            tuple(text[end : end + limit])
            for text in (list(made.reference), made.tokens)
            for end in range(length, len(text))
            if text[end - length : end] == suffix
        ]
        if continuations:
            longest = max(map(len, continuations))
            return {Match(tokens, length) for tokens in continuations if len(tokens) == longest}
    return set()


@given(
    text=TOKENS,
    path=st.lists(st.integers(0, 2), max_size=6),
    reference=TOKENS,
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    limit=st.integers(1, 6),
    seed=st.integers(0, 2**64 - 1),
)
def test_it_finds_what_a_search_of_the_whole_text_finds(
    text: list[int],
    path: list[int],
    reference: list[int],
    bounds: tuple[int, int],
    limit: int,
    seed: int,
) -> None:
    made = NgramIndex(ngram_min=bounds[0], ngram_max=sum(bounds), seed=seed, reference=reference)
    for token in text:
        made.extend([token])
        wanted = found_by_searching(made, limit, ())
        assert made.find(limit) in (wanted or {None})
    assert made.find(limit, path) in (found_by_searching(made, limit, path) or {None})


@given(text=TOKENS, cuts=st.lists(st.integers(0, 40)), seed=st.integers(0, 9))
def test_a_text_has_the_same_draft_however_it_came(
    text: list[int], cuts: list[int], seed: int
) -> None:
    whole, in_parts = index(text, seed=seed), index((), seed=seed)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        in_parts.extend(text[start:end])
    assert in_parts.tokens == text
    assert in_parts.find(4) == whole.find(4)


def test_the_longest_ngram_comes_first() -> None:
    made = index([5, 1, 2, 9, 1, 2, 8, 5, 1, 2])
    assert made.find(1) == Match((9,), 3)


def test_a_shorter_ngram_is_taken_where_a_longer_one_has_nothing_behind_it() -> None:
    assert index([1, 2, 3, 9, 4, 3]).find(2) == Match((9, 4), 1)
    assert index([1, 2, 3, 9, 4, 3], ngram_min=2).find(2) is None


def test_the_longest_continuation_is_preferred() -> None:
    for seed in range(20):
        assert index([1, 7, 8, 9, 1, 6, 1], seed=seed).find(4) == Match((7, 8, 9, 1), 1)


def test_ties_are_broken_at_random_by_the_seed() -> None:
    text = [1, 5, 0, 1, 6, 0, 1, 7, 0, 1]
    drawn = Counter(index(text, ngram_max=1, seed=seed).find(2) for seed in range(600))
    assert set(drawn) == {Match(tokens, 1) for tokens in ((5, 0), (6, 0), (7, 0))}
    assert min(drawn.values()) > 150


def test_a_place_is_drawn_anew_where_the_text_is_longer() -> None:
    made = index([1, 5, 0, 1, 6, 0], ngram_max=1, seed=3)
    drawn = set()
    for _ in range(12):
        made.extend([2, 1])
        drawn.add(made.find(2))
    assert {Match((5, 0), 1), Match((6, 0), 1)} <= drawn


def test_nothing_bridges_from_the_reference_into_the_text() -> None:
    made = index([3, 4, 1, 2], reference=[1, 2], ngram_max=2)
    assert made.find(4) is None
    assert index([9, 3, 2], reference=[1, 2], ngram_max=2).find(2) is None
    assert index([9, 1, 2], reference=[1, 2, 5], ngram_max=2).find(4) == Match((5,), 2)


def test_a_path_is_looked_up_without_becoming_text() -> None:
    made = index([1, 2, 3, 4, 1])
    assert made.find(2, [2]) == Match((3, 4), 2)
    assert made.find(2, [8]) is None
    assert made.tokens == [1, 2, 3, 4, 1]
    assert made.find(2) == Match((2, 3), 1)


def test_an_empty_text_has_no_draft() -> None:
    assert index([]).find(3) is None
    assert index([], reference=[1, 2]).find(3) is None
    assert index([], reference=[1, 2]).find(3, [1]) == Match((2,), 1)


def test_what_is_too_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "BLOCK_LEN", 4)
    made = index([1, 2, 0, 0, 3, 4, 0, 0], ngram_max=1)
    assert made.find(1, [1]) == Match((2,), 1)
    made.extend([5])
    assert made.find(1, [1]) is None
    assert made.find(1, [3]) == Match((4,), 1)
    num_places = sum(
        1 if isinstance(ends, int) else len(ends)
        for table in (made._in_text, made._in_text_before)
        for ends in table.values()
    )
    assert num_places == 5


def test_an_ngram_across_two_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "BLOCK_LEN", 4)
    made = index([0, 0, 1, 2, 3, 9, 0, 0, 2], ngram_max=3)
    assert made.find(1, [3]) == Match((9,), 2)


class _Watched(list[int]):
    """A list that counts how much of it is read."""

    num_read = 0

    def __getitem__(self, where: Any) -> Any:
        self.num_read += len(range(*where.indices(len(self)))) if isinstance(where, slice) else 1
        return super().__getitem__(where)

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    made = index(())
    watched = made.tokens = _Watched()
    costs = []
    for step in range(3000):
        watched.num_read = 0
        made.extend([step % 12])
        made.find(4)
        costs.append(watched.num_read)
    assert set(costs[100:]) == {3 + 3 + 4}, "keys of three n-grams, the last three tokens, a draft"
