"""How often drafts are right: numbers, traces, and models that keep to them."""

import math
from collections import Counter

import pytest

from proto.errors import ConfigurationError
from proto.policies import POLICIES
from rehearsal.acceptance import (
    LOWEST,
    Position,
    chances,
    cut,
    drawn,
    read,
    shares,
    written,
)
from rehearsal.planning import NUM_AT_END, NUM_TO_SETTLE, rehearse
from rehearsal.setting import Forwards, NodeCosts

TARGET, DRAFTER = NodeCosts(Forwards(((1, 0.01),))), NodeCosts(Forwards(((1, 0.001),)))


def test_after_a_single_chance_each_next_rank_has_its_share_of_what_is_left() -> None:
    assert chances("0.75")[:3] == pytest.approx((0.75, 0.1, 0.0375))
    assert chances("0.5, 0.25") == (0.5, 0.25)


@pytest.mark.parametrize("text", ["", "a", "1.1", "-0.1", "0.7,0.4", "0.5;0.2"])
def test_what_are_no_chances_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--acceptance: expected chances like 0\.75"):
        chances(text)


@pytest.mark.parametrize("given", ["0.75", "0.6,0.2,0.1", "0", "1"])
def test_each_rank_comes_as_often_as_its_share_says(given: str) -> None:
    wanted = chances(given)
    found = shares(drawn(wanted, 2, 1000))
    assert found[: len(wanted)] == pytest.approx(wanted, abs=0.01)


def test_runs_of_right_drafts_are_as_long_as_if_each_were_drawn() -> None:
    ranks = [position.rank for position in drawn(chances("0.8"), 1, 5000)[0]]
    runs = Counter(
        len(run) for run in "".join("+" if rank == 0 else "-" for rank in ranks).split("-")
    )
    number = runs.total()
    for length in range(6):
        longer = sum(count for run, count in runs.items() if run >= length)
        assert longer / number == pytest.approx(0.8**length, abs=0.01)


def test_where_nothing_is_known_the_scores_are_the_shares_of_the_ranks() -> None:
    (text,) = drawn((0.5, 0.0, 0.25), 1, 8)
    assert text[0].scores == (math.log(0.5), LOWEST, math.log(0.25))
    (recorded,) = read(['{"ranks": [0, 1, null, 0]}'])
    assert recorded[2] == Position(None, (math.log(0.5), math.log(0.25), *[LOWEST] * 6))


def test_a_trace_is_read_as_it_was_written() -> None:
    text = (Position(0, (-0.25, -2.5)), Position(None, (-1.0, -1.5)), Position(1, (-0.5, -1.25)))
    assert read([written(text), written(text[:1])]) == (text, text[:1])


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "{}", '{"ranks": 3}', '{"ranks": ["a"]}', '{"ranks": [-1]}'),
        *('{"ranks": [0], "scores": []}', '{"ranks": [0, 1], "scores": [[0.0]]}'),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--trace: (line 2 is no text|there is no text)"):
        read(['{"ranks": []}', line])


def test_texts_of_a_wanted_length_are_of_pieces_from_all_over_a_trace() -> None:
    a, b = (tuple(Position(rank, (-float(i),)) for i in range(9)) for rank in (0, 1))
    assert cut((a, b), 1, 4) == ((*a[:2], *b[7:]),)
    assert cut((a, b), 2, 4) == (a[:4], b[5:])
    assert cut((a[:3],), 1, 9) == (a[:3],)


def test_a_rehearsed_text_has_the_ranks_of_its_trace() -> None:
    # Right but for every fifth token: a pass of four drafts and one more makes just five.
    text = tuple(Position(1 if i % 5 == 4 else 0, (-0.2, -2.0)) for i in range(25 * 5))
    figures = rehearse(POLICIES["sync"].make(4, 4), TARGET, DRAFTER, (text,))
    assert figures.tokens_per_pass == 5.0
    assert figures.num_tokens == 5 * -(-(len(text) - NUM_TO_SETTLE - NUM_AT_END) // 5)
    assert figures.num_drafted == figures.num_accepted == 4 * figures.num_passes
