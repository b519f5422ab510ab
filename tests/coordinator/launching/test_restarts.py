"""When a drafter that has ended is started again."""

import pytest

from coordinator.launching.restarts import BACK_OFF_S, STEADY_S, Restarts
from proto.messages import Role
from proto.node_config import NodeConfig


def node(role: Role = Role.DRAFTER) -> NodeConfig:
    """One of this role."""
    return NodeConfig(role, "ipc:///x", f"{role}-1", secret="", model="m")


def of(most: int) -> Restarts:
    """After the first start."""
    restarts = Restarts(most)
    for role in Role:
        restarts.started(node(role))
    return restarts


def ended(
    restarts: Restarts,
    identity: str,
    now: float,
    *,
    worked_s: float | None = 5.0,
    is_unusable: bool = False,
) -> None:
    """A process has ended."""
    restarts.ended(identity, now, worked_s=worked_s, is_unusable=is_unusable)


def started(restarts: Restarts, now: float) -> list[tuple[str, bool]]:
    """What is started now: identities, and whether it is the last time."""
    return [(one.config.identity, one.is_last) for one in restarts.due(now)]


def test_each_start_in_a_row_is_later_and_their_number_is_bounded() -> None:
    restarts, now = of(3), 5.0
    ended(restarts, "drafter-1", now)
    for number in (1, 2, 3):
        pause = BACK_OFF_S * 2 ** (number - 1)
        assert started(restarts, now + 0.9 * pause) == []
        now += pause
        assert started(restarts, now) == [(f"drafter-1.{number}", number == 3)]
        assert started(restarts, now) == [], "once"
        ended(restarts, f"drafter-1.{number}", now)
    assert started(restarts, now + 1e6) == []


def test_the_end_of_one_is_counted_once_and_that_of_its_forerunner_not_at_all() -> None:
    restarts = of(3)
    for now in (0.0, 0.5):
        ended(restarts, "drafter-1", now)
    assert started(restarts, BACK_OFF_S) == [("drafter-1.1", False)]
    ended(restarts, "drafter-1", 2.0)
    assert started(restarts, 1e6) == []


def test_one_that_has_worked_for_long_may_fail_as_often_as_a_new_one() -> None:
    restarts = of(1)
    ended(restarts, "drafter-1", 0.0)
    assert started(restarts, BACK_OFF_S) == [("drafter-1.1", True)]
    ended(restarts, "drafter-1.1", 100.0, worked_s=STEADY_S)
    assert started(restarts, 1e6) == [("drafter-1.2", True)]
    # To have loaded for long is not to have worked for long.
    ended(restarts, "drafter-1.2", 2e6, worked_s=STEADY_S / 2)
    assert started(restarts, 1e9) == []


def test_one_that_never_worked_or_cannot_work_is_not_started_again() -> None:
    restarts = of(3)
    ended(restarts, "drafter-1", 0.0, worked_s=None)
    assert started(restarts, 1e6) == []
    restarts = of(3)
    ended(restarts, "drafter-1", 0.0)
    assert started(restarts, 10.0) == [("drafter-1.1", False)]
    ended(restarts, "drafter-1.1", 11.0, worked_s=None)  # it has in its forerunner's life
    assert started(restarts, 20.0) == [("drafter-1.2", False)]
    ended(restarts, "drafter-1.2", 21.0, worked_s=None, is_unusable=True)
    assert started(restarts, 1e6) == []


@pytest.mark.parametrize(("most", "identity"), [(3, "target-1"), (0, "drafter-1")])
def test_a_target_is_not_started_again_and_nothing_where_it_is_not_wanted(
    most: int, identity: str
) -> None:
    restarts = of(most)
    ended(restarts, identity, 0.0)
    assert started(restarts, 1e6) == []
