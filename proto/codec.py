"""Messages <-> frames. The only file that knows msgpack.

A frame is one kind byte and one msgpack array of the message's fields in order. Number arrays
travel as little-endian binary, so a forwarder passes them on unread, and a decoder checks their
length first. Decoding checks every type, range and size and raises `RemoteProtocolError`; encoding
runs the same checks and raises `LocalProtocolError`, so that a fault is found at the end that made
it.
"""

import struct
from typing import Any

import msgpack

from proto import messages as m
from proto.consistency import check
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.fields import (
    FLAG,
    I31,
    U16,
    U32,
    U63,
    U64,
    Field,
    array,
    binary,
    enum,
    integer,
    number,
    optional,
    ragged,
    record,
    several,
    text,
)
from proto.stopwatch import Phase

LONGEST_TEXT = 2000  # in characters, of at most four bytes each

_HASH = integer(0, U64)
_SESSION = _ATTEMPT = integer(0, U63)
_INCARNATION = _COUNT = integer(0, U32)
_SOURCE = integer(0, m.MAX_SOURCES - 1)
_LENGTH = integer(0, m.MAX_TEXT_LEN)
_MICROSECONDS = integer(0, U63)
_TOKENS = array("i", 0, I31, m.MAX_TEXT_LEN)
_DRAFTED = array("i", 0, I31, m.MAX_NODES_PER_DRAFT)

_SAMPLING = record(
    m.SamplingSpec,
    number(0.0, 100.0),
    integer(0, I31),
    number(0.0, 1.0),
    integer(0, U64),
    integer(0, U16),
    number(0.0, 1.0),
    number(1e-3, 1e3),
    number(-2.0, 2.0),
    number(-2.0, 2.0),
    array("i", 0, I31, m.MAX_BIASES),
    array("f", -100.0, 100.0, m.MAX_BIASES),
    ragged(m.MAX_BANS, m.MAX_BAN_TOKENS),
    _LENGTH,
    array("i", 0, I31, 2 * m.MAX_STOP_IDS),
    integer(m.OFF, m.MAX_LOGPROBS),
    integer(m.OFF, m.MAX_LOGPROBS),
)
_LOGPROBS = record(
    m.Logprobs,
    array("i", 0, I31, m.MAX_LOGPROB_VALUES),
    array("f", -1e30, 0.0, m.MAX_LOGPROB_VALUES),
    array("i", 1, I31, m.MAX_LOGPROB_VALUES),
)
_PROPOSAL = record(
    m.Proposal,
    array("i", 0, I31, m.MAX_CANDIDATES),
    array("f", 0.0, 1.0, m.MAX_CANDIDATES),
)
_POLICY = record(
    m.Policy,
    text(32),
    *[integer(0, m.MAX_WINDOW)] * 5,
    number(-1e9, 0.0),
    _COUNT,
    integer(1, m.MAX_WIDTH),
    integer(1, m.MAX_BRANCHES),
    integer(0, m.MAX_WINDOW),
    FLAG,
)
_LIMITS = record(m.Limits, _LENGTH, array("i", 0, I31, m.MAX_STOP_IDS))
_LOOKUP = record(
    m.Lookup,
    integer(1, m.MAX_NGRAM),
    integer(1, m.MAX_NGRAM),
    array("i", 0, I31, m.MAX_REFERENCE_LEN),
    FLAG,
)
_ACK = record(m.Ack, _SOURCE, _INCARNATION, _COUNT)
_FINGERPRINT = record(m.Fingerprint, integer(1, I31), text(128), array("i", 0, I31, 256))
_TRACE_RECORDS = binary(m.TRACE_RECORD_BYTES, 0, m.MAX_TRACE_RECORDS)
_LAYERS = array("i", -1, U16, m.MAX_LAYERS)
_MARK = record(m.SessionMark, _SESSION, _INCARNATION, _LENGTH, _HASH)

_SCHEMAS: dict[type[Any], Field] = {
    m.Open: record(
        m.Open,
        _SESSION,
        _INCARNATION,
        binary(m.SESSION_KEY_BYTES),
        _TOKENS,
        _LENGTH,
        _SAMPLING,
        _POLICY,
        _LIMITS,
        enum(m.Rule),
        _ATTEMPT,
        optional(_LOOKUP),
        _LAYERS,
    ),
    m.Draft: record(
        m.Draft,
        _SESSION,
        _INCARNATION,
        _SOURCE,
        _COUNT,
        _COUNT,
        _HASH,
        _LENGTH,
        _DRAFTED,
        array("h", -1, m.MAX_NODES_PER_DRAFT - 1, m.MAX_NODES_PER_DRAFT),
        array("f", -1e30, 0.0, m.MAX_NODES_PER_DRAFT),
        FLAG,
        _MICROSECONDS,
        _COUNT,
        _ATTEMPT,
        several(_PROPOSAL, m.MAX_WINDOW),
    ),
    m.Verdict: record(
        m.Verdict,
        _SESSION,
        _INCARNATION,
        _LENGTH,
        _HASH,
        array("i", 0, I31, m.MAX_TOKENS_PER_VERDICT),
        several(_ACK, m.MAX_SOURCES),
        enum(m.Cause),
        *[_COUNT] * 4,
        *[_MICROSECONDS] * 4,
        _DRAFTED,
        _ATTEMPT,
        optional(_LOGPROBS),
        array("B", 0, m.MAX_SOURCES - 1, m.MAX_NODES_PER_DRAFT),
        enum(m.Hit),
        _MICROSECONDS,
    ),
    m.Close: record(m.Close, _SESSION, text(200)),
    m.Hello: record(
        m.Hello,
        _COUNT,
        enum(m.Role),
        text(128),
        _FINGERPRINT,
        *[integer(1, I31)] * 2,
        *(text(400), text(32), text(64)),
        integer(0, U63),
        _MICROSECONDS,
        integer(1, m.MAX_SESSIONS),
        *(text(256), text(64)),
        *[_MICROSECONDS] * 2,
        _LAYERS,
        *[integer(0, I31)] * 2,
        text(64),
    ),
    m.Welcome: record(m.Welcome, integer(1, I31), _SOURCE, FLAG),
    m.Heartbeat: record(
        m.Heartbeat,
        several(_MARK, m.MAX_SESSIONS),
        _COUNT,
        text(200),
        array("q", 0, U63, len(Phase)),
        *[_COUNT] * 2,
        *[_MICROSECONDS] * 4,
    ),
    m.Fault: record(m.Fault, _SESSION, _INCARNATION, enum(m.FaultCode), text(LONGEST_TEXT)),
    m.Features: record(
        m.Features,
        _SESSION,
        _INCARNATION,
        _LENGTH,
        _HASH,
        integer(1, m.MAX_TEXT_LEN),
        text(16),
        binary(1, 1, m.MAX_FEATURE_BYTES),
    ),
    m.PromptLogprobs: record(m.PromptLogprobs, _SESSION, _INCARNATION, _LENGTH, _LOGPROBS),
    m.TracePart: record(m.TracePart, _COUNT, _COUNT, _TRACE_RECORDS),
}
_KINDS = list(_SCHEMAS)
# What follows msgpack's first byte of an unsigned integer; a small one is that byte.
_INTEGERS = {0xCC + index: struct.Struct(f">{code}") for index, code in enumerate("BHIQ")}
_KIND_BYTES = {kind: bytes([index]) for index, kind in enumerate(_KINDS)}


def encode(message: m.Message) -> bytes:
    """The frame of a message. Raises LocalProtocolError if it breaks a limit."""
    kind = type(message)
    try:
        body = _SCHEMAS[kind].write(message)
        check(message)
    except (ValueError, TypeError) as error:
        raise LocalProtocolError(f"{kind.__name__}: {error}") from error
    frame: bytes = _KIND_BYTES[kind] + msgpack.packb(body)
    if len(frame) > m.MAX_FRAME_BYTES:
        raise LocalProtocolError(f"{kind.__name__}: {len(frame)} bytes do not fit into a frame")
    return frame


def decode(frame: bytes) -> m.Message:
    """The message of a frame. Raises RemoteProtocolError for anything that is not one."""
    kind = kind_of(frame)
    if len(frame) > m.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"{kind.__name__}: a frame of {len(frame)} bytes is too long")
    try:
        body = msgpack.unpackb(
            memoryview(frame)[1:],
            raw=False,
            strict_map_key=True,
            max_array_len=m.MAX_SESSIONS,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=4 * LONGEST_TEXT,
            max_bin_len=max(4 * m.MAX_TEXT_LEN, m.MAX_FEATURE_BYTES),
        )
        message: m.Message = _SCHEMAS[kind].read(body)
        check(message)
    # msgpack raises ValueError subclasses, but StackError and UnpackException are not all of them.
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{kind.__name__}: {error}") from error
    return message


def session_of(frame: bytes) -> int:
    """The session of a message whose first field it is, without decoding the rest.

    Raises RemoteProtocolError if no number stands there.
    """
    try:
        # An array of up to 15 items has a header of one byte, a longer one of three.
        start = 2 if frame[1] < 0xA0 else 4
        first = frame[start]
        if first < 0x80:
            return first
        session: int = _INTEGERS[first].unpack_from(frame, start + 1)[0]
    except (LookupError, struct.error) as error:
        raise RemoteProtocolError("a frame of no session") from error
    return session


def kind_of(frame: bytes) -> type[Any]:
    """The class of the message in a frame, without decoding it."""
    if not frame or frame[0] >= len(_KINDS):
        raise RemoteProtocolError("a frame of no known kind")
    return _KINDS[frame[0]]
