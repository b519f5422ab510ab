"""Messages <-> frames. The only file that knows msgpack.

A frame is one kind byte and one msgpack array of the message's fields in order. Number arrays
travel as little-endian binary, so a forwarder passes them on unread, and a decoder checks their
length first. Decoding checks every type, range and size and raises `RemoteProtocolError`; encoding
runs the same checks and raises `LocalProtocolError`, so that a fault is found at the end that made
it.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import msgpack

from proto import messages as m
from proto.consistency import check
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.stopwatch import Phase

U16, U32, U63, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
I31 = (1 << 31) - 1
LONGEST_TEXT = 2000  # in characters, of at most four bytes each

Wire = Any  # a value as msgpack gives it, unchecked until a field has read it


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is written and read; both raise ValueError."""

    write: Callable[[Any], Wire]
    read: Callable[[Wire], Any]


def _checked(check: Callable[[Any], Any]) -> _Field:
    return _Field(check, check)


def _integer(low: int, high: int) -> _Field:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high}, got {value!r:.40}")
        return value

    return _checked(check)


def _number(low: float, high: float) -> _Field:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError(f"expected a number in {low}..{high}, got {value!r:.40}")
        return float(value)

    return _checked(check)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected a boolean, got {value!r:.40}")
    return value


def _text(limit: int) -> _Field:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > limit:
            raise ValueError(f"expected a text of at most {limit} characters, got {value!r:.40}")
        value.encode()  # raises UnicodeEncodeError, a ValueError, for half a character
        return value

    return _checked(check)


def _bytes(size: int, least: int = 1, most: int = 1) -> _Field:
    lengths = range(least * size, most * size + 1, size)

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) not in lengths:
            raise ValueError(f"expected {least}..{most} x {size} bytes, got {value!r:.40}")
        return value

    return _checked(check)


def _array(code: str, low: float, high: float, limit: int) -> _Field:
    """A tuple of numbers as binary; `code` is the struct code of an element."""
    size = struct.calcsize(code)

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(values) > limit:
            raise ValueError(f"expected at most {limit} numbers, got {len(values)}")
        if values and not (low <= min(values) and max(values) <= high):
            raise ValueError(f"expected numbers in {low}..{high}")
        if code == "f" and any(map(math.isnan, values)):
            raise ValueError("expected numbers, got NaN")
        return values

    def write(values: tuple[Any, ...]) -> bytes:
        try:
            return struct.pack(f"<{len(check(values))}{code}", *values)
        except struct.error as error:
            raise ValueError(str(error)) from error

    def read(data: Wire) -> tuple[Any, ...]:
        if type(data) is not bytes or len(data) % size or len(data) > limit * size:
            raise ValueError(f"expected binary of at most {limit} x {size} bytes")
        return check(struct.unpack(f"<{len(data) // size}{code}", data))

    return _Field(write, read)


def _ragged(most_rows: int, most_numbers: int) -> _Field:
    """A tuple of tuples of token ids: their lengths, and all of them in a row."""
    lengths = _array("i", 1, most_numbers, most_rows)
    numbers = _array("i", 0, I31, most_numbers)

    def write(rows: tuple[tuple[int, ...], ...]) -> list[bytes]:
        flat = tuple(number for row in rows for number in row)
        return [lengths.write(tuple(map(len, rows))), numbers.write(flat)]

    def read(value: Wire) -> tuple[tuple[int, ...], ...]:
        if type(value) is not list or len(value) != 2:
            raise ValueError("expected lengths and numbers")
        sizes, flat = lengths.read(value[0]), iter(numbers.read(value[1]))
        rows = tuple(tuple(islice(flat, size)) for size in sizes)
        if sum(map(len, rows)) != sum(sizes) or next(flat, None) is not None:
            raise ValueError("the lengths do not add up")
        return rows

    return _Field(write, read)


def _optional(field: _Field) -> _Field:
    """A field that may be None."""
    return _Field(
        lambda value: None if value is None else field.write(value),
        lambda value: None if value is None else field.read(value),
    )


def _enum(kind: type[Any]) -> _Field:
    value_type = int if issubclass(kind, int) else str

    def write(value: Any) -> Wire:
        return value_type(kind(value).value)

    def read(value: Wire) -> Any:
        if type(value) is not value_type:
            raise ValueError(f"expected a {kind.__name__}, got {value!r:.40}")
        return kind(value)

    return _Field(write, read)


def _record(kind: type[Any], *schema: _Field) -> _Field:
    """A dataclass as an array of its fields."""
    names = [field.name for field in fields(kind)]
    assert len(names) == len(schema), f"{kind.__name__} has {len(names)} fields"

    def write(value: Any) -> list[Wire]:
        body = []
        for name, field in zip(names, schema, strict=True):
            try:
                body.append(field.write(getattr(value, name)))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{name}: {error}") from error
        return body

    def read(value: Wire) -> Any:
        if type(value) is not list or len(value) != len(schema):
            raise ValueError(f"expected the {len(schema)} fields of {kind.__name__}")
        return kind(*[field.read(item) for field, item in zip(schema, value, strict=True)])

    return _Field(write, read)


def _several(item: _Field, limit: int) -> _Field:
    def each(function: Callable[[Any], Any], values: Any, kind: type[Any]) -> Any:
        if type(values) is not kind or len(values) > limit:
            raise ValueError(f"expected at most {limit} items")
        return [function(value) for value in values]

    return _Field(
        lambda values: each(item.write, values, tuple),
        lambda values: tuple(each(item.read, values, list)),
    )


_FLAG = _checked(_flag)
_HASH = _integer(0, U64)
_SESSION = _ATTEMPT = _integer(0, U63)
_INCARNATION = _COUNT = _integer(0, U32)
_SOURCE = _integer(0, m.MAX_SOURCES - 1)
_LENGTH = _integer(0, m.MAX_TEXT_LEN)
_MICROSECONDS = _integer(0, U63)
_TOKENS = _array("i", 0, I31, m.MAX_TEXT_LEN)
_DRAFTED = _array("i", 0, I31, m.MAX_NODES_PER_DRAFT)

_SAMPLING = _record(
    m.SamplingSpec,
    _number(0.0, 100.0),
    _integer(0, I31),
    _number(0.0, 1.0),
    _integer(0, U64),
    _integer(0, U16),
    _number(0.0, 1.0),
    _number(1e-3, 1e3),
    _number(-2.0, 2.0),
    _number(-2.0, 2.0),
    _array("i", 0, I31, m.MAX_BIASES),
    _array("f", -100.0, 100.0, m.MAX_BIASES),
    _ragged(m.MAX_BANS, m.MAX_BAN_TOKENS),
    _LENGTH,
    _array("i", 0, I31, 2 * m.MAX_STOP_IDS),
    _integer(m.OFF, m.MAX_LOGPROBS),
    _integer(m.OFF, m.MAX_LOGPROBS),
)
_LOGPROBS = _record(
    m.Logprobs,
    _array("i", 0, I31, m.MAX_LOGPROB_VALUES),
    _array("f", -1e30, 0.0, m.MAX_LOGPROB_VALUES),
    _array("i", 1, I31, m.MAX_LOGPROB_VALUES),
)
_PROPOSAL = _record(
    m.Proposal,
    _array("i", 0, I31, m.MAX_CANDIDATES),
    _array("f", 0.0, 1.0, m.MAX_CANDIDATES),
)
_POLICY = _record(
    m.Policy,
    _text(32),
    *[_integer(0, m.MAX_WINDOW)] * 5,
    _number(-1e9, 0.0),
    _COUNT,
    _integer(1, m.MAX_WIDTH),
    _integer(1, m.MAX_BRANCHES),
    _integer(0, m.MAX_WINDOW),
    _FLAG,
)
_LIMITS = _record(m.Limits, _LENGTH, _array("i", 0, I31, m.MAX_STOP_IDS))
_LOOKUP = _record(
    m.Lookup,
    _integer(1, m.MAX_NGRAM),
    _integer(1, m.MAX_NGRAM),
    _array("i", 0, I31, m.MAX_REFERENCE_LEN),
)
_ACK = _record(m.Ack, _SOURCE, _INCARNATION, _COUNT)
_FINGERPRINT = _record(m.Fingerprint, _integer(1, I31), _text(128), _array("i", 0, I31, 256))
_TRACE_RECORDS = _bytes(m.TRACE_RECORD_BYTES, 0, m.MAX_TRACE_RECORDS)
_MARK = _record(m.SessionMark, _SESSION, _INCARNATION, _LENGTH, _HASH)

_SCHEMAS: dict[type[Any], _Field] = {
    m.Open: _record(
        m.Open,
        _SESSION,
        _INCARNATION,
        _bytes(m.SESSION_KEY_BYTES),
        _TOKENS,
        _LENGTH,
        _SAMPLING,
        _POLICY,
        _LIMITS,
        _enum(m.Rule),
        _ATTEMPT,
        _optional(_LOOKUP),
    ),
    m.Draft: _record(
        m.Draft,
        _SESSION,
        _INCARNATION,
        _SOURCE,
        _COUNT,
        _COUNT,
        _HASH,
        _LENGTH,
        _DRAFTED,
        _array("h", -1, m.MAX_NODES_PER_DRAFT - 1, m.MAX_NODES_PER_DRAFT),
        _array("f", -1e30, 0.0, m.MAX_NODES_PER_DRAFT),
        _FLAG,
        _MICROSECONDS,
        _COUNT,
        _ATTEMPT,
        _several(_PROPOSAL, m.MAX_WINDOW),
    ),
    m.Verdict: _record(
        m.Verdict,
        _SESSION,
        _INCARNATION,
        _LENGTH,
        _HASH,
        _array("i", 0, I31, m.MAX_TOKENS_PER_VERDICT),
        _several(_ACK, m.MAX_SOURCES),
        _enum(m.Cause),
        *[_COUNT] * 4,
        *[_MICROSECONDS] * 4,
        _DRAFTED,
        _ATTEMPT,
        _optional(_LOGPROBS),
        _array("B", 0, m.MAX_SOURCES - 1, m.MAX_NODES_PER_DRAFT),
        _enum(m.Hit),
        _MICROSECONDS,
    ),
    m.Close: _record(m.Close, _SESSION, _text(200)),
    m.Hello: _record(
        m.Hello,
        _COUNT,
        _enum(m.Role),
        _text(128),
        _FINGERPRINT,
        *[_integer(1, I31)] * 2,
        *(_text(400), _text(32), _text(64)),
        _integer(0, U63),
        _MICROSECONDS,
        _integer(1, m.MAX_SESSIONS),
        *(_text(256), _text(64)),
        *[_MICROSECONDS] * 2,
    ),
    m.Welcome: _record(m.Welcome, _integer(1, I31), _SOURCE, _FLAG),
    m.Heartbeat: _record(
        m.Heartbeat,
        _several(_MARK, m.MAX_SESSIONS),
        _COUNT,
        _text(200),
        _array("q", 0, U63, len(Phase)),
        *[_COUNT] * 2,
        *[_MICROSECONDS] * 4,
    ),
    m.Fault: _record(m.Fault, _SESSION, _INCARNATION, _enum(m.FaultCode), _text(LONGEST_TEXT)),
    m.PromptLogprobs: _record(m.PromptLogprobs, _SESSION, _INCARNATION, _LENGTH, _LOGPROBS),
    m.TracePart: _record(m.TracePart, _COUNT, _COUNT, _TRACE_RECORDS),
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
            max_bin_len=4 * m.MAX_TEXT_LEN,
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
