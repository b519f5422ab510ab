"""For how long a router waits for a forward pass of its target."""

from dataclasses import replace

import pytest

from coordinator.cluster.router_events import Arrived, End, Tick
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Heartbeat, SessionMark
from tests.coordinator.cluster.routers import TARGET, begun, router_of, text
from tests.texts import name


def beaten(num_rows: int, took_s: float, expected_s: float) -> Arrived:
    """A heartbeat of the target in the middle of a pass."""
    mark = SessionMark(1, 1, 2, name(1, 2), num_read=1)
    passing = replace(
        Heartbeat((mark,), 0, ""),
        pass_rows=num_rows,
        pass_us=round(took_s * 1e6),
        pass_expected_us=round(expected_s * 1e6),
    )
    return Arrived(TARGET, passing)


@pytest.mark.parametrize(
    ("expected_s", "limit_s"), [(0.0, 60.0), (0.1, 60.0), (9.0, 90.0), (1e9, 3600.0)]
)
def test_a_pass_is_waited_for_until_it_takes_ten_times_what_its_node_expects(
    expected_s: float, limit_s: float
) -> None:
    router = router_of()
    machine = begun(router, text()).machine
    now, told_at, why = 0.0, 0.0, ""
    while not machine.ended:
        now += HEARTBEAT_INTERVAL_S
        router.handle(beaten(128, now, expected_s), now)
        actions = router.handle(Tick(), now)
        if machine.counts.num_reopened and not told_at:
            told_at = now
        why = next((str(one.last) for one in actions if isinstance(one, End)), "")
    assert limit_s < told_at < limit_s + 5.0
    assert now < limit_s + 60.0, "it ends in bounded time"
    assert f"; its pass of 128 rows has not ended in {now:.0f} s" in why


def test_a_target_in_no_pass_is_told_its_texts_again() -> None:
    router = router_of()
    machine = begun(router, text()).machine
    for step in range(1, 12):
        router.handle(beaten(0, 0.0, 0.0), 0.25 * step)
        router.handle(Tick(), 0.25 * step)
    assert machine.counts.num_reopened == 1
