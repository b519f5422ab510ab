"""What is left of an answer's way when the time that it lay there is taken off."""

from coordinator.cluster.round_trips import NUM_LATEST, RoundTrips


def answered(trips: RoundTrips, sent_s: float, way_s: float, held_s: float = 0.1) -> bool:
    """A heartbeat of that time comes back."""
    return trips.add(round(sent_s * 1e6), round(held_s * 1e6), sent_s + way_s + held_s)


def test_it_is_the_least_of_the_latest() -> None:
    trips = RoundTrips()
    assert trips.now_s is None
    for number, way_s in enumerate((0.030, 0.002, 0.013), 1):
        assert not answered(trips, number, way_s)
    assert trips.now_s is not None
    assert abs(trips.now_s - 0.002) < 1e-6
    for number in range(10, 10 + NUM_LATEST):
        answered(trips, number, 0.004)
    assert abs(trips.now_s - 0.004) < 1e-6
    assert trips.words == "4.0 ms, at the start 2.0"


def test_an_answer_that_is_said_again_counts_once() -> None:
    trips = RoundTrips()
    assert not answered(trips, 1.0, 0.002)
    for late_s in (1.0, 2.0):  # the same stamp: nothing has come there since
        trips.add(1_000_000, round(late_s * 1e6), 1.0 + late_s)
    assert trips.add(0, 0, 5.0) is False  # a node that has heard nothing
    assert trips.now_s is not None
    assert abs(trips.now_s - 0.002) < 1e-6


def test_a_link_that_gets_slower_is_told_once_until_it_was_fast_again() -> None:
    trips = RoundTrips()
    told = [answered(trips, number, 0.002) for number in range(1, 30)]
    told += [answered(trips, number, 0.025) for number in range(30, 80)]
    assert sum(told) == 1
    assert told.index(True) == 28 + NUM_LATEST
    told = [answered(trips, number, 0.002) for number in range(80, 100)]
    told += [answered(trips, number, 0.025) for number in range(100, 150)]
    assert sum(told) == 1


def test_an_answer_that_waited_for_a_forward_tells_nothing() -> None:
    trips = RoundTrips()
    ways = [0.002 if number % 8 == 0 else 0.150 for number in range(100)]
    assert not any(answered(trips, number, way) for number, way in enumerate(ways, 1))
