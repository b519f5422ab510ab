"""What left here is what came there."""

from collections.abc import Sequence
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from coordinator.tracing.spans import Hop, Note, hops_of
from coordinator.tracing.tape import Passed
from proto.codec import encode
from proto.messages import Features
from tests.coordinator.tracing.recordings import DRAFT, DRAFTER, TARGET, VERDICT

FRAME = encode(DRAFT)


def note(ns: int, frame: bytes = FRAME, *, is_sent: bool) -> Note:
    return Note(ns, is_sent, frame[0], crc32(frame))


def ends(hops: Sequence[Hop]) -> list[tuple[int, bool, int | None, int | None]]:
    """Of each: the message's number, its direction, when it left and came."""
    return [(one.number, one.is_to_node, one.sent_ns, one.received_ns) for one in hops]


def test_a_draft_that_is_passed_on_is_one_message() -> None:
    frames = [
        Passed(20, DRAFTER, is_sent=False, frame=FRAME),
        Passed(21, TARGET, is_sent=True, frame=FRAME),
        Passed(30, TARGET, is_sent=False, frame=encode(VERDICT)),
    ]
    notes = {DRAFTER: [note(10, is_sent=True)], TARGET: [note(25, is_sent=False)]}
    hops = hops_of(frames, notes)
    assert ends(hops) == [(1, False, 10, 20), (1, True, 21, 25), (2, False, None, 30)]
    assert [one.kind for one in hops] == ["Draft", "Draft", "Verdict"]
    assert hops[0].message == DRAFT
    assert hops[0].session == DRAFT.session


def test_what_is_said_again_is_another_message() -> None:
    frames = [Passed(ns, DRAFTER, is_sent=False, frame=FRAME) for ns in (20, 40)]
    notes = {DRAFTER: [note(10, is_sent=True), note(30, is_sent=True)]}
    assert ends(hops_of(frames, notes)) == [(1, False, 10, 20), (2, False, 30, 40)]


def test_of_the_same_frames_the_one_that_was_lost_is_the_earlier() -> None:
    frames = [Passed(40, DRAFTER, is_sent=False, frame=FRAME)]
    notes = {DRAFTER: [note(10, is_sent=True), note(30, is_sent=True)]}
    assert ends(hops_of(frames, notes)) == [(1, False, 30, 40), (2, False, 10, None)]
    frames = [Passed(ns, TARGET, is_sent=True, frame=FRAME) for ns in (10, 30)]
    notes = {TARGET: [note(35, is_sent=False)]}
    assert [hop.received_ns for hop in hops_of(frames, notes)] == [None, 35]


def test_a_message_is_found_although_by_two_clocks_it_came_before_it_was_sent() -> None:
    frames = [Passed(1000, TARGET, is_sent=True, frame=FRAME)]
    (hop,) = hops_of(frames, {TARGET: [note(990, is_sent=False)]}, slack_ns=10)
    assert (hop.sent_ns, hop.received_ns) == (1000, 990)
    (hop,) = hops_of(frames, {TARGET: [note(990, is_sent=False)]}, slack_ns=9)
    assert hop.received_ns is None


def test_garbled_frames_are_messages_of_no_kind() -> None:
    frames = [Passed(5, TARGET, is_sent=False, frame=b"\xff!"), Passed(6, TARGET, False, b"\x01")]
    hops = hops_of(frames, {})
    assert [hop.kind for hop in hops] == ["garbled frame", "Draft"]
    assert [hop.message for hop in hops] == [None, None]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12))
def test_over_a_link_that_keeps_the_order_every_message_is_found(
    sent: list[tuple[int, bool]],
) -> None:
    """Each way takes a millisecond, and some are lost, all of the same bytes."""
    way_ns, at_ns = 1_000_000, 0
    frames: list[Passed] = []
    notes: list[Note] = []
    expected = 0
    for gap_ms, is_lost in sent:
        at_ns += gap_ms * 2 * way_ns
        frames.append(Passed(at_ns, TARGET, is_sent=True, frame=FRAME))
        if not is_lost:
            notes.append(note(at_ns + way_ns, is_sent=False))
            expected += 1
    hops = hops_of(frames, {TARGET: notes})
    assert sum(hop.received_ns is not None for hop in hops) == expected
    for hop, (_, is_lost) in zip(hops, sent, strict=True):
        assert (hop.received_ns is None) == is_lost


def test_features_of_which_the_head_was_kept_are_followed_to_their_reader() -> None:
    frame = encode(Features(7, 1, 9, 123, 4, "bfloat16", bytes(4096)))
    whole = len(frame), crc32(frame)
    frames = [
        Passed(20, TARGET, is_sent=False, frame=frame[:64], whole=whole),
        Passed(21, DRAFTER, is_sent=True, frame=frame[:64], whole=whole),
    ]
    notes = {
        TARGET: [note(10, frame, is_sent=True)],
        DRAFTER: [note(25, frame, is_sent=False)],
    }
    hops = hops_of(frames, notes)
    assert ends(hops) == [(1, False, 10, 20), (1, True, 21, 25)]
    assert [(one.kind, one.session, one.num_bytes) for one in hops] == [
        ("Features", 7, len(frame))
    ] * 2
    assert [one.message for one in hops] == [None, None]
    garbled = Passed(30, TARGET, is_sent=False, frame=frame[:1])
    assert hops_of([garbled], {})[0].session == 0
