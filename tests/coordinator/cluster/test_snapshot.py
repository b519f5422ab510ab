"""What a coordinator tells of its nodes and texts: numbers, within limits, and never the text."""

import json

import pytest

from coordinator.cluster.router_events import Arrived, NodeEnded
from coordinator.cluster.snapshot import (
    MAX_CAUSES,
    MAX_CHARS,
    MAX_LISTED,
    OTHERS,
    Tally,
    ending_of,
    taken,
)
from coordinator.text.timed_session import Result
from proto.errors import ClosedError, NodeError
from proto.messages import FinishReason, Heartbeat, Role
from tests.coordinator.cluster.routers import FIRST, TARGET, begun, router_of, said, text
from tests.coordinator.text.test_stops import METRICS


def test_a_snapshot_has_what_nodes_and_texts_are_at() -> None:
    router = router_of(FIRST, max_num_seqs=2)
    router.handle(Arrived(TARGET, Heartbeat((), 7, "ready", stamp_us=1)), 1.5)
    first = begun(router, text(1))
    begun(router, text(2))
    router.handle(Arrived(TARGET, said(11, 12)), 2.0)
    snapshot = taken(router, Tally(), {"target-1": 41}, 3.0)
    target, drafter = snapshot.nodes
    assert (target.role, target.health, target.doing) == ("target", "ready", "ready")
    assert (target.pid, target.forwards, target.texts, drafter.texts) == (41, 7, 2, 2)
    assert target.round_trip_ms == pytest.approx(1500, abs=0.01)
    assert (snapshot.open, snapshot.queued) == (2, 0)
    assert [one.number for one in snapshot.texts] == [1, 2]
    assert snapshot.texts[0].tokens == first.machine.num_generated == 2
    assert not snapshot.texts[0].without_drafter


def test_a_snapshot_says_that_nobody_drafts_and_what_was_counted() -> None:
    router = router_of(FIRST, max_num_seqs=2)
    begun(router, text(1))
    router.handle(NodeEnded(FIRST, "the drafter process was ended", is_unusable=False), 1.0)
    tally = Tally()
    tally.restarted(Role.DRAFTER)
    tally.ended(Result(FinishReason.LENGTH, METRICS, lambda _: METRICS))
    tally.ended(ClosedError("cancelled"))
    tally.ended(NodeError("failed"))
    snapshot = taken(router, tally, {}, 2.0)
    assert [node.health for node in snapshot.nodes] == ["ready", "gone"]
    assert snapshot.texts[0].without_drafter
    assert (snapshot.complete, snapshot.cancelled, snapshot.failed) == (1, 1, 1)
    assert snapshot.restarts == {"drafter": 1}


def test_a_snapshot_is_small_and_holds_no_token() -> None:
    router = router_of(num_lanes=200, max_num_seqs=200)
    for number in range(1, 101):
        begun(router, text(number))
    router.handle(Arrived(TARGET, Heartbeat((), 0, "\x1b[2J" + "x" * 5000)), 1.0)
    snapshot = taken(router, Tally(), {}, 2.0)
    assert snapshot.open == 100
    assert len(snapshot.texts) == MAX_LISTED
    doing = snapshot.nodes[0].doing
    assert len(doing) == MAX_CHARS
    assert doing.isprintable()
    written = json.loads(json.dumps(snapshot.as_json()))
    of_a_text = {type(value) for one in written["texts"] for value in one.values()}
    assert of_a_text <= {int, float, str, bool, type(None)}, "no list, so no tokens"
    assert len(json.dumps(written)) < 1 << 15


def test_refusals_are_counted_by_cause_and_there_are_not_many_causes() -> None:
    tally = Tally()
    for number in range(100):
        tally.refused(f"cause {number}")
        tally.refused("cause 0")
    assert len(tally.refusals) == MAX_CAUSES
    assert tally.refusals["cause 0"] == 101
    assert tally.refusals.total() == 200
    assert OTHERS in tally.refusals


def test_the_log_says_how_a_text_ended_and_nothing_of_what_a_mistake_held() -> None:
    assert ending_of(NodeError("the target was lost")) == "ended: the target was lost"
    error = NodeError("the text ended by a mistake: KeyError: 'a word of the prompt'")
    error.__cause__ = KeyError("a word of the prompt")
    assert ending_of(error) == "failed by a mistake of the coordinator (KeyError)"
    result = Result(FinishReason.LENGTH, METRICS, lambda _: METRICS)
    assert ending_of(result).startswith("complete (length): ")
