"""Copies of earlier texts, against a search of every place of every text."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import earlier
from engine.layout.earlier import (
    MAX_MATCH,
    MAX_PLACES,
    MIN_MATCH,
    NOTHING,
    Continuations,
    EarlierTexts,
)

SMALLEST = 4 * MAX_MATCH
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=3)
RECENT = st.lists(st.integers(0, 2), max_size=8)


def of(*texts: Sequence[int], num_tokens: int = 1 << 10) -> EarlierTexts:
    """These texts, one after the other."""
    made = EarlierTexts(num_tokens)
    for text in texts:
        made.add(text)
        made.check()
    return made


def found(
    made: EarlierTexts,
    *recent: int,
    least: int = MIN_MATCH,
    limit: int = 100,
    is_tree: bool = True,
) -> Continuations | None:
    """What may follow these tokens."""
    return made.find(recent, least=least, limit=limit, is_tree=is_tree)


def following(made: EarlierTexts, *recent: int, limit: int = 100) -> tuple[int, ...]:
    """The likeliest of it."""
    continuations = found(made, *recent, limit=limit, is_tree=False)
    return () if continuations is None else continuations.tokens


def paths_of(continuations: Continuations) -> list[tuple[int, ...]]:
    """Every node by its path, in their order."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(continuations.tokens, continuations.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


# -- the search -----------------------------------------------------------------------------------


def places(texts: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """What stands before and behind every place; what texts begin with alike counts once."""
    seen = set()
    for text in texts:
        for end in range(1, len(text) + 1):
            if (beginning := tuple(text[:end])) not in seen:
                seen.add(beginning)
                yield text[: end - 1], text[end - 1 :]


def num_alike(before: Sequence[int], recent: Sequence[int]) -> int:
    pairs = zip(reversed(before), reversed(recent), strict=False)
    number = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    return min(MAX_MATCH, len(before), len(recent)) if number is None else min(MAX_MATCH, number)


def searched(
    texts: Sequence[Sequence[int]], recent: Sequence[int], least: int
) -> tuple[int, dict[tuple[int, ...], int]]:
    """The length of the longest match, and how often each continuation was seen behind it."""
    matches = [(num_alike(before, recent), behind) for before, behind in places(texts)]
    longest = max((length for length, _ in matches), default=0)
    counts: dict[tuple[int, ...], int] = {}
    if longest < max(least, MIN_MATCH):
        return longest, counts
    for length, behind in matches:
        for end in range(1, len(behind) + 1) if length == longest else ():
            counts[tuple(behind[:end])] = counts.get(tuple(behind[:end]), 0) + 1
    return longest, counts


@given(texts=TEXTS, recent=RECENT, least=st.integers(1, 5), limit=st.integers(1, 40))
def test_it_finds_what_a_search_of_all_texts_finds(
    texts: list[list[int]], recent: list[int], least: int, limit: int
) -> None:
    made = of(*texts)
    longest, counts = searched(texts, recent, least)
    continuations = found(made, *recent, least=least, limit=limit)
    if continuations is None:
        assert counts == {}
        return
    assert continuations.match_len == longest
    paths = paths_of(continuations)
    assert len(paths) == len(set(paths)) == min(limit, len(counts))
    numbers = [counts[path] for path in paths]
    assert numbers == sorted(counts.values(), reverse=True)[:limit], "the most frequent come first"
    for path, share in zip(paths, continuations.shares, strict=True):
        siblings = [one for one in counts if one[:-1] == path[:-1]]
        assert share == counts[path] / sum(counts[one] for one in siblings)


@given(texts=TEXTS, recent=RECENT, limit=st.integers(1, 10))
def test_a_chain_takes_what_came_most_often_at_every_step(
    texts: list[list[int]], recent: list[int], limit: int
) -> None:
    chain = found(of(*texts), *recent, limit=limit, is_tree=False)
    _, counts = searched(texts, recent, MIN_MATCH)
    if chain is None:
        assert counts == {}
        return
    assert chain.parents == tuple(range(-1, len(chain.tokens) - 1))
    for end in range(1, len(chain.tokens) + 1):
        path = chain.tokens[:end]
        rivals = [counts[one] for one in counts if one[:-1] == path[:-1]]
        assert counts[path] == max(rivals)
    goes_on = any(one[:-1] == chain.tokens for one in counts)
    assert len(chain.tokens) == limit or not goes_on


@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=200), max_size=8),
    recent=RECENT,
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_whatever_is_overwritten_what_is_found_was_said_and_the_newest_is_there(
    texts: list[list[int]], recent: list[int], cuts: list[int]
) -> None:
    made = EarlierTexts(SMALLEST)
    for text in texts:
        kept = NOTHING
        for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
            kept = made.add(text[:end], kept)
            made.check()
            assert kept.length == end >= start
    assert len(made) <= SMALLEST
    continuations = found(made, *recent)
    if continuations is not None:
        suffix = tuple(recent[len(recent) - continuations.match_len :])
        said = ["".join(map(str, text)) for text in texts]
        for path in paths_of(continuations):
            assert any("".join(map(str, (*suffix, *path))) in text for text in said)
    if texts and len(texts[-1]) > MIN_MATCH:
        last = texts[-1]
        assert following(made, *last[:-1]), "the end of the newest text is there"


# -- which match ----------------------------------------------------------------------------------


def test_the_longest_match_comes_first() -> None:
    made = of([9, 1, 2, 5], [8, 1, 2, 6], [7, 1, 2, 6, 6])
    assert following(made, 9, 1, 2) == (5,)
    assert following(made, 0, 1, 2) == (6, 6)


def test_fewer_tokens_than_are_asked_for_match_nothing() -> None:
    made = of([1, 2, 3, 4])
    assert following(made, 0, 2, 3) == (4,)
    assert found(made, 0, 2, 3, least=3) is None
    assert found(made, 1, 2, 3, least=3) is not None
    assert found(made, 0, 0, 3, least=1) is None, "one token is not enough"


def test_a_match_is_compared_up_to_its_greatest_length() -> None:
    line = list(range(MAX_MATCH + 5))
    continuations = found(of([*line, 99]), *line)
    assert continuations is not None
    assert continuations.match_len == MAX_MATCH


def test_only_the_newest_places_of_a_chain_count() -> None:
    older = [[100 + index, 1, 2, 7] for index in range(10)]
    newer = [[200 + index, 1, 2, 8] for index in range(MAX_PLACES)]
    continuations = found(of(*older, *newer), 1, 2)
    assert continuations is not None
    assert (continuations.tokens, continuations.shares) == ((8,), (1.0,))


def test_a_rare_long_match_is_found_among_many_short_ones() -> None:
    often = [[100 + index, 5, 1, 2, 7] for index in range(3 * MAX_PLACES)]
    assert following(of([4, 4, 5, 1, 2, 8], *often, num_tokens=1 << 14), 4, 4, 5, 1, 2) == (8,)


def test_where_places_differ_the_most_frequent_comes_first() -> None:
    made = of([0, 1, 2, 3, 4], [9, 1, 2, 3, 5], [8, 1, 2, 6])
    continuations = found(made, 1, 2)
    assert continuations is not None
    assert continuations.tokens == (3, 6, 5, 4)
    assert continuations.parents == (-1, -1, 0, 0)
    assert continuations.shares == (2 / 3, 1 / 3, 1 / 2, 1 / 2)
    assert following(made, 1, 2) == (3, 5), "of two that are as frequent the newer one"


def test_nothing_bridges_from_one_text_into_another() -> None:
    made = of([1, 2, 3], [4, 5, 6])
    assert following(made, 1, 2) == (3,)
    assert following(made, 2, 3) == ()
    assert following(made, 3, 4) == ()


def test_without_texts_nothing_is_found_and_no_memory_is_taken() -> None:
    made = EarlierTexts()
    assert found(made, 1, 2, 3) is None
    assert not made._tokens
    made.add([])
    assert not made._tokens


# -- what is kept ---------------------------------------------------------------------------------


def test_a_text_that_comes_again_is_kept_once() -> None:
    made = of([1, 2, 3, 4, 5])
    end = made._end
    assert made.add([1, 2, 3, 4, 5]).length == 5
    assert made._end == end


def test_what_texts_begin_with_alike_is_kept_once() -> None:
    turn = list(range(40))
    made = of(turn, [*turn, 50, 51], [*turn, 60])
    assert len(made) == 43
    assert following(made, 38, 39) == (60,)
    assert following(made, 38, 39, 50) == (51,)


@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_text_that_grows_is_kept_once_and_matches_go_over_its_pieces(cuts: list[int]) -> None:
    text = list(range(60))
    made, kept = EarlierTexts(1 << 10), NOTHING
    for cut in sorted(cuts):
        kept = made.add(text[:cut], kept)
    made.add(text, kept)
    made.check()
    assert len(made) == 60
    for end in range(2, 60):
        assert following(made, *text[:end], limit=1) == (text[end],)
    continuations = found(made, *text[:50])
    assert continuations is not None
    assert continuations.match_len == MAX_MATCH


def test_at_most_so_much_is_kept_at_once() -> None:
    made = EarlierTexts(1 << 10)
    text = list(range(100))
    kept = made.add(text, most=30)
    assert (kept.length, len(made)) == (30, 30)
    assert following(made, 28, 29) == ()
    kept = made.add(text, kept, most=30)
    assert (kept.length, len(made)) == (60, 60)
    assert following(made, 28, 29, limit=2) == (30, 31)


def test_the_oldest_is_overwritten() -> None:
    made = EarlierTexts(SMALLEST)
    for first in range(0, 2000, 10):
        made.add(range(first, first + 10))
        made.check()
        assert following(made, first, first + 1) == tuple(range(first + 2, first + 10))
    assert len(made) <= SMALLEST
    assert following(made, 0, 1) == ()
    assert len(made._tokens) == SMALLEST


def test_no_place_counts_twice_where_a_chain_leads_to_what_was_overwritten() -> None:
    made = EarlierTexts(SMALLEST)
    for index in range(100, 200):
        made.add([index, 1, 2, index])
        (level,) = (level for level in made._levels if level.length == 2)
        _, slots = made._longest(level, (1, 2), 2)
        assert len(set(slots)) == len(slots) == min(index - 99, SMALLEST // 5)


def test_a_text_that_is_partly_overwritten_can_be_kept_again() -> None:
    made = EarlierTexts(2 * SMALLEST)
    text = list(range(60))
    made.add(text)
    first = 100
    while following(made, 0, 1):
        made.add(range(first, first + 30))
        first += 30
    assert following(made, 50, 51, limit=1) == (52,), "its end is there"
    made.add(text)
    made.check()
    assert following(made, 0, 1, limit=1) == (2,)


def test_a_token_costs_the_same_however_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0
    num_alike_ = EarlierTexts._num_alike

    def counted(self: EarlierTexts, *args: object) -> int:
        nonlocal number
        number += 1
        return num_alike_(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EarlierTexts, "_num_alike", counted)
    made = of(*([index, 1, 2, 3] for index in range(10, 210)))
    assert found(made, 1, 2) is not None
    assert number == MAX_PLACES


def test_the_smallest_memory_holds_a_piece() -> None:
    assert EarlierTexts(SMALLEST)._piece_len + MAX_MATCH + 2 <= SMALLEST
    assert min(earlier.LEVELS) == MIN_MATCH
    assert max(earlier.LEVELS) <= MAX_MATCH
