"""Every head, column and word belongs to one rank."""

from hypothesis import given
from hypothesis import strategies as st

from engine.tensor_parallel.layout import UNIT, scaled, shares


@given(st.integers(1, 64), st.integers(0, 5000), st.sampled_from([1, UNIT]))
def test_the_runs_of_the_ranks_follow_each_other_and_none_is_empty(
    num_ranks: int, more: int, unit: int
) -> None:
    runs = shares(num_ranks + more, num_ranks, unit)
    assert [one for run in runs for one in run] == list(range(num_ranks + more))
    assert len(runs) == num_ranks
    assert all(runs)


@given(st.integers(1, 16), st.integers(0, 300))
def test_runs_are_whole_units_where_there_are_enough(num_ranks: int, more: int) -> None:
    runs = shares(UNIT * (num_ranks + more), num_ranks, UNIT)
    sizes = {len(run) for run in runs}
    assert all(size % UNIT == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= UNIT


def test_the_first_ranks_have_what_does_not_divide() -> None:
    assert shares(3, 2) == (range(2), range(2, 3))
    assert scaled(range(2, 3), 64) == range(128, 192)
