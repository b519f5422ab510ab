"""A link that is slow, unsteady or lossy, in virtual time."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.link import MAX_IN_FLIGHT, Direction, Link, Links, parse_links
from proto.errors import ConfigurationError
from proto.messages import Role

links = st.builds(
    lambda delay_s, share, loss, reorder: Link(delay_s, share * delay_s, loss, reorder),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.5),
    st.booleans(),
)
gaps = st.lists(st.floats(0.0, 0.1), min_size=1, max_size=60)
EPSILON = 1e-9


def arrivals(link: Link, gaps_s: list[float], seed: int) -> list[tuple[float, int]]:
    """When each message arrives, in the order of arrival, if one is sent after each gap."""
    direction: Direction[int] = Direction(link, Random(seed).random)
    now, found = 0.0, []
    for number, gap_s in enumerate(gaps_s):
        now += gap_s
        assert direction.put(number, now, may_be_lost=True)
    while (next_s := direction.next_s) < float("inf"):
        assert direction.take(next_s - EPSILON) == []
        arrived = direction.take(next_s)
        assert arrived
        found += [(next_s, number) for number in arrived]
    return found


@given(links, gaps, st.integers(0, 1000))
def test_what_arrives_comes_once_in_its_time_and_in_order_unless_it_may_overtake(
    link: Link, gaps_s: list[float], seed: int
) -> None:
    found = arrivals(link, gaps_s, seed)
    numbers = [number for _, number in found]
    assert len(set(numbers)) == len(numbers)
    assert link.loss > 0 or len(numbers) == len(gaps_s)
    if not link.reorder:
        assert numbers == sorted(numbers)
    now, sent = 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        sent.append(now)
    for arrival, number in found:
        late_s = arrival - sent[number] - link.delay_s
        assert abs(late_s) <= link.jitter_s + EPSILON or not link.reorder
        assert late_s >= -link.jitter_s - EPSILON
        # It may have to wait for one that was sent before it, but for nothing else.
        latest = max(sent[: number + 1]) + link.delay_s + link.jitter_s
        assert arrival <= latest + EPSILON


@given(links, gaps, st.integers(0, 1000))
def test_the_same_seed_is_the_same_link(link: Link, gaps_s: list[float], seed: int) -> None:
    assert arrivals(link, gaps_s, seed) == arrivals(link, gaps_s, seed)


def test_about_as_many_are_lost_as_was_asked_for_and_never_what_may_not_be() -> None:
    direction: Direction[int] = Direction(Link(loss=0.1), Random(3).random)
    for number in range(4000):
        assert direction.put(number, 0.0, may_be_lost=number % 2 == 0)
    arrived = direction.take(0.0)
    assert [number for number in arrived if number % 2] == list(range(1, 4000, 2))
    assert 1740 < sum(number % 2 == 0 for number in arrived) < 1860


def test_messages_overtake_each_other_only_where_that_is_asked_for() -> None:
    for reorder in (False, True):
        link = Link(0.01, 0.01, reorder=reorder)
        numbers = [number for _, number in arrivals(link, [0.001] * 50, 1)]
        assert (numbers == sorted(numbers)) != reorder


def test_only_so_many_are_on_their_way() -> None:
    direction: Direction[int] = Direction(Link(1.0), Random(0).random)
    taken = [direction.put(number, 0.0, may_be_lost=False) for number in range(MAX_IN_FLIGHT + 1)]
    assert taken == [True] * MAX_IN_FLIGHT + [False]
    assert len(direction.take(1.0)) == MAX_IN_FLIGHT
    assert direction.put(0, 1.0, may_be_lost=False)


def test_a_link_is_written_in_the_units_of_its_user() -> None:
    found = parse_links(("drafter:delay=5ms,jitter=300us,loss=1%", "target:delay=0.25s,reorder"))
    drafter = Link(pytest.approx(0.005), pytest.approx(0.0003), pytest.approx(0.01))
    target = Link(0.25, reorder=True)
    assert found == {Role.DRAFTER: Links(drafter, drafter), Role.TARGET: Links(target, target)}
    one_way = parse_links(("to-target:loss=0.5,bandwidth=8Mbit", "from-drafter:delay=1s"))
    assert one_way == {
        Role.TARGET: Links(Link(loss=0.5, bytes_per_s=1e6), Link()),
        Role.DRAFTER: Links(Link(), Link(1.0)),
    }
    assert one_way[Role.DRAFTER].hop_s == 0.5
    assert parse_links(()) == {}


def test_a_message_leaves_when_those_before_it_have() -> None:
    direction: Direction[str] = Direction(Link(0.5, bytes_per_s=1000.0), Random(0).random)
    for name, now, num_bytes in (("a", 0.0, 100), ("b", 0.0, 200), ("c", 0.25, 100), ("d", 9.0, 0)):
        assert direction.put(name, now, may_be_lost=True, num_bytes=num_bytes)
    found = []
    while (next_s := direction.next_s) < float("inf"):
        found += [(pytest.approx(next_s), name) for name in direction.take(next_s)]
    assert found == [(0.6, "a"), (0.8, "b"), (0.9, "c"), (9.5, "d")]


def test_what_is_lost_has_taken_its_time_to_leave() -> None:
    direction: Direction[int] = Direction(Link(loss=0.5, bytes_per_s=100.0), Random(0).random)
    for number in range(40):
        assert direction.put(number, 0.0, may_be_lost=True, num_bytes=100)
    assert 0 < len(direction.take(20.0)) < 20
    assert all(number >= 20 for number in direction.take(40.0))


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("delay=5ms",), "expected drafter or target, or one direction .*, a colon"),
        (("coordinator:delay=5ms",), "expected drafter or target"),
        (("drafter:",), "some of delay=5ms"),
        (("drafter:speed=5ms",), "some of delay=5ms"),
        (("drafter:delay=5ms,delay=6ms",), "some of delay=5ms"),
        (("drafter:delay=5",), "a time is written as 300us, 5ms or 0.5s"),
        (("drafter:delay=-5ms",), "a time is written as"),
        (("drafter:delay=2s",), "up to 1 s"),
        (("drafter:loss=60%",), "loss is written as 1% or 0.01, up to 50%"),
        (("drafter:loss=x",), "loss is written as"),
        (("drafter:delay=1ms,jitter=2ms",), "the jitter is longer than the delay"),
        (("drafter:delay=1ms,reorder=no",), "reorder has no value"),
        (("drafter:bandwidth=10",), "a bandwidth is written as 64kbit"),
        (("drafter:bandwidth=1kbit",), "at least 64kbit"),
        (("via-drafter:delay=1ms",), "one direction of it as in to-drafter"),
        (("drafter:delay=1ms", "to-drafter:loss=1%"), "given twice"),
        (("drafter:delay=1ms", "drafter:loss=1%"), "given twice"),
    ],
)
def test_what_is_no_link_is_refused_in_a_line(texts: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        parse_links(texts)
    assert "\n" not in str(caught.value)
