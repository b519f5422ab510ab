"""Nodes that join, fail, fall silent or are one too many."""

from dataclasses import replace

import pytest

from coordinator.cluster.router_events import (
    Abort,
    Action,
    Arrived,
    Garbled,
    NodeEnded,
    Send,
    TextLeft,
    TextSubmitted,
    Tick,
    Warn,
)
from coordinator.cluster.routing import Router
from coordinator.text.session_events import NodeId
from proto.codec import decode, encode
from proto.errors import IncompatibleError
from proto.liveness import HEARTBEAT_INTERVAL_S, MAX_BAD_FRAMES, SILENCE_LIMIT_S
from proto.messages import (
    MAX_SOURCES,
    NGRAM_SOURCE,
    OWN_SOURCES,
    Fault,
    FaultCode,
    Heartbeat,
    Open,
    Role,
    Rule,
    Welcome,
)
from tests.coordinator.cluster.routers import (
    FIRST,
    SECOND,
    TARGET,
    begun,
    forwarded,
    join,
    opened,
    router_of,
    said,
    text,
)
from tests.coordinator.test_behaviours import hello
from tests.texts import draft

AGAIN, ONCE_MORE = b"drafter-1.1", b"drafter-1.2"

# -- nodes ----------------------------------------------------------------------------------------


def test_a_node_that_joins_later_is_told_every_text() -> None:
    router = router_of(max_num_seqs=2)
    for session in (1, 2):
        begun(router, text(session))
    assert join(router, FIRST, Role.DRAFTER) == [
        Send(FIRST, encode(Welcome(100, 0))),
        opened(FIRST, 1, 2, session=1, incarnation=2),
        opened(FIRST, 1, 2, session=2, incarnation=2),
    ]


def test_a_lost_drafter_costs_speed_and_the_other_goes_on() -> None:
    router = router_of(FIRST, SECOND)
    running = begun(router, text())
    ended = NodeEnded(FIRST, "the drafter process exited", is_unusable=False)
    assert router.handle(ended, 0.0) == [Warn("the drafter process exited; going on without it")]
    assert forwarded(router, FIRST, draft((1, 2), 3)) == ()
    assert forwarded(router, TARGET, said(3)) == (SECOND,)
    assert running.machine.drafter_lost_at is None
    assert router.handle(replace(ended, node=SECOND), 0.0) == [
        Warn("the drafter process exited; going on without drafts")
    ]
    assert running.machine.drafter_lost_at == 0
    assert router.handle(ended, 0.0) == [], "it has been said"


def test_a_text_that_begins_after_the_drafter_was_lost_says_so() -> None:
    router = router_of(FIRST)
    router.handle(NodeEnded(FIRST, "gone", is_unusable=False), 0.0)
    assert begun(router, text()).machine.drafter_lost_at == 0
    assert begun(router_of(), text()).machine.drafter_lost_at is None, "there never was one"


def test_the_end_of_the_target_is_the_end_of_everything() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(Arrived(TARGET, said(3)), 0.0)
    (abort,) = router.handle(NodeEnded(TARGET, "it has died", is_unusable=False), 0.0)
    assert isinstance(abort, Abort)
    assert str(abort.error) == "it has died (after 1 tokens)"


def test_a_target_that_is_replaced_is_told_the_text_as_it_is() -> None:
    router = router_of(FIRST, awaits_target=True)
    begun(router, text())
    router.handle(Arrived(TARGET, said(3)), 0.0)
    ended = NodeEnded(TARGET, "it has died", is_unusable=False)
    assert router.handle(ended, 0.0) == [Warn("it has died; waiting for another")]
    assert forwarded(router, FIRST, draft((1, 2), 3)) == ()
    assert join(router, b"target-1.1", Role.TARGET) == [
        Send(b"target-1.1", encode(Welcome(100, NGRAM_SOURCE))),
        opened(b"target-1.1", 1, 2, 3, incarnation=3),
    ]


@pytest.mark.parametrize("is_unusable", [True, False])
def test_only_what_a_user_must_mend_makes_an_error_of_a_drafter_that_never_came(
    *, is_unusable: bool
) -> None:
    router = router_of()
    router.registry.expect(Role.DRAFTER, FIRST, 0.0)
    code = FaultCode.UNUSABLE if is_unusable else FaultCode.FAILED
    (action,) = router.handle(Arrived(FIRST, Fault(0, 0, code, "no model")), 0.0)
    if is_unusable:
        assert isinstance(action, Abort)
        assert str(action.error) == "the drafter failed: no model"
    else:
        assert action == Warn("the drafter failed: no model; going on without drafts")


def test_a_drafter_that_is_started_again_is_told_every_text_and_people_hear_of_it() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(NodeEnded(FIRST, "gone", is_unusable=False), 0.0)
    router.registry.expect(Role.DRAFTER, AGAIN, 0.0, is_again=True)
    assert router.handle(Arrived(AGAIN, hello(Role.DRAFTER)), 0.0) == [
        Send(AGAIN, encode(Welcome(100, 2))),
        Warn("the drafter is there again"),
        opened(AGAIN, 1, 2, session=1, incarnation=3),
    ]


def test_a_drafter_that_does_not_fit_when_it_is_started_again_ends_no_text() -> None:
    router = router_of(FIRST)
    running = begun(router, text())
    router.handle(NodeEnded(FIRST, "gone", is_unusable=False), 0.0)
    router.registry.expect(Role.DRAFTER, AGAIN, 0.0, is_again=True)
    fault, warning = router.handle(Arrived(AGAIN, hello(Role.DRAFTER, digest="y")), 0.0)
    assert isinstance(fault, Send)
    assert isinstance(warning, Warn)
    assert warning.line.endswith("going on without drafts")
    router.registry.expect(Role.DRAFTER, ONCE_MORE, 0.0, is_again=True)
    unusable = Fault(0, 0, FaultCode.UNUSABLE, "no model")
    assert router.handle(Arrived(ONCE_MORE, unusable), 0.0) == [
        Warn("the drafter failed: no model; going on without drafts")
    ]
    assert not running.machine.ended


def test_a_node_that_does_not_fit_is_refused() -> None:
    router = router_of()
    router.registry.expect(Role.DRAFTER, FIRST, 0.0)
    fault, abort = router.handle(Arrived(FIRST, hello(Role.DRAFTER, digest="y")), 0.0)
    assert isinstance(fault, Send)
    answer = decode(fault.frame)
    assert isinstance(answer, Fault)
    assert answer.code is FaultCode.REFUSED
    assert isinstance(abort, Abort)
    assert isinstance(abort.error, IncompatibleError)


def silence(router: Router, *talking: NodeId) -> tuple[list[Action], float]:
    """What is done when the nodes but these pass the drafter's limit, and when."""
    now, done = 0.0, []
    while now <= SILENCE_LIMIT_S:
        now += HEARTBEAT_INTERVAL_S
        for node in talking:
            router.handle(Arrived(node, Heartbeat((), 0, "")), now)
        done = router.handle(Tick(), now)
    return done, now


def test_a_silent_drafter_is_told_the_text_when_it_is_back() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(Arrived(TARGET, said(3)), 0.0)
    (lost, *_), now = silence(router, TARGET)
    assert lost == Warn("the drafter has been silent for 5 s; going on without drafts")
    assert forwarded(router, TARGET, said(3), now) == ()
    back, told = router.handle(Arrived(FIRST, Heartbeat((), 0, "")), now)
    assert back == Warn("the drafter is there again")
    assert isinstance(told, Send)
    message = decode(told.frame)
    assert isinstance(message, Open)
    assert (told.node, message.tokens) == (FIRST, (1, 2, 3))


def test_the_end_of_a_drafter_that_was_silent_is_no_second_loss() -> None:
    router = router_of(FIRST)
    _, now = silence(router, TARGET)
    ended = NodeEnded(FIRST, "it went with its host", is_unusable=False)
    assert router.handle(ended, now) == [Warn("it went with its host")]


def test_too_many_garbled_frames_are_as_good_as_the_end() -> None:
    router = router_of(FIRST)
    for _ in range(MAX_BAD_FRAMES):
        assert router.handle(Garbled(FIRST, "no array"), 0.0) == [
            Warn("dropped a frame of the drafter: no array")
        ]
    line = "the drafter keeps sending garbled frames; the last: no array; going on without drafts"
    assert router.handle(Garbled(FIRST, "no array"), 0.0)[1:] == [Warn(line)]
    assert router.handle(Garbled(FIRST, "no array"), 0.0) == []
    assert router.handle(Garbled(b"stranger", "no array"), 0.0) == []


# -- drafters of one text -------------------------------------------------------------------------


def test_under_a_classical_rule_one_drafter_feeds_a_text_and_another_takes_over() -> None:
    router = router_of(FIRST, SECOND)
    assert router.handle(TextSubmitted(text(rule=Rule.TOKEN)), 0.0) == [
        opened(TARGET, 1, 2, incarnation=1, rule=Rule.TOKEN),
        opened(FIRST, 1, 2, incarnation=2, rule=Rule.TOKEN),
    ]
    assert forwarded(router, SECOND, draft((1, 2), 3)) == ()
    assert router.handle(NodeEnded(FIRST, "gone", is_unusable=False), 0.0) == [
        Warn("gone; going on without it"),
        opened(SECOND, 1, 2, incarnation=3, rule=Rule.TOKEN),
    ]
    assert forwarded(router, SECOND, draft((1, 2), 3)) == (TARGET,)


def source_of(actions: list[Action]) -> int:
    """The number that a node was told."""
    assert isinstance(actions[0], Send)
    welcome = decode(actions[0].frame)
    assert isinstance(welcome, Welcome)
    return welcome.source


def test_a_source_number_is_free_again_when_no_text_knows_it() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(NodeEnded(FIRST, "gone", is_unusable=False), 0.0)
    assert source_of(join(router, SECOND, Role.DRAFTER)) == 2, "the text knows 0; 1 is the target's"
    router.handle(TextLeft(1, is_complete=False), 0.0)
    assert source_of(join(router, b"drafter-3", Role.DRAFTER)) == 0


def test_one_long_text_outlives_more_drafters_than_there_are_numbers() -> None:
    router = router_of(FIRST)
    begun(router, text())
    told = []
    for number in range(1, 11):
        (node,) = router.registry.ready(Role.DRAFTER)
        router.handle(NodeEnded(node.id, "gone", is_unusable=False), 0.0)
        router.registry.expect(Role.DRAFTER, b"drafter-1.%d" % number, 0.0, is_again=True)
        arrived = Arrived(b"drafter-1.%d" % number, hello(Role.DRAFTER))
        told.append(source_of(router.handle(arrived, 0.0)))
    assert told[:4] == [2, 3, 4, 5], "those that the text does not know come first"
    assert set(told) <= set(range(MAX_SOURCES)) - set(OWN_SOURCES)
    assert forwarded(router, b"drafter-1.10", draft((1, 2), 3)) == (TARGET,)


def test_a_drafter_for_which_there_is_no_number_is_turned_away() -> None:
    num_drafters = MAX_SOURCES - len(OWN_SOURCES)
    router = router_of(*(b"drafter-%d" % number for number in range(1, num_drafters + 1)))
    line = "there is no source number left for one more drafter"
    assert begun(router, text()).machine.num_generated == 0, "all of them are known to a text"
    assert join(router, b"one-more", Role.DRAFTER) == [
        Send(b"one-more", encode(Fault(0, 0, FaultCode.REFUSED, line))),
        Warn(f"{line}; going on without it"),
    ]


@pytest.mark.parametrize(("node", "name"), [(TARGET, "target"), (FIRST, "drafter")])
def test_what_a_node_that_is_ready_has_lost_is_said_once(node: bytes, name: str) -> None:
    router = router_of(FIRST)
    states = ("loading weights", "ready", *["ready, but its heads have failed: no memory"] * 3)
    said = [
        action
        for number, state in enumerate(states)
        for action in router.handle(Arrived(node, Heartbeat((), number, state)), 0.1 * number)
        if isinstance(action, Warn)
    ]
    assert said == [Warn(f"the {name}: its heads have failed: no memory")]
    again = router.handle(Arrived(node, Heartbeat((), 9, "ready, but it is slow")), 1.0)
    assert Warn(f"the {name}: it is slow") in again
