"""Who counts as silent."""

from dataclasses import replace

import pytest

from coordinator.cluster.node import Health
from coordinator.cluster.registry import OWN_PAUSE_S, Registry
from proto.liveness import SILENCE_LIMIT_S
from proto.messages import MODEL_SOURCE, NGRAM_SOURCE, Heartbeat, Role
from tests.coordinator.test_behaviours import hello


def ready(now: float) -> Registry:
    registry = Registry("secret")
    for role in Role:
        registry.expect(role, role.value.encode(), now)
    for role in (Role.TARGET, Role.DRAFTER):
        node = registry.of(role)
        assert node is not None
        registry.greet(node, hello(role), 0)
    assert registry.none_expected()
    return registry


def test_a_node_that_says_nothing_is_silent_after_the_limit() -> None:
    registry = ready(100.0)
    now, silent = 100.0, []
    while not silent:
        now += OWN_PAUSE_S / 2
        silent = registry.newly_silent(now)
    assert [node.role for node in silent] == [Role.DRAFTER]
    assert SILENCE_LIMIT_S < now - 100.0 <= SILENCE_LIMIT_S + OWN_PAUSE_S
    assert registry.newly_silent(now) == []
    assert registry.losses == {Role.DRAFTER: 1}
    for role in Role:
        node = registry.of(role)
        assert node is not None
        registry.gone(node)
    assert registry.losses == {Role.TARGET: 1, Role.DRAFTER: 1}, "the silent one was counted"


def test_whoever_was_stopped_itself_blames_nobody() -> None:
    registry = ready(100.0)
    registry.newly_silent(100.5)
    assert registry.newly_silent(700.0) == []
    node = registry.of(Role.DRAFTER)
    assert node is not None
    assert node.detector.silence_s(701.0) == 1.0


@pytest.mark.parametrize("host", ["here", "there"])
def test_a_way_that_gets_slower_is_told_of_another_host_only(host: str) -> None:
    registry = Registry("secret")
    registry.host = "here"
    registry.expect(Role.DRAFTER, b"drafter", 0.0)
    node = registry.of(Role.DRAFTER)
    assert node is not None
    registry.greet(node, replace(hello(Role.DRAFTER), host=host), MODEL_SOURCE)
    told = [
        registry.beaten(node, Heartbeat((), 0, "", stamp_us=number * 1_000_000), number + way_s)
        for number, way_s in enumerate([0.002] * 20 + [0.1] * 20, 1)
    ]
    assert sum(told) == (host == "there")


def test_a_process_in_the_place_of_another_goes_on_with_its_figures_and_is_not_waited_for() -> None:
    registry = ready(0.0)
    first = registry.of(Role.DRAFTER)
    assert first is not None
    assert registry.worked_s(first.id, 5.0) == 0.0, "it may have loaded until now"
    for now, progress in ((10.0, 7), (11.0, 9)):
        registry.beaten(first, Heartbeat((), progress, "", num_overruns=2, late_us=90), now)
    assert registry.worked_s(first.id, 40.0) == 30.0
    registry.gone(first)
    registry.expect(Role.DRAFTER, b"drafter.1", 50.0, is_again=True)
    again = registry.of(Role.DRAFTER)
    assert again is not None
    assert (again.num_forwards_before, again.num_overruns_before) == (9, 2)
    assert again.late_us_before == 90
    assert registry.none_expected()
    assert registry.worked_s(again.id, 60.0) is None
    registry.beaten(again, Heartbeat((), 1, ""), 51.0)
    registry.gone(again)
    registry.expect(Role.DRAFTER, b"drafter.2", 60.0, is_again=True)
    (last,) = registry.of_role(Role.DRAFTER)
    assert last.num_forwards_before == 10


def test_nobody_is_waited_for_who_was_ready_once_or_is_gone() -> None:
    registry = Registry("secret")
    for role in Role:
        registry.expect(role, role.value.encode(), 100.0)
    target, drafter = registry.of(Role.TARGET), registry.of(Role.DRAFTER)
    assert target is not None
    assert drafter is not None
    registry.greet(drafter, hello(Role.DRAFTER), MODEL_SOURCE)
    assert not registry.none_expected()
    registry.greet(target, hello(Role.TARGET), NGRAM_SOURCE)
    drafter.health = Health.SILENT
    assert registry.none_expected()
    registry.gone(drafter)
    assert registry.none_expected()
    assert registry.find(drafter.id) is None, "what it sends counts for nothing"
