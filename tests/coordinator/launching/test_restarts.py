"""When a node that has ended is started again."""

import pytest

from coordinator.launching.restarts import BACK_OFF_S, RARELY_S, STEADY_S, Restarts
from proto.messages import Role
from proto.node_config import NodeConfig


def node(role: Role = Role.DRAFTER) -> NodeConfig:
    """One of this role."""
    return NodeConfig(role, "ipc:///x", f"{role}-1", secret="", model="m")


def of(most: int) -> Restarts:
    """After the first start."""
    restarts = Restarts(dict.fromkeys(Role, most))
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
) -> bool:
    """A process has ended; whether it was the last of its place."""
    return restarts.ended(identity, now, worked_s=worked_s, is_unusable=is_unusable)


def started(restarts: Restarts, now: float) -> list[tuple[str, str]]:
    """What is started now: identities, and what is said of it."""
    return [(one.config.identity, one.words) for one in restarts.due(now)]


AGAIN = "the drafter is started again"
RARELY = f"{AGAIN}, from now on every 2 minutes"


def test_each_start_in_a_row_is_later_and_after_the_last_they_are_rare_but_never_end() -> None:
    restarts, now = of(3), 5.0
    ended(restarts, "drafter-1", now)
    for number in (1, 2, 3):
        pause = BACK_OFF_S * 2 ** (number - 1)
        assert started(restarts, now + 0.9 * pause) == []
        now += pause
        assert started(restarts, now) == [(f"drafter-1.{number}", AGAIN)]
        assert started(restarts, now) == [], "once"
        ended(restarts, f"drafter-1.{number}", now)
    for number in range(4, 40):
        assert started(restarts, now + 0.9 * RARELY_S) == []
        now += RARELY_S
        words = RARELY if number == 4 else ""  # once
        assert started(restarts, now) == [(f"drafter-1.{number}", words)]
        ended(restarts, f"drafter-1.{number}", now, worked_s=None)


def test_what_is_tried_rarely_is_tried_at_once_when_there_is_a_place_for_it() -> None:
    restarts = of(1)
    ended(restarts, "drafter-1", 0.0)
    restarts.hurry(0.0)
    assert started(restarts, 0.0) == [("drafter-1.1", AGAIN)]
    restarts.hurry(1.0)
    assert started(restarts, 1.0) == [], "it is there"
    ended(restarts, "drafter-1.1", 2.0)
    assert started(restarts, 3.0) == []
    restarts.hurry(4.0)
    assert started(restarts, 4.0) == [("drafter-1.2", RARELY)]


def test_the_end_of_one_is_counted_once_and_that_of_its_forerunner_not_at_all() -> None:
    restarts = of(3)
    for now in (0.0, 0.5):
        ended(restarts, "drafter-1", now)
    assert started(restarts, BACK_OFF_S) == [("drafter-1.1", AGAIN)]
    ended(restarts, "drafter-1", 2.0)
    assert started(restarts, 1e6) == []


def test_one_that_has_worked_for_long_may_fail_as_often_as_a_new_one() -> None:
    restarts = of(1)
    ended(restarts, "drafter-1", 0.0)
    assert started(restarts, BACK_OFF_S) == [("drafter-1.1", AGAIN)]
    ended(restarts, "drafter-1.1", 100.0, worked_s=STEADY_S)
    assert started(restarts, 1e6) == [("drafter-1.2", AGAIN)]
    # To have loaded for long is not to have worked for long.
    ended(restarts, "drafter-1.2", 2e6, worked_s=STEADY_S / 2)
    assert started(restarts, 2e6 + 0.9 * RARELY_S) == []


def test_one_that_works_again_after_long_is_told_of_as_a_new_one() -> None:
    restarts = of(1)
    ended(restarts, "drafter-1", 0.0)
    assert started(restarts, BACK_OFF_S) == [("drafter-1.1", AGAIN)]
    ended(restarts, "drafter-1.1", 10.0)
    assert started(restarts, 10.0 + RARELY_S) == [("drafter-1.2", RARELY)]
    ended(restarts, "drafter-1.2", 1000.0, worked_s=STEADY_S)
    assert started(restarts, 1000.0 + BACK_OFF_S) == [("drafter-1.3", AGAIN)]
    ended(restarts, "drafter-1.3", 1010.0)
    assert started(restarts, 1010.0 + RARELY_S) == [("drafter-1.4", RARELY)]


def test_one_that_never_worked_is_not_started_again_and_one_that_cannot_now_rarely() -> None:
    restarts = of(3)
    ended(restarts, "drafter-1", 0.0, worked_s=None)
    assert started(restarts, 1e6) == []
    restarts = of(3)
    ended(restarts, "drafter-1", 0.0)
    assert started(restarts, 10.0) == [("drafter-1.1", AGAIN)]
    ended(restarts, "drafter-1.1", 11.0, worked_s=None)  # it has in its forerunner's life
    assert started(restarts, 20.0) == [("drafter-1.2", AGAIN)]
    ended(restarts, "drafter-1.2", 21.0, worked_s=None, is_unusable=True)  # its folder is gone
    assert started(restarts, 21.0 + 0.9 * RARELY_S) == []
    assert started(restarts, 21.0 + RARELY_S) == [("drafter-1.3", RARELY)]


@pytest.mark.parametrize("identity", ["target-1", "drafter-1"])
def test_nothing_is_started_again_where_it_is_not_wanted(identity: str) -> None:
    restarts = of(0)
    assert ended(restarts, identity, 0.0), "it was the last one"
    assert started(restarts, 1e6) == []


def test_a_target_is_started_again_some_times_in_a_row_and_then_no_more() -> None:
    restarts, now, identity = of(2), 0.0, "target-1"
    for number in (1, 2):
        assert not ended(restarts, identity, now)
        now += BACK_OFF_S * 2 ** (number - 1)
        identity = f"target-1.{number}"
        assert started(restarts, now) == [(identity, "the target is started again")]
    assert ended(restarts, identity, now), "nobody is to wait for one that will not come"
    assert started(restarts, 1e6) == []


def test_a_target_that_has_worked_for_long_has_all_restarts_again() -> None:
    restarts = of(1)
    assert not ended(restarts, "target-1", 0.0)
    assert len(started(restarts, 10.0)) == 1
    assert not ended(restarts, "target-1.1", 200.0, worked_s=STEADY_S)
    assert len(started(restarts, 300.0)) == 1
    assert ended(restarts, "target-1.2", 310.0, worked_s=1.0)


@pytest.mark.parametrize(("worked_s", "is_unusable"), [(None, False), (5.0, True)])
def test_a_target_that_cannot_work_is_not_started_again(
    worked_s: float | None,
    is_unusable: bool,  # noqa: FBT001
) -> None:
    assert ended(of(3), "target-1", 0.0, worked_s=worked_s, is_unusable=is_unusable)


def test_the_end_of_a_process_that_nobody_started_here_is_the_last_of_nothing() -> None:
    assert not ended(of(3), "target-7", 0.0)
