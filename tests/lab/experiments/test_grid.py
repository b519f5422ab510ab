"""The order of cells: every one once, all arms of a prompt together, settings that were swept."""

from collections import Counter
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from lab.experiments.runner import ArmOnHost, fastest, order
from tests.lab.experiments.made import row

PLACES = [ArmOnHost("a", 1, 3), ArmOnHost("b", 1, 3), ArmOnHost("c", 2, 3)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_every_cell_comes_once(hosts: list[tuple[int, int]], repetitions: int, warm: int) -> None:
    places = [ArmOnHost(f"arm {i}", host, number) for i, (host, number) in enumerate(hosts)]
    keys = Counter(order(places, repetitions=repetitions, seed=1, num_warm=warm))
    assert set(keys.values()) == {1}
    assert len(keys) == repetitions * sum(place.num_prompts for place in places)


def test_a_prompt_is_given_to_all_arms_before_the_next_one_in_an_order_drawn_anew() -> None:
    keys = list(order(PLACES, repetitions=4, seed=1, num_warm=2))
    blocks = [[key.arm for key in block] for _, block in groupby(keys, lambda key: key[1:3])]
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1


def test_no_more_hosts_than_may_be_warm_take_their_turns_together() -> None:
    places = [ArmOnHost(str(host), host, 2) for host in range(5)]
    keys = list(order(places, repetitions=2, seed=1, num_warm=2))
    for first in range(0, 20, 10):
        turns = [keys[first : first + 4], keys[first + 4 : first + 8], keys[first + 8 : first + 10]]
        assert [len({key.arm for key in turn}) for turn in turns] == [2, 2, 1]
    assert [key.arm for key in keys[:10]] != [key.arm for key in keys[10:]]


def test_the_order_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    first, again, other = (
        list(order(PLACES, repetitions=3, seed=seed, num_warm=2)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_fastest_setting_is_that_of_the_larger_median_and_not_a_void_one() -> None:
    speeds = {"K=2": [10, 11, 90], "K=4": [20, 21, 22], "K=8": [99, 99, 99]}
    rows = [
        row(arm, prompt, stage="sweep", speed=speed, void="late" if arm == "K=8" else "")
        for arm, found in speeds.items()
        for prompt, speed in enumerate(found)
    ]
    assert fastest({"sync": list(speeds)}, rows) == {"sync": "K=4"}
