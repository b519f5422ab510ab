"""Every message survives the wire, and nothing else gets through it."""

from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import messages as m
from proto.codec import decode, encode, head_of, kind_of, session_of
from proto.errors import LocalProtocolError, RemoteProtocolError
from tests.policies import synchronous
from tests.proto import wire

LIMITS = m.Limits(max_len=100, stop_ids=(2,))
LOOKUP = m.Lookup(2, 4, (7, 8))
OPEN = m.Open(1, 1, bytes(16), (5, 6), 2, m.SamplingSpec(), synchronous(4), LIMITS, lookup=LOOKUP)
DRAFT = m.Draft(1, 1, 0, 1, 1, 77, 2, (5, 6), (-1, 0), (-0.5, -0.25), False, 10)
VERDICT = m.Verdict(1, 1, 2, 77, (5, 6), (m.Ack(0, 1, 1),), m.Cause.READY, 2, 1, 1, 0, 1, 2, 3)
FINGERPRINT = m.Fingerprint(100, "digest", (2,))
HELLO = m.Hello(1, m.Role.TARGET, "s", FINGERPRINT, 100, 100, "model", "float32", "cpu", 9, 9, 8)
HEARTBEAT = m.Heartbeat((m.SessionMark(1, 1, 2, 77),), 5, "idle", (), (), 3)
FAULT = m.Fault(1, 1, m.FaultCode.GAP, "what is wrong")
ROWS = m.Logprobs((5, 7, 6, 6), (-1.0, -0.5, -0.25, -0.25), (2, 1))
PROMPT = m.PromptLogprobs(1, 1, 1, ROWS)
EXAMPLES: tuple[m.Message, ...] = (
    OPEN,
    DRAFT,
    VERDICT,
    m.Close(1, "stop"),
    HELLO,
    m.Welcome(100, 2, traced=True),
    HEARTBEAT,
    FAULT,
    m.Features(1, 1, 9, 7, 2, "bfloat16", bytes(16)),
    PROMPT,
    m.TracePart(1, 0, bytes(m.TRACE_RECORD_BYTES)),
    m.Features(1, 2, 9, 77, 2, "bfloat16", bytes(8)),
)
OPTIONAL = {"lookup"}
NAMES = [type(example).__name__ for example in EXAMPLES]


def broken(message: m.Message, **changes: Any) -> m.Message:
    """The message with some fields that it must not have."""
    changed: m.Message = replace(message, **changes)
    return changed


def _decodes_or_is_refused(frame: bytes) -> bool:
    """Whether it decodes; anything but a message or RemoteProtocolError fails the test."""
    try:
        message = decode(frame)
    except RemoteProtocolError:
        return False
    assert decode(encode(message)) == message
    return True


@given(wire.messages)
def test_every_message_comes_back_as_it_was(message: m.Message) -> None:
    frame = encode(message)
    assert kind_of(frame) is type(message)
    assert decode(frame) == message


@given(wire.messages, st.data())
def test_a_frame_that_is_cut_short_is_refused(message: m.Message, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(RemoteProtocolError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(wire.messages, st.binary(min_size=1, max_size=8))
def test_a_frame_with_something_behind_it_is_refused(message: m.Message, more: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(message) + more)


@given(wire.messages, st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4))
def test_flipped_bits_do_no_harm(message: m.Message, flips: list[int]) -> None:
    frame = bytearray(encode(message))
    for flip in flips:
        frame[flip // 8 % len(frame)] ^= 1 << flip % 8
    assert _decodes_or_is_refused(bytes(frame)) in (True, False)


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_every_single_flipped_bit_does_no_harm(example: m.Message) -> None:
    frame = encode(example)
    outcomes = []
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        outcomes.append(_decodes_or_is_refused(bytes(flipped)))
    assert not all(outcomes)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    assert _decodes_or_is_refused(noise) in (True, False)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=16),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=16), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(st.integers(0, len(EXAMPLES) + 2), values)
def test_a_well_formed_frame_of_anything_does_no_harm(kind: int, body: Any) -> None:
    assert _decodes_or_is_refused(bytes([kind]) + msgpack.packb(body)) in (True, False)


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_field_of_another_type_is_refused(example: m.Message) -> None:
    frame = encode(example)
    body = msgpack.unpackb(frame[1:])
    others: list[Any] = [None, True, 0, -1, 0.5, 1 << 63, "text", b"bytes", [], [[]], {}]
    for index, right in enumerate(body):
        for other in others:
            if type(other) is type(right):
                continue
            if type(right) is float and type(other) is int:
                continue
            if other is None and fields(example)[index].name in OPTIONAL:
                continue
            wrong = [*body[:index], other, *body[index + 1 :]]
            with pytest.raises(RemoteProtocolError):
                decode(frame[:1] + msgpack.packb(wrong))


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_message_with_a_field_more_or_less_is_refused(example: m.Message) -> None:
    frame = encode(example)
    body = msgpack.unpackb(frame[1:])
    assert len(body) == len(fields(example))
    for wrong in (body[:-1], [*body, 0], []):
        with pytest.raises(RemoteProtocolError):
            decode(frame[:1] + msgpack.packb(wrong))


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        decode(encode(m.Welcome(1, 0)) + bytes(m.MAX_FRAME_BYTES))


def test_an_unknown_kind_is_refused() -> None:
    for frame in (b"", bytes([len(EXAMPLES)]), b"\xff\x90"):
        with pytest.raises(RemoteProtocolError, match="no known kind"):
            kind_of(frame)


def test_the_longest_text_fits_into_a_frame() -> None:
    limits = m.Limits(m.MAX_TEXT_LEN, ())
    longest = replace(OPEN, tokens=(wire.I31,) * (m.MAX_TEXT_LEN - 1), limits=limits)
    assert decode(encode(longest)) == longest


@pytest.mark.parametrize(
    "message",
    [
        broken(OPEN, lookup=m.Lookup(0, 4)),
        broken(
            OPEN,
            lookup=m.Lookup(2, 4, remember=True),
            rule=m.Rule.TOKEN,
            sampling=m.SamplingSpec(temperature=1.0),
        ),
        broken(OPEN, lookup=m.Lookup(5, 4)),
        broken(OPEN, lookup=m.Lookup(2, m.MAX_NGRAM + 1)),
        broken(OPEN, lookup=m.Lookup(2, 4, (0,) * (m.MAX_REFERENCE_LEN + 1))),
        broken(VERDICT, sources=(0, 0)),
        broken(VERDICT, sources=(m.MAX_SOURCES,)),
    ],
)
def test_n_gram_drafts_beyond_their_limits_are_refused(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError):
        encode(message)


@pytest.mark.parametrize(
    "message",
    [
        broken(OPEN, session=-1),
        broken(OPEN, incarnation=1 << 32),
        broken(OPEN, key=bytes(15)),
        broken(OPEN, tokens=(), num_prompt=0),
        broken(OPEN, num_prompt=0),
        broken(OPEN, num_prompt=3),
        broken(OPEN, limits=m.Limits(2, ())),
        broken(OPEN, limits=m.Limits(m.MAX_TEXT_LEN + 1, ())),
        broken(OPEN, policy=m.Policy("too wide", 4, 4, 4, m.MAX_WINDOW + 1)),
        broken(OPEN, policy=m.Policy("too many", m.MAX_WINDOW + 1, 4, 4, 4)),
        broken(OPEN, sampling=m.SamplingSpec(temperature=float("nan"))),
        broken(OPEN, sampling=m.SamplingSpec(top_p=1.5)),
        broken(OPEN, sampling=m.SamplingSpec(min_p=-0.1)),
        broken(OPEN, sampling=m.SamplingSpec(repetition_penalty=0.0)),
        broken(OPEN, sampling=m.SamplingSpec(presence_penalty=2.5)),
        broken(OPEN, sampling=m.SamplingSpec(bias_ids=(1, 2), bias_values=(1.0,))),
        broken(OPEN, sampling=m.SamplingSpec(bias_ids=(1,), bias_values=(float("inf"),))),
        broken(OPEN, sampling=m.SamplingSpec(banned=((),))),
        broken(OPEN, sampling=m.SamplingSpec(banned=((1,),) * (m.MAX_BANS + 1))),
        broken(OPEN, sampling=m.SamplingSpec(num_logprobs=m.MAX_LOGPROBS + 1)),
        broken(VERDICT, logprobs=ROWS.part(0, 1)),
        broken(VERDICT, logprobs=m.Logprobs((5, 6), (-1.0, -2.0), (1, 0))),
        broken(VERDICT, logprobs=m.Logprobs((5, 6), (-1.0, 0.5), (1, 1))),
        broken(VERDICT, logprobs=m.Logprobs((5, 6, 7), (-1.0, -1.0, -1.0), (1, 1))),
        broken(PROMPT, start=0),
        broken(DRAFT, tokens=(5,)),
        broken(DRAFT, tokens=(-1, 6)),
        broken(DRAFT, tokens=("a", "b")),
        broken(DRAFT, tokens=None),
        broken(DRAFT, parents=(0, 1)),
        broken(DRAFT, parents=(-2, 0)),
        *(broken(DRAFT, scores=(score, -0.25)) for score in (0.5, float("nan"), float("-inf"))),
        broken(DRAFT, first_number=2),
        broken(DRAFT, source=m.MAX_SOURCES),
        broken(DRAFT, source=m.NGRAM_SOURCE),
        broken(DRAFT, done=1),
        broken(DRAFT, parent_hash=1 << 64),
        broken(
            DRAFT,
            tokens=(1,) * (m.MAX_NODES_PER_DRAFT + 1),
            parents=(-1,) * (m.MAX_NODES_PER_DRAFT + 1),
            scores=(0.0,) * (m.MAX_NODES_PER_DRAFT + 1),
        ),
        broken(VERDICT, num_accepted=3),
        broken(VERDICT, rejected=(1, 2)),
        broken(VERDICT, tokens=(1,) * (m.MAX_TOKENS_PER_VERDICT + 1)),
        broken(VERDICT, base_len=m.MAX_TEXT_LEN),
        broken(VERDICT, acks=(m.Ack(0, 1, 1),) * (m.MAX_SOURCES + 1)),
        broken(VERDICT, acks=[m.Ack(0, 1, 1)]),
        broken(VERDICT, cause=9),
        *(broken(HELLO, num_lanes=number) for number in (0, m.MAX_SESSIONS + 1)),
        m.Close(1, "x" * 201),
        m.Close(1, m.FinishReason.STOP),
        m.Close(1, "half a character: \ud800"),
        broken(HELLO, role="spectator"),
        broken(HELLO, fingerprint=m.Fingerprint(0, "", ())),
        m.Welcome(100, m.MAX_SOURCES),
        broken(HEARTBEAT, marks=HEARTBEAT.marks * (m.MAX_SESSIONS + 1)),
        broken(FAULT, code="boredom"),
        broken(FAULT, detail="x" * 2001),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_beyond_its_limits_is_refused_where_it_is_made(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        encode(message)


def test_what_the_encoder_refuses_the_decoder_refuses_too() -> None:
    frame = encode(DRAFT)
    body = msgpack.unpackb(frame[1:])
    body[8] = b"\x00\x00\x01\x00"  # parents (0, 1): the first hangs on itself
    with pytest.raises(RemoteProtocolError, match="parent must come before"):
        decode(frame[:1] + msgpack.packb(body))


@pytest.mark.parametrize("session", [0, 127, 128, 255, 256, 1 << 16, 1 << 32, (1 << 63) - 1])
@pytest.mark.parametrize("message", [DRAFT, VERDICT, OPEN], ids=lambda one: type(one).__name__)
def test_the_session_of_a_frame_is_read_without_the_rest(session: int, message: Any) -> None:
    frame = encode(replace(message, session=session))
    assert session_of(frame) == session
    assert session_of(frame[:16] + b"what follows may be anything") == session


@pytest.mark.parametrize("session", [1, 300, (1 << 63) - 1])
@pytest.mark.parametrize("incarnation", [0, 127, 128, 70_000, (1 << 32) - 1])
def test_the_first_fields_of_a_frame_are_read_without_the_rest(
    session: int, incarnation: int
) -> None:
    draft = encode(replace(DRAFT, session=session, incarnation=incarnation, source=5))
    assert head_of(draft, 3) == [session, incarnation, 5]
    verdict = encode(replace(VERDICT, session=session, incarnation=incarnation))
    assert head_of(verdict, 3) == [session, incarnation, VERDICT.base_len]
    with pytest.raises(RemoteProtocolError, match="no session number"):
        head_of(encode(m.Close(session, "stop")), 2)


@pytest.mark.parametrize("junk", [b"", b"\x01", b"\x01\xdc\x00", b"\x01\x91\xcf\x00"])
def test_a_frame_without_a_session_is_garbled(junk: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        session_of(junk)


def test_the_longest_grammar_arrives_whole() -> None:
    sampling = m.SamplingSpec(grammar="\U0001f600" * m.MAX_GRAMMAR_LEN, end_ids=(1, 2))
    message = broken(OPEN, sampling=sampling)
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "sampling",
    [
        m.SamplingSpec(grammar="x" * (m.MAX_GRAMMAR_LEN + 1)),
        m.SamplingSpec(grammar="\ud800"),
        m.SamplingSpec(grammar="x", end_ids=(-1,)),
    ],
)
def test_another_grammar_is_not_sent(sampling: m.SamplingSpec) -> None:
    with pytest.raises(LocalProtocolError, match="Open"):
        encode(broken(OPEN, sampling=sampling))


def test_lengths_that_do_not_add_up_are_refused() -> None:
    frame = encode(broken(OPEN, sampling=m.SamplingSpec(banned=((1, 2), (3,)))))
    body = msgpack.unpackb(frame[1:])
    banned = body[5][11]
    for numbers in (banned[1][:-4], banned[1] + bytes(4)):
        body[5][11] = [banned[0], numbers]
        with pytest.raises(RemoteProtocolError, match="do not add up"):
            decode(frame[:1] + msgpack.packb(body))


@pytest.mark.parametrize("size", [1, m.TRACE_RECORD_BYTES + 1, (m.MAX_TRACE_RECORDS + 1) * 16])
def test_records_of_a_trace_are_whole_and_not_too_many(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="TracePart"):
        encode(m.TracePart(1, 0, bytes(size)))
