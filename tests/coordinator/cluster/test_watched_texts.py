"""Drafts are decoded by the coordinator only for texts whose readers want to know of them."""

from dataclasses import replace

from coordinator.cluster.router_events import Arrived, Deliver, TextLeft
from coordinator.text.session import Session
from coordinator.text.session_events import Emit
from coordinator.text.timed_session import TimedSession
from coordinator.text.watching import DraftSpan
from proto.codec import encode
from proto.messages import Draft, Verdict
from tests.coordinator.cluster.routers import FIRST, SECOND, TARGET, begun, router_of, text
from tests.texts import KEY, LIMITS, SPEC, SYNC_4, draft, verdict

DRAFT = draft((1, 2), 3, model_us=1000)


def watched(session: int) -> TimedSession:
    machine = Session(
        session, KEY, (1, 2), sampling=SPEC, policy=SYNC_4, limits=LIMITS, is_watched=True
    )
    return TimedSession(machine, 0.0)


def test_only_drafts_of_a_watched_text_are_decoded_and_only_while_it_is_open() -> None:
    router = router_of(FIRST, max_num_seqs=2)
    begun(router, text(1))
    assert not router.watches(Draft, encode(DRAFT))
    begun(router, watched(2))
    frames = {number: encode(replace(DRAFT, session=number)) for number in (1, 2)}
    assert [router.watches(Draft, frame) for frame in frames.values()] == [False, True]
    assert not router.watches(Verdict, frames[2])
    router.handle(TextLeft(2, is_complete=False), 0.0)
    assert not router.watches(Draft, frames[2])
    router.check()


def test_the_reader_of_a_watched_text_gets_spans_of_its_own_drafters_alone() -> None:
    router = router_of(FIRST)
    begun(router, watched(1))
    for node in (FIRST, SECOND, TARGET):  # the other two draft for nobody
        router.handle(Arrived(node, replace(DRAFT, incarnation=2)), 0.1)
    done = router.handle(Arrived(TARGET, verdict((1, 2), 3)), 0.2)
    (emit,) = [action.item for action in done if isinstance(action, Deliver)]
    assert isinstance(emit, Emit)
    assert sum(isinstance(span, DraftSpan) for span in emit.spans) == 1
