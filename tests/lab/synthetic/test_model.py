"""A synthetic model: who is right how often, and that a cache decides what a row follows."""

from collections import Counter

import pytest

from engine.choice.sampling import Sampling
from engine.layout.slots import Feed, Move
from lab.synthetic.executor import SyntheticExecutor
from lab.synthetic.model import (
    GREEDY,
    SAMPLED,
    START,
    after,
    choose,
    path_of,
    rank_scored,
    text_after,
)

DRAWN = Sampling(0.8)


@pytest.mark.parametrize(("sampling", "chances"), [(Sampling(), GREEDY), (DRAWN, SAMPLED)])
def test_the_target_s_token_has_each_rank_as_often_as_said(
    sampling: Sampling, chances: tuple[float, ...]
) -> None:
    paths = [path_of((number,)) for number in range(4000)]
    positions = [1] * len(paths)
    right = choose(paths, sampling, 5, 0, positions)
    ranked, scores = rank_scored(paths, sampling, 5, 0, positions, 4)
    assert all(len(set(tokens)) == 4 for tokens in ranked)
    ranks = Counter(
        tokens.index(token) for tokens, token in zip(ranked, right, strict=True) if token in tokens
    )
    for rank, chance in enumerate(chances):
        assert ranks[rank] / len(paths) == pytest.approx(chance, abs=0.03)
    assert scores[0] == sorted(scores[0], reverse=True)


def test_fewer_ranks_are_the_first_of_more() -> None:
    paths = [path_of((number,)) for number in range(50)]
    every, _ = rank_scored(paths, Sampling(), 0, 0, [1] * 50, 4)
    first, _ = rank_scored(paths, Sampling(), 0, 0, [1] * 50, 1)
    assert [tokens[:1] for tokens in every] == first


def test_a_seed_and_a_sample_decide_what_is_drawn_and_nothing_greedy() -> None:
    def made(sampling: Sampling, seed: int, sample: int) -> tuple[int, ...]:
        return text_after((1, 2), 20, sampling, seed, sample)

    assert made(Sampling(), 1, 0) == made(Sampling(), 2, 1)
    assert made(DRAWN, 1, 0) == made(DRAWN, 1, 0)
    assert len({made(DRAWN, 1, 0), made(DRAWN, 2, 0), made(DRAWN, 1, 1)}) == 3


def test_a_row_follows_what_lies_in_the_slot_before_it() -> None:
    executor = SyntheticExecutor(16, 2, launch_s=0.0)
    prompt = Feed((7, 8, 9), (0, 1, 2), (0, 1, 2), 0, None)
    tree = Feed((4, 5, 6), (3, 3, 4), (3, 4, 5), 3, (1, 2, 6), before=(2, 2, 4))
    assert executor.lay_out((prompt,), (range(2, 3),)) == [path_of((7, 8, 9))]
    assert executor.lay_out((tree,), (range(3),)) == [
        path_of((7, 8, 9, 4)),
        path_of((7, 8, 9, 5)),
        path_of((7, 8, 9, 5, 6)),
    ]
    executor.move(Move((4, 5), (3, 4)))
    executor.copy_prefix(0, 1, 5)
    following = Feed((1,), (5,), (5,), 5, (1,), lane=1)
    executor.wipe(0, 0)
    assert executor.lay_out((following,), ((0,),)) == [path_of((7, 8, 9, 5, 6, 1))]
    assert executor.lay_out((Feed((1,), (5,), (5,), 5, (1,)),), ((0,),)) == [after(START, 1)]
