"""What becomes of a target that was started here and fails, and what its end means."""

from coordinator.cluster.registry import LEAVING_LIMIT_S, LOADING_LIMIT_S
from coordinator.cluster.router_events import Abort, Arrived, Kill, NodeEnded, Tick, Warn
from coordinator.cluster.routing import Router
from proto.liveness import SILENCE_LIMIT_S
from proto.messages import Fault, FaultCode, Role
from tests.coordinator.cluster.routers import FIRST, TARGET, begun, router_of, text

AGAIN = b"target-1.1"


def failed(router: Router) -> None:
    """The target says that it has failed."""
    fault = Fault(0, 0, FaultCode.FAILED, "its device is late")
    (warn,) = [one for one in router.handle(Arrived(TARGET, fault), 0.0) if isinstance(one, Warn)]
    assert warn == Warn("the target failed: its device is late; waiting for another")


def kills(router: Router, now: float) -> list[Kill]:
    return [one for one in router.handle(Tick(), now) if isinstance(one, Kill)]


def test_a_process_that_does_not_end_after_its_fault_is_killed_once() -> None:
    router = router_of(FIRST, awaits_target=True)
    begun(router, text())
    failed(router)
    assert kills(router, 0.9 * LEAVING_LIMIT_S) == []
    assert kills(router, LEAVING_LIMIT_S + 0.1) == [Kill(TARGET)]
    assert kills(router, LEAVING_LIMIT_S + 0.2) == []


def test_a_process_that_has_ended_after_its_fault_is_not_killed() -> None:
    router = router_of(FIRST, awaits_target=True)
    failed(router)
    assert router.handle(NodeEnded(TARGET, "it exited"), 0.1) == []
    assert kills(router, 100.0) == []


def test_the_last_process_ends_everything_with_what_the_target_has_said_of_itself() -> None:
    router = router_of(FIRST, awaits_target=True)
    failed(router)
    (abort,) = router.handle(NodeEnded(TARGET, "it exited", is_last=True), 0.1)
    assert isinstance(abort, Abort)
    assert str(abort.error) == "the target failed: its device is late"


def test_a_drafters_last_process_ends_nothing_while_a_target_is_awaited() -> None:
    router = router_of(FIRST, awaits_target=True)
    failed(router)
    router.handle(Arrived(FIRST, Fault(0, 0, FaultCode.FAILED, "no memory")), 0.1)
    assert router.handle(NodeEnded(FIRST, "it exited", is_last=True), 0.2) == []


def test_a_silent_target_is_killed_and_its_silence_is_the_reason_if_no_other_comes() -> None:
    router = router_of(awaits_target=True)
    for second in range(round(3 * SILENCE_LIMIT_S) + 1):
        router.handle(Tick(), float(second))
        assert router.registry.ready(Role.TARGET)
    actions = []
    for tenth in range(20):
        actions += router.handle(Tick(), 3 * SILENCE_LIMIT_S + tenth / 10)
    assert Warn("the target has been silent for 15 s; it is replaced") in actions
    assert actions.count(Kill(TARGET)) == 1
    (abort,) = router.handle(NodeEnded(TARGET, "signal 9", is_last=True), 20.0)
    assert isinstance(abort, Abort)
    assert str(abort.error).startswith("the target has been silent for 15 s")


def test_a_target_that_tells_nothing_new_while_it_loads_again_is_killed() -> None:
    router = router_of(awaits_target=True)
    router.handle(NodeEnded(TARGET, "it has died"), 0.0)
    router.registry.expect(Role.TARGET, AGAIN, 1.0, is_again=True)
    assert kills(router, LOADING_LIMIT_S) == []
    assert kills(router, LOADING_LIMIT_S + 1.5) == [Kill(AGAIN)]
