"""Several targets: who gets a text, and what becomes of the texts of one that is lost."""

from dataclasses import replace

import pytest

from coordinator.cluster.moves import NEAR_TIES, STRANDED
from coordinator.cluster.router_events import (
    Abort,
    Action,
    Arrived,
    Deliver,
    End,
    NodeEnded,
    Send,
    TextLeft,
    Tick,
    Warn,
)
from coordinator.cluster.routing import Router
from coordinator.cluster.snapshot import Tally, taken
from coordinator.text.session_events import NodeId
from proto.codec import decode
from proto.liveness import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from proto.messages import Fault, Heartbeat, Hello, Open, Role, Rule
from tests.coordinator.cluster.routers import FIRST, TARGET, begun, forwarded, text
from tests.coordinator.test_behaviours import hello
from tests.texts import draft, verdict

OTHER, THIRD = b"target-2", b"target-3"
EXACT = replace(hello(Role.TARGET, num_lanes=2), bits="a digest", host="one")
INEXACT = replace(EXACT, bits="")


def greeted(router: Router, node: NodeId, said: Hello, now: float = 0.0) -> list[Action]:
    """A process, which this coordinator has started, introduces itself."""
    router.registry.expect(said.role, node, now)
    return router.handle(Arrived(node, said), now)


def two(said: Hello = EXACT, **options: bool) -> Router:
    """A router with two targets, which it restarts, and a drafter."""
    router = Router("secret", max_num_seqs=8, **{"awaits_target": True, **options})
    greeted(router, TARGET, said)
    greeted(router, OTHER, said)
    greeted(router, FIRST, hello(Role.DRAFTER))
    return router


def by_hand(*targets: NodeId, awaits_target: bool = True) -> Router:
    """A router where users have started these targets."""
    router = Router("secret", max_num_seqs=8, awaits_target=awaits_target)
    router.registry.expect(Role.TARGET, TARGET, 0.0, is_by_hand=True)
    for node in targets:
        router.handle(Arrived(node, EXACT), 0.0)
    return router


def opened_at(actions: list[Action]) -> list[tuple[NodeId, int, tuple[int, ...]]]:
    """Which targets are told which texts, as they are."""
    sent = [(one.node, decode(one.frame)) for one in actions if isinstance(one, Send)]
    return [
        (node, said.session, said.tokens)
        for node, said in sent
        if isinstance(said, Open) and node.startswith(b"target")
    ]


def lines(actions: list[Action]) -> list[str]:
    """What people are told."""
    assert not any(isinstance(one, Abort) for one in actions), actions
    return [one.line for one in actions if isinstance(one, Warn)]


def places(router: Router) -> list[tuple[NodeId, ...]]:
    """The target of each open text."""
    router.check()
    return [one.targets for one in router.open_texts]


def emitted(actions: list[Action]) -> list[int]:
    """The texts that have got tokens."""
    return [one.session for one in actions if isinstance(one, Deliver)]


def silence_of(router: Router, *talking: NodeId) -> tuple[list[str], float]:
    """What is said until a target that is not among these counts as silent, and when that was."""
    now, heard = 0.0, []
    while now <= 3 * SILENCE_LIMIT_S + 1:
        now += HEARTBEAT_INTERVAL_S
        for node in talking:
            router.handle(Arrived(node, Heartbeat((), 0, "", stamp_us=round(now * 1e6))), now)
        heard += lines(router.handle(Tick(), now))
    return heard, now


def test_texts_are_shared_out_among_the_targets_and_both_have_room() -> None:
    router = two()
    for session in range(1, 6):
        begun(router, text(session))
    assert places(router) == [(TARGET,), (OTHER,), (TARGET,), (OTHER,)]
    assert router.queued == (5,)
    assert router.registry.num_lanes(8) == 4
    assert router.registry.num_lanes(1) == 2
    assert opened_at(router.handle(TextLeft(2, is_complete=False), 0.0)) == [(OTHER, 5, (1, 2))]
    begun(router, text(6))
    assert router.queued == (6,)


def test_the_target_with_the_fewest_texts_is_asked_first() -> None:
    router = two()
    for session in (1, 2, 3):
        begun(router, text(session))
    for session in (1, 3):
        router.handle(TextLeft(session, is_complete=False), 0.0)
    begun(router, text(4))
    begun(router, text(5))
    assert places(router) == [(OTHER,), (TARGET,), (TARGET,)]


def test_a_target_that_joins_later_gets_the_texts_that_wait() -> None:
    router = by_hand(TARGET)
    for session in (1, 2, 3):
        begun(router, text(session))
    assert router.queued == (3,)
    actions = router.handle(Arrived(OTHER, EXACT), 0.0)
    assert opened_at(actions) == [(OTHER, 3, (1, 2))]
    assert lines(actions) == ["target-2 has joined on one"]


def test_the_texts_of_a_lost_target_go_on_at_another_with_all_their_tokens() -> None:
    router = two()
    for session in (1, 2):
        begun(router, text(session))
    router.handle(Arrived(TARGET, verdict((1, 2), 3, 4)), 0.0)
    ended = router.handle(NodeEnded(TARGET, "it has died"), 0.0)
    assert opened_at(ended) == [(OTHER, 1, (1, 2, 3, 4))]
    said = ["it has died; going on without it", "target-2 goes on with 1 text of target-1"]
    assert lines(ended) == said
    life = router.open_texts[0].timed.machine.mark_for(OTHER).incarnation
    more = verdict((1, 2, 3, 4), 5, incarnation=life)
    assert emitted(router.handle(Arrived(OTHER, more), 0.0)) == [1]
    assert forwarded(router, FIRST, draft((1, 2, 3, 4, 5), 6)) == (OTHER,)
    again = greeted(router, b"target-1.1", EXACT)
    assert opened_at(again) == [], "texts move only if their target is lost"
    router.registry.find(b"target-1.1")


def test_texts_for_which_the_others_have_no_room_wait_for_their_turn() -> None:
    router = two()
    for session in (1, 2, 3, 4):
        begun(router, text(session))
    ended = router.handle(NodeEnded(TARGET, "it has died"), 0.0)
    assert lines(ended)[1:] == ["2 texts of target-1 must wait for room at another target"]
    assert places(router) == [(), (OTHER,), (), (OTHER,)]
    assert opened_at(router.handle(TextLeft(2, is_complete=False), 0.0)) == [(OTHER, 1, (1, 2))]
    assert opened_at(greeted(router, b"target-1.1", EXACT)) == [(b"target-1.1", 3, (1, 2))]


@pytest.mark.parametrize("rule", Rule)
def test_a_silent_target_that_wakes_is_not_heard_about_a_text_that_another_one_writes(
    rule: Rule,
) -> None:
    router = by_hand(TARGET, OTHER)
    running = begun(router, text(rule=rule)).machine
    heard, now = silence_of(router, OTHER)
    assert heard == [
        "target-1 has been silent for 15 s; going on without it",
        "target-2 goes on with 1 text of target-1",
    ]
    late = router.handle(Arrived(TARGET, verdict((1, 2), 7)), now)
    assert emitted(late) == []
    assert opened_at(late) == []
    assert lines(late) == ["target-1 is there again"]
    assert tuple(running.text.tokens) == (1, 2)
    assert router.registry.find(TARGET).num_bad_frames == 0, "it has broken no rule"
    beats = router.handle(Tick(), now + HEARTBEAT_INTERVAL_S)
    told = {one.node: decode(one.frame) for one in beats if isinstance(one, Send)}
    assert told[TARGET].marks == (), "so it closes the text"
    assert [mark.session for mark in told[OTHER].marks] == [1]


def test_where_the_bits_may_differ_a_line_says_so_and_the_text_moves() -> None:
    router = two(INEXACT)
    begun(router, text())
    ended = router.handle(NodeEnded(TARGET, "it has died"), 0.0)
    assert lines(ended)[1] == f"target-2 goes on with 1 text of target-1, {NEAR_TIES}"
    assert opened_at(ended) == [(OTHER, 1, (1, 2))]


def test_a_second_target_of_which_the_bits_may_differ_is_announced_with_that() -> None:
    router = two(EXACT)
    joined = greeted(router, THIRD, replace(EXACT, bits="others"))
    assert lines(joined) == [
        "target-3 has joined on one; it and target-1 are not known to compute the same bits, so "
        "texts may differ at near ties"
    ]


def test_a_text_that_keeps_its_bits_waits_for_its_own_target_or_one_like_it() -> None:
    router = two(INEXACT, keeps_bits=True)
    begun(router, text())
    begun(router, text(2))
    ended = router.handle(NodeEnded(TARGET, "it has died"), 0.0)
    assert opened_at(ended) == []
    why = "a target that computes the same bits"
    assert lines(ended)[1:] == [f"1 text of target-1 must wait for {why}"]
    assert opened_at(router.handle(TextLeft(2, is_complete=False), 0.0)) == []
    assert opened_at(greeted(router, b"target-1.1", INEXACT)) == [(b"target-1.1", 1, (1, 2))]


def test_a_text_that_keeps_its_bits_moves_to_a_target_that_computes_the_same() -> None:
    router = two(EXACT, keeps_bits=True)
    begun(router, text())
    assert opened_at(router.handle(NodeEnded(TARGET, "it has died"), 0.0)) == [(OTHER, 1, (1, 2))]


def test_a_text_with_which_no_target_may_go_on_ends_with_an_error_and_the_others_go_on() -> None:
    router = two(INEXACT, keeps_bits=True)
    for session in (1, 2):
        begun(router, text(session))
    ended = router.handle(NodeEnded(TARGET, "it has died", is_last=True), 0.0)
    (end,) = [one for one in ended if isinstance(one, End)]
    assert (end.session, str(end.last)) == (1, f"it has died; {STRANDED}")
    assert places(router) == [(OTHER,)]


def test_the_coordinator_ends_with_its_last_target_and_not_before() -> None:
    router = two()
    begun(router, text())
    lines(router.handle(NodeEnded(TARGET, "the first", is_last=True), 0.0))
    (abort,) = router.handle(NodeEnded(OTHER, "the second", is_last=True), 0.0)
    assert isinstance(abort, Abort)


def test_a_command_that_awaits_no_target_goes_on_while_one_is_left() -> None:
    router = by_hand(TARGET, OTHER, awaits_target=False)
    begun(router, text())
    heard, _ = silence_of(router, OTHER)
    assert heard[0] == "target-1 has been silent for 15 s; going on without it"
    assert places(router) == [(OTHER,)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (replace(EXACT, dtype="bfloat16"), "target-1 has another number type; start the same"),
        (replace(EXACT, max_model_len=10), "takes 10 tokens, target-1 takes 1000; start it with"),
    ],
)
def test_a_second_target_with_other_settings_is_refused(said: Hello, why: str) -> None:
    router = by_hand(TARGET)
    fault, warning = router.handle(Arrived(OTHER, said), 0.0)
    assert isinstance(fault, Send)
    assert isinstance(answer := decode(fault.frame), Fault)
    assert why in answer.detail
    assert isinstance(warning, Warn)
    assert len(router.registry.ready(Role.TARGET)) == 1


def test_texts_begin_with_whichever_target_joins_first() -> None:
    router = by_hand(OTHER)
    assert router.registry.none_expected(), "target-1 is not waited for"
    begun(router, text())
    assert places(router) == [(OTHER,)]
    router.handle(Arrived(TARGET, EXACT), 0.0)
    begun(router, text(2))
    assert places(router) == [(OTHER,), (TARGET,)]


def test_status_shows_each_target_with_its_texts() -> None:
    router = two()
    for session in (1, 2, 3):
        begun(router, text(session))
    seen = taken(router, Tally(), {"target-1": 7, "target-2": 8}, 0.0)
    targets = [one for one in seen.nodes if one.role == "target"]
    assert [(one.name, one.texts, one.max_texts) for one in targets] == [
        ("target-1", 2, 2),
        ("target-2", 1, 2),
    ]
    assert [one.pid for one in targets] == [7, 8]
    assert [one.target for one in seen.texts] == ["target-1", "target-2", "target-1"]
