"""Clocks that are told by messages there and back are right within the error that is stated."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.tracing.timeline import SAME, Clock, Exchange, clock_of
from proto.messages import Heartbeat

S, MS = 1_000_000_000, 1_000_000
AHEAD = st.integers(-(1 << 50), 1 << 50)
WAYS = st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS), st.integers(0, S // 4))


def exchange(sent_ns: int, ahead_ns: int, ways: tuple[int, int, int]) -> Exchange:
    """A heartbeat there, which is held for a while, and one back."""
    there_ns, back_ns, held_ns = ways
    heard_ns = sent_ns + there_ns + ahead_ns
    came_ns = sent_ns + there_ns + held_ns + back_ns
    return Exchange(sent_ns, heard_ns, heard_ns + held_ns, came_ns)


@given(AHEAD, st.lists(WAYS, min_size=1, max_size=60), st.integers(0, 100 * S))
def test_the_truth_lies_within_the_error_bar(
    ahead_ns: int, ways: list[tuple[int, int, int]], ns: int
) -> None:
    exchanges = [exchange((n + 1) * S // 4, ahead_ns, way) for n, way in enumerate(ways)]
    clock = clock_of(exchanges, same_host=False)
    assert clock is not None
    assert abs(clock.ours(ns + ahead_ns) - ns) <= clock.error_ns
    assert abs(clock.ahead_ns - ahead_ns) <= clock.error_ns
    assert clock.error_ns <= max(one.error_ns for one in exchanges)
    assert clock.num_exchanges == len(exchanges)


@given(AHEAD, st.lists(WAYS, min_size=1, max_size=39))
def test_the_least_round_trip_decides(ahead_ns: int, ways: list[tuple[int, int, int]]) -> None:
    exchanges = [exchange((n + 1) * S // 8, ahead_ns, way) for n, way in enumerate(ways)]
    at_once = exchange(6 * S, ahead_ns, (0, 0, 0))
    clock = clock_of([*exchanges, at_once], same_host=False)
    assert clock is not None
    assert clock.error_ns >= at_once.error_ns
    if len(clock.knots) == 1:
        assert clock.ahead_ns == ahead_ns


@given(st.integers(-(1 << 40), 1 << 40), st.integers(-100, 100))
def test_a_clock_that_drifts_is_followed(ahead_ns: int, ppm: int) -> None:
    """100 ppm are 6 ms a minute, more than a round trip here."""
    ways = (MS, MS, S // 10)
    exchanges = []
    for n in range(400):
        sent_ns = n * S // 4
        exchanges.append(exchange(sent_ns, ahead_ns + sent_ns * ppm // 1_000_000, ways))
    clock = clock_of(exchanges, same_host=False)
    assert clock is not None
    for at_ns in range(5 * S, 95 * S, 3 * S):
        theirs_ns = at_ns + ahead_ns + at_ns * ppm // 1_000_000
        # Between two exchanges ten seconds apart a steady drift is followed exactly.
        assert abs(clock.ours(theirs_ns) - at_ns) <= clock.error_ns + 2 * MS // 1000


@given(AHEAD, st.integers(-50, 50))
def test_times_never_go_backwards(ahead_ns: int, ppm: int) -> None:
    exchanges = [
        exchange(n * S, ahead_ns + n * S * ppm // 1_000_000, (n % 7 * MS, n % 5 * MS, 0))
        for n in range(60)
    ]
    clock = clock_of(exchanges, same_host=False)
    assert clock is not None
    times = [clock.ours(ahead_ns + n * S // 10) for n in range(700)]
    assert times == sorted(times)


def test_processes_of_one_host_share_its_clock() -> None:
    assert clock_of([], same_host=True) is SAME
    assert clock_of([exchange(S, 0, (MS, 3 * MS, 0))], same_host=True) is SAME
    assert SAME.ours(12345) == 12345
    assert SAME.is_same


def test_a_host_of_the_same_name_has_its_own_clock() -> None:
    clock = clock_of([exchange(S, 5 * S, (MS, MS, 0))], same_host=True)
    assert clock is not None
    assert not clock.is_same
    assert clock.ahead_ns == 5 * S


def test_of_a_node_that_never_answered_nothing_is_known() -> None:
    assert clock_of([], same_host=False) is None
    # What would have come before it was sent is no answer.
    assert clock_of([Exchange(2 * S, S, S, S)], same_host=False) is None


def test_a_heartbeat_tells_the_four_times_of_an_exchange() -> None:
    beat = Heartbeat((), 1, "", stamp_us=1_000_000, held_us=250_000, clock_us=7_300_000)
    assert Exchange.of(1_260_000_000, beat) == Exchange(
        S, 7_050_000_000, 7_300_000_000, 1_260_000_000
    )


@given(AHEAD, st.lists(WAYS, min_size=1, max_size=9), st.lists(WAYS, min_size=1, max_size=9))
def test_with_messages_the_truth_lies_within_a_smaller_error_bar(
    ahead_ns: int, ways: list[tuple[int, int, int]], messages: list[tuple[int, int, int]]
) -> None:
    exchanges = [exchange((n + 1) * S // 4, ahead_ns, way) for n, way in enumerate(ways)]
    clock = clock_of(exchanges, same_host=False)
    assert clock is not None
    error_ns = ahead_ns - clock.ahead_ns  # by this much more it is ahead
    most_ns = min(there_ns for there_ns, _, _ in messages) + error_ns
    least_ns = max(-back_ns for _, back_ns, _ in messages) + error_ns
    nearer = clock.nearer(least_ns, most_ns)
    assert abs(nearer.ahead_ns - ahead_ns) <= nearer.error_ns <= clock.error_ns


def test_what_cannot_be_and_what_is_known_changes_no_clock() -> None:
    clock = clock_of([exchange(S, 5 * S, (MS, MS, 0))], same_host=False)
    assert clock is not None
    assert clock.nearer(1, 0) is clock
    assert clock.nearer(-2 * MS, 2 * MS) is clock
    assert SAME.nearer(5, 7) is SAME


def test_estimates_that_differ_are_not_made_nearer_than_they_differ() -> None:
    """All are moved alike, so one of them may still be as wrong as it was."""
    apart = Clock(((0, -150_000), (9_000, 50_000)), error_ns=300_000, num_exchanges=2)
    moved = apart.nearer(-10_000, 10_000)
    assert moved.knots == apart.knots
    assert moved.error_ns >= 150_000
    alike = Clock(((0, 40_000), (9_000, 40_000)), error_ns=300_000, num_exchanges=2)
    assert alike.nearer(-10_000, 10_000).error_ns < 20_000
