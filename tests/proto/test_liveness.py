"""Silence has one limit."""

from proto.liveness import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, FaultDetector


def test_a_peer_is_lost_only_after_the_limit() -> None:
    detector = FaultDetector(100.0, silence_limit_s=4.0)
    assert not detector.is_lost(100.0)
    assert not detector.is_lost(104.0)
    assert detector.is_lost(104.1)


def test_any_message_is_a_sign_of_life() -> None:
    detector = FaultDetector(100.0, silence_limit_s=4.0)
    detector.heard(103.0)
    assert not detector.is_lost(107.0)
    assert detector.silence_s(107.0) == 4.0
    assert detector.is_lost(107.5)


def test_a_lost_peer_that_is_heard_again_is_back() -> None:
    detector = FaultDetector(0.0, silence_limit_s=4.0)
    assert detector.is_lost(50.0)
    detector.heard(50.0)
    assert not detector.is_lost(51.0)


def test_an_older_sign_of_life_changes_nothing() -> None:
    detector = FaultDetector(0.0, silence_limit_s=4.0)
    detector.heard(10.0)
    detector.heard(8.0)
    assert detector.silence_s(12.0) == 2.0


def test_several_heartbeats_may_be_lost_before_a_peer_is() -> None:
    assert SILENCE_LIMIT_S >= 10 * HEARTBEAT_INTERVAL_S
