"""Nodes that somebody else starts: late, never, twice, other ones, or of another release."""

from dataclasses import replace

import pytest

from coordinator.cluster.fitting import UNREADABLE, replacement_difference
from coordinator.cluster.node import Health
from coordinator.cluster.registry import JOIN_LIMIT_S, NOBODY_DRAFTS
from coordinator.cluster.router_events import (
    Abort,
    Action,
    Arrived,
    Garbled,
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
from proto.messages import (
    NGRAM_SOURCE,
    PROTOCOL_VERSION,
    Close,
    Fault,
    FaultCode,
    Heartbeat,
    Hello,
    Message,
    Open,
    Role,
    Welcome,
)
from tests.coordinator.cluster.routers import FIRST, SECOND, TARGET, begun, forwarded, said, text
from tests.coordinator.test_behaviours import hello
from tests.texts import draft

GOOD = replace(hello(Role.DRAFTER), host="one", load_us=1)
OLD = replace(GOOD, version=PROTOCOL_VERSION - 1, host="two")
OTHER = replace(hello(Role.DRAFTER, digest="y"), host="two", load_us=2)
OF_THE_TARGET = replace(hello(Role.TARGET), load_us=3)
REASON = (
    "the drafter and the target have 100 tokens each, but the same ids mean different tokens; "
    "choose a drafter with the target's tokenizer"
)


def waiting(*, with_drafter: bool = True) -> Router:
    """A router that waits for nodes by hand."""
    router = Router("secret", max_num_seqs=8)
    router.registry.expect(Role.TARGET, TARGET, 0.0, is_by_hand=True)
    if with_drafter:
        router.registry.expect(Role.DRAFTER, FIRST, 0.0, is_by_hand=True)
    return router


def says(router: Router, node: NodeId, hello: Hello, now: float = 0.0) -> list[Action]:
    """A node introduces itself."""
    done = router.handle(Arrived(node, hello), now)
    router.check()
    return done


def with_target(*drafters: NodeId) -> Router:
    """One whose target, and these drafters, have joined; with a text."""
    router = waiting()
    says(router, TARGET, OF_THE_TARGET)
    for number, node in enumerate(drafters):
        says(router, node, replace(GOOD, load_us=10 + number))
    begun(router, text())
    return router


def lines(actions: list[Action]) -> list[str]:
    """What people are told."""
    assert not any(isinstance(one, Abort) for one in actions), actions
    return [one.line for one in actions if isinstance(one, Warn)]


def sent(actions: list[Action], node: NodeId) -> list[type]:
    """What a node is sent."""
    return [type(message) for message in decoded(actions, node)]


def decoded(actions: list[Action], node: NodeId) -> list[Message]:
    """The same, as messages."""
    return [decode(one.frame) for one in actions if isinstance(one, Send) and one.node == node]


def beats(router: Router, now: float, *nodes: NodeId, stamped: bool = True) -> list[Action]:
    """These nodes live, and work."""
    done = []
    for node in nodes:
        stamp_us = round(now * 1e6) if stamped else 0
        beat = Heartbeat((), round(now * 1e3), "", stamp_us=stamp_us)
        done += router.handle(Arrived(node, beat), now)
    return done


def silent_after(router: Router, *talking: NodeId, since: float = 0.0) -> tuple[list[str], float]:
    """What is said until the others have passed the limit of silence, and when that was."""
    now, said_so_far = since, []
    while now - since <= SILENCE_LIMIT_S:
        now += HEARTBEAT_INTERVAL_S
        beats(router, now, *talking)
        said_so_far += lines(router.handle(Tick(), now))
    return said_so_far, now


# -- one that does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newcomer", "reason"),
    [
        (OTHER, REASON),
        (OLD, f"the drafter speaks protocol version {PROTOCOL_VERSION - 1}, this coordinator"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_and_the_texts_go_on(
    newcomer: Hello, reason: str
) -> None:
    router = with_target(FIRST)
    done = says(router, SECOND, newcomer)
    assert sent(done, SECOND) == [Fault]
    (line,) = lines(done)
    assert line.startswith(f"refused drafter-2 on two: {reason}")
    assert line.endswith("; going on without it")
    assert forwarded(router, FIRST, draft((1, 2), 3)) == (TARGET,)
    assert forwarded(router, SECOND, draft((1, 2), 3)) == ()


def test_another_model_under_the_name_of_a_drafter_that_was_killed_is_refused() -> None:
    router = with_target(FIRST)
    beats(router, 0.1, FIRST)
    _, now = silent_after(router, TARGET)
    assert beats(router, now, FIRST, stamped=False) == [], "it was not accepted: nobody is back"
    done = says(router, FIRST, OTHER, now)
    assert lines(done) == [f"refused the drafter on two: {REASON}; going on without it"]
    assert sent(done, FIRST) == [Fault]
    assert forwarded(router, TARGET, said(3), now) == ()
    done = says(router, FIRST, replace(GOOD, load_us=99), now)
    assert lines(done) == ["the drafter is there again"]
    assert sent(done, FIRST) == [Welcome, Open]


def test_one_that_is_refused_again_and_again_is_told_so_each_time_and_people_once() -> None:
    router = with_target(FIRST)
    told = [says(router, SECOND, OLD) for _ in range(10)]
    assert [sent(done, SECOND) for done in told] == [[Fault]] * 10
    assert sum(len(lines(done)) for done in told) == 1
    versions = (replace(OLD, version=version) for version in range(100, 200))
    assert sum(len(lines(says(router, SECOND, one))) for one in versions) < 10


def test_a_release_whose_words_cannot_be_read_is_refused_by_its_first_one() -> None:
    router = with_target(FIRST)
    done = router.handle(Garbled(SECOND, "22 fields", is_hello=True), 0.0)
    assert sent(done, SECOND) == [Fault]
    assert lines(done) == [f"refused drafter-2: {UNREADABLE}; going on without it"]
    for _ in range(30):
        assert router.handle(Garbled(SECOND, "a heartbeat of 11 fields"), 0.0) == []
    # Under the name of one that has just been killed its frames are not that one's either.
    router.handle(Garbled(FIRST, "22 fields", is_hello=True), 0.0)
    for _ in range(30):
        assert router.handle(Garbled(FIRST, "a heartbeat of 11 fields"), 0.0) == []
    assert router.handle(Garbled(b"stranger-1", "22 fields", is_hello=True), 0.0) == []
    assert router.handle(Garbled(b"drafter-77", "22 fields", is_hello=True), 0.0) == []


def test_the_only_drafter_does_not_fit_and_the_texts_begin_with_the_target_alone() -> None:
    router = waiting()
    assert lines(says(router, FIRST, OLD))
    assert lines(says(router, TARGET, OF_THE_TARGET)) == []
    assert router.registry.none_expected()
    assert begun(router, text()).machine.drafter_lost_at == 0
    assert lines(says(router, FIRST, GOOD)) == ["the drafter has joined on one"]
    assert forwarded(router, FIRST, draft((1, 2), 3)) == (TARGET,)


def test_a_drafter_that_came_before_the_target_and_does_not_fit_it_is_the_one_that_goes() -> None:
    router = waiting()
    says(router, FIRST, OTHER)
    done = says(router, TARGET, OF_THE_TARGET)
    assert sent(done, TARGET) == [Welcome]
    assert sent(done, FIRST) == [Fault]
    assert len(lines(done)) == 1
    assert lines(done)[0].startswith("refused the drafter on two: ")
    assert router.registry.none_expected()
    begun(router, text())
    assert forwarded(router, FIRST, draft((1, 2), 3)) == ()
    assert lines(says(router, FIRST, GOOD)) == ["the drafter is there again"]


def test_a_misfit_that_came_first_shuts_out_no_drafter_that_fits() -> None:
    router = waiting()
    smaller = replace(OTHER, logits_size=50, fingerprint=replace(OTHER.fingerprint, vocab_size=50))
    says(router, FIRST, smaller)
    welcomed = says(router, SECOND, GOOD)
    assert decoded(welcomed, SECOND) == [Welcome(100, 2, traced=False)], "of its own vocabulary"
    done = says(router, TARGET, OF_THE_TARGET)
    assert decoded(done, TARGET) == [Welcome(100, NGRAM_SOURCE, traced=False)]
    assert sent(done, FIRST) == [Fault]
    assert sent(done, SECOND) == []
    assert lines(done) == [
        "refused drafter-1 on two: the drafter's vocabulary has 50 tokens, the target's 100; "
        "choose a drafter with the target's tokenizer; going on without it"
    ]
    begun(router, text())
    assert forwarded(router, SECOND, draft((1, 2), 3)) == (TARGET,)
    assert forwarded(router, FIRST, draft((1, 2), 3)) == ()


def test_a_head_for_another_target_that_came_first_shuts_out_no_head_that_fits() -> None:
    router = waiting()
    says(router, FIRST, replace(GOOD, layers=(-1,), hidden_size=9999))
    assert sent(says(router, SECOND, replace(GOOD, layers=(1, 2))), SECOND) == [Welcome]
    done = says(router, TARGET, replace(OF_THE_TARGET, num_layers=4))
    assert (sent(done, FIRST), sent(done, SECOND)) == ([Fault], [])
    (line,) = lines(done)
    assert line.startswith("refused drafter-1 on one: the drafter is a head for targets whose")


def test_of_two_heads_of_different_layers_the_target_keeps_the_one_that_came_first() -> None:
    router = waiting()
    says(router, SECOND, replace(GOOD, layers=(1, 2)), 1.0)
    says(router, FIRST, replace(GOOD, layers=(-1,)), 2.0)
    done = says(router, TARGET, replace(OF_THE_TARGET, num_layers=4), 3.0)
    assert (sent(done, FIRST), sent(done, SECOND)) == ([Fault], [])
    line = (
        "{} reads features of layers {}, {} of layers {}; a target hands out those of one kind of "
        "heads; going on without it"
    )
    kept = "drafter-2", "1, 2"
    refused = line.format("drafter-1", "-1", *kept)
    assert lines(done) == [f"refused drafter-1 on one: {refused}"]
    done = says(router, b"drafter-3", replace(GOOD, layers=(0,)), 4.0)
    refused = line.format("drafter-3", "0", *kept)
    assert lines(done) == [f"refused drafter-3 on one: {refused}"]


# -- a target that does not fit -------------------------------------------------------------------


def test_a_target_that_does_not_fit_is_refused_and_another_is_waited_for() -> None:
    router = waiting()
    router.registry.tokenizer = frozenset("x")
    done = says(router, TARGET, replace(OF_THE_TARGET, version=3))
    assert lines(done)[0].endswith("; waiting for another")
    done = says(router, TARGET, hello(Role.TARGET, digest="z"))
    assert sent(done, TARGET) == [Fault]
    assert "its tokenizer is not the one that the coordinator has read" in lines(done)[0]
    assert not router.registry.none_expected()
    assert sent(says(router, TARGET, OF_THE_TARGET), TARGET) == [Welcome]


def test_a_target_fits_whose_host_lacks_the_files_beside_tokenizer_json() -> None:
    router = waiting()
    router.registry.tokenizer = frozenset(("x and more", "x"))
    assert sent(says(router, TARGET, OF_THE_TARGET), TARGET) == [Welcome]


def test_the_next_target_may_lack_those_files_too_but_not_end_texts_elsewhere() -> None:
    more = replace(OF_THE_TARGET.fingerprint, digest="x and more", file_digest="x")
    before = replace(OF_THE_TARGET, fingerprint=more)
    assert replacement_difference(OF_THE_TARGET, before) is None
    other = replace(OF_THE_TARGET, fingerprint=replace(more, eos_ids=(3,)))
    assert "another tokenizer" in (replacement_difference(other, before) or "")


@pytest.mark.parametrize(
    "other",
    [
        replace(OF_THE_TARGET, num_parameters=2),
        replace(OF_THE_TARGET, dtype="bfloat16"),
        replace(OF_THE_TARGET, max_model_len=999),
    ],
)
def test_half_a_text_is_not_of_another_target(other: Hello) -> None:
    router = with_target(FIRST)
    beats(router, 0.1, TARGET)
    done = says(router, TARGET, replace(other, load_us=77))
    assert sent(done, TARGET) == [Fault]
    assert lines(done)
    again = replace(OF_THE_TARGET, load_us=77, model="/elsewhere/model", max_model_len=2000)
    done = says(router, TARGET, again)
    assert sent(done, TARGET) == [Welcome, Open]
    assert lines(done) == ["the target is there again"]


def test_a_target_that_is_refused_again_and_again_does_not_keep_the_texts_waiting() -> None:
    router = with_target(FIRST)
    beats(router, 0.1, TARGET)
    now, done = 0.1, []
    while not any(isinstance(one, Abort) for one in done):
        now += HEARTBEAT_INTERVAL_S
        assert now < 4 * SILENCE_LIMIT_S, "nobody notices that there is no target"
        beats(router, now, FIRST)
        beats(router, now, TARGET, stamped=False)
        router.handle(Arrived(TARGET, replace(OF_THE_TARGET, num_parameters=2)), now)
        done = router.handle(Tick(), now)
    assert now > 3 * SILENCE_LIMIT_S


# -- one that is late, lost, or back --------------------------------------------------------------


def test_texts_begin_without_a_drafter_that_does_not_come_and_it_joins_when_it_comes() -> None:
    router = waiting()
    assert lines(router.handle(Tick(), 100.0)) == [], "without a target nothing begins"
    says(router, TARGET, OF_THE_TARGET, 200.0)
    assert lines(router.handle(Tick(), 200.0 + 0.9 * JOIN_LIMIT_S)) == []
    assert not router.registry.none_expected(), "it may be on its way"
    assert lines(router.handle(Tick(), 200.0 + JOIN_LIMIT_S)) == [NOBODY_DRAFTS]
    assert router.registry.none_expected()
    assert lines(router.handle(Tick(), 201.0 + JOIN_LIMIT_S)) == [], "once"
    begun(router, text())
    done = says(router, FIRST, GOOD, 300.0)
    assert sent(done, FIRST) == [Welcome, Open]
    assert lines(done) == ["the drafter has joined on one"]


def test_where_no_drafter_is_wanted_nobody_waits_for_one_or_answers_it() -> None:
    router = waiting(with_drafter=False)
    says(router, TARGET, OF_THE_TARGET)
    assert router.registry.none_expected()
    assert says(router, FIRST, GOOD) == []
    assert router.handle(Tick(), 2 * JOIN_LIMIT_S) is not None
    assert len(router.registry.nodes) == 1


def test_a_drafter_that_is_lost_and_one_that_is_back_are_a_line_each() -> None:
    router = with_target(FIRST)
    said_so_far, now = silent_after(router, TARGET)
    assert said_so_far == ["the drafter has been silent for 5 s; going on without drafts"]
    done = says(router, FIRST, replace(GOOD, load_us=99), now)
    assert lines(done) == ["the drafter is there again"]
    assert lines(beats(router, now + 0.1, FIRST)) == []
    # One that was stopped, and goes on where it was.
    said_so_far, now = silent_after(router, TARGET, since=now + 0.1)
    assert len(said_so_far) == 1
    assert lines(beats(router, now, FIRST)) == ["the drafter is there again"]
    # One whose successor was faster than the limit of silence.
    assert lines(says(router, FIRST, replace(GOOD, load_us=100), now)) == [
        "the drafter is there again"
    ]


def test_only_another_process_in_the_place_of_one_by_hand_counts_as_a_restart() -> None:
    def restarts() -> dict[str, int]:
        return taken(router, Tally(), {}, now).restarts

    router = with_target(FIRST)
    now = 0.0
    says(router, FIRST, replace(GOOD, load_us=10))  # the same one
    says(router, SECOND, replace(GOOD, load_us=11))
    says(router, SECOND, OTHER)  # refused
    _, now = silent_after(router, TARGET)
    beats(router, now, FIRST)  # it was stopped, and goes on
    assert restarts() == {}
    says(router, FIRST, replace(GOOD, load_us=99), now)
    assert restarts() == {"drafter": 1}
    router.handle(Arrived(FIRST, Fault(0, 0, FaultCode.FAILED, "its device is gone")), now)
    says(router, FIRST, replace(GOOD, load_us=100), now)
    assert restarts() == {"drafter": 2}
    says(router, TARGET, replace(OF_THE_TARGET, load_us=101), now)
    assert restarts() == {"drafter": 2, "target": 1}


@pytest.mark.parametrize("role", Role)
def test_one_with_fewer_lanes_goes_on_with_as_many_texts(role: Role) -> None:
    router = with_target(FIRST)
    for session in (2, 3, 4):
        begun(router, text(session))
    before = OF_THE_TARGET if role is Role.TARGET else GOOD
    node = TARGET if role is Role.TARGET else FIRST
    done = says(router, node, replace(before, num_lanes=2, load_us=99))
    opens = [one for one in decoded(done, node) if isinstance(one, Open)]
    assert [one.session for one in opens] == [1, 2]
    done = router.handle(TextLeft(1, is_complete=False), 0.0)
    router.check()
    opens = [one for one in decoded(done, node) if isinstance(one, Open)]
    assert [one.session for one in opens] == [3], "the next one gets the lane"


def test_an_introduction_that_is_said_twice_is_of_one_process() -> None:
    router = with_target(FIRST)
    assert lines(says(router, FIRST, replace(GOOD, load_us=10))) == []
    assert forwarded(router, FIRST, draft((1, 2), 3)) == (TARGET,)


def test_a_drafter_that_has_failed_may_be_started_again_under_its_name() -> None:
    router = with_target(FIRST)
    failed = Fault(0, 0, FaultCode.UNUSABLE, "the device has been taken away")
    assert lines(router.handle(Arrived(FIRST, failed), 1.0)) == [
        "the drafter failed: the device has been taken away; going on without drafts"
    ]
    assert beats(router, 1.1, FIRST) == [], "what it still says counts for nothing"
    done = says(router, FIRST, replace(GOOD, load_us=99), 2.0)
    assert lines(done) == ["the drafter is there again"]
    assert sent(done, FIRST) == [Welcome, Open]


# -- several drafters -----------------------------------------------------------------------------


def test_several_drafters_join_each_under_its_name() -> None:
    router = with_target(FIRST)
    names = [b"drafter-%d" % number for number in range(2, 6)]
    for number, name in enumerate(names):
        done = says(router, name, replace(GOOD, load_us=50 + number))
        assert sent(done, name) == [Welcome, Open]
        assert lines(done) == [f"{name.decode()} has joined on one"]
    assert says(router, b"drafter-6", GOOD) == []
    assert set(forwarded(router, TARGET, said(3))) == {FIRST, *names}
    sources = {node.source for node in router.registry.ready(Role.DRAFTER)}
    assert len(sources) == 5
    said_so_far, now = silent_after(router, TARGET, *names)
    assert said_so_far == ["drafter-1 has been silent for 5 s; going on without it"]
    done = says(router, FIRST, replace(GOOD, load_us=99), now)
    assert lines(done) == ["drafter-1 is there again"]


def test_of_two_drafters_each_is_told_of_by_its_name_whichever_comes_first() -> None:
    router = waiting()
    says(router, TARGET, OF_THE_TARGET)
    assert lines(says(router, SECOND, GOOD)) == ["drafter-2 has joined on one"]
    assert lines(says(router, FIRST, replace(GOOD, load_us=9))) == ["drafter-1 has joined on one"]
    nodes = router.registry.ready(Role.DRAFTER)
    assert [router.registry.name(node) for node in nodes] == ["drafter-1", "drafter-2"]


def test_a_drafter_alone_under_the_first_name_is_the_drafter() -> None:
    router = with_target(FIRST)
    (node,) = router.registry.ready(Role.DRAFTER)
    assert (router.registry.name(node), router.registry.title(node)) == ("drafter", "the drafter")


def test_the_place_of_a_drafter_is_not_taken_for_that_of_another() -> None:
    router = with_target(FIRST, SECOND)
    assert says(router, b"drafter-3", OF_THE_TARGET) == []
    fault = says(router, SECOND, replace(OF_THE_TARGET, load_us=5))
    assert sent(fault, SECOND) == [Fault]
    node = router.registry.find(SECOND)
    assert node is not None
    assert (node.role, node.health) == (Role.DRAFTER, Health.READY)


def test_a_drafter_killed_ten_times_in_a_row_ends_no_text_and_drafts_again() -> None:
    router = with_target(FIRST)
    texts = [begun(router, text(session)) for session in range(2, 9)]
    now = 0.0
    for number in range(10):
        beats(router, now, FIRST)
        said_so_far, now = silent_after(router, TARGET, since=now)
        assert len(said_so_far) == 1
        done = says(router, FIRST, replace(GOOD, load_us=1000 + number), now)
        assert sent(done, FIRST) == [Welcome, *[Open] * 8]
        assert Close not in sent(done, TARGET)
    assert not any(running.machine.ended for running in texts)
    assert forwarded(router, FIRST, draft((1, 2), 3), now) == (TARGET,)
