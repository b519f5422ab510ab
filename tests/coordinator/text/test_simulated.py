"""What is told of hardware that is simulated: shares of a time, and nothing where none is known."""

import re

import pytest

from coordinator.text.metrics import Simulated, late_share

RUNNING = Simulated(30.0, 0.0, 2.0, 0.0, (), 0, 1000, 400, late_ms=5000.0)


def test_sums_since_the_start_are_no_share_of_any_time() -> None:
    assert RUNNING.verdict == ""
    assert not RUNNING.is_void
    assert "%" not in RUNNING.words


def test_only_what_came_after_the_first_reading_counts() -> None:
    later = Simulated(30.0, 0.0, 2.0, 0.0, (), 0, 1500, 410, late_ms=5020.0)
    assert later.since(RUNNING, 4000.0).verdict == (
        "10 of 500 forwards took longer than simulated, by 0.5% of the time"
    )


@pytest.mark.parametrize("elapsed_ms", [0.0, 1e-6, 0.5, 2500.0, 5000.0, 1e5])
def test_no_share_is_more_than_all_of_the_time(elapsed_ms: float) -> None:
    assert 0 <= late_share([(5000.0, elapsed_ms), (1.0, 10.0)]) <= 1
    told = RUNNING.since(Simulated(30, 0, 2, 0, (), 0), elapsed_ms).verdict
    shares = [float(share) for share in re.findall(r"([\d.]+)%", told)]
    assert all(share <= 100 for share in shares)
