"""Encodes messages as frames (bytes) and decodes them. The only file that uses msgpack.

A frame is one byte for the kind of message and one msgpack array of the message's fields in order.
Number arrays travel as little-endian binary, so a forwarder passes them on unread, and a decoder
checks their length first. Decoding checks every type, range and size and raises
`RemoteProtocolError`; encoding runs the same checks and raises `LocalProtocolError`, so that the
side that made a mistake is the one that finds it.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from typing import Any

import msgpack

from proto import messages as m
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.stopwatch import Phase

# -- fields ----------------------------------------------------------------------------------------

# How the fields of a message are written and read: types, ranges and sizes.
#
# A `Field` converts a value into one that msgpack can pack, and back. Both directions check the
# value and raise ValueError.

U16, U32, U63, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
I31 = (1 << 31) - 1

Wire = Any  # a value as msgpack returns it, unchecked until a field has read it


@dataclass(frozen=True, slots=True)
class Field:
    """How one field of a message is encoded and decoded; both functions raise ValueError."""

    write: Callable[[Any], Wire]
    read: Callable[[Wire], Any]


def checked(check: Callable[[Any], Any]) -> Field:
    """Return a field that is packed unchanged; `check` returns the value or raises ValueError."""
    return Field(check, check)


def integer(low: int, high: int) -> Field:
    """Return a field for integers in low..high, both included."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high}, got {value!r:.40}")
        return value

    return checked(check)


def number(low: float, high: float) -> Field:
    """Return a field for numbers in low..high, both included; they are read as floats."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError(f"expected a number in {low}..{high}, got {value!r:.40}")
        return float(value)

    return checked(check)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected a boolean, got {value!r:.40}")
    return value


def text(limit: int) -> Field:
    """Return a field for strings of at most `limit` characters."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > limit:
            raise ValueError(f"expected a text of at most {limit} characters, got {value!r:.40}")
        value.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
        return value

    return checked(check)


def binary(size: int, least: int = 1, most: int = 1) -> Field:
    """Return a field for bytes whose length is `size` times a number in least..most."""
    lengths = range(least * size, most * size + 1, size)

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) not in lengths:
            raise ValueError(f"expected {least}..{most} x {size} bytes, got {value!r:.40}")
        return value

    return checked(check)


def array(code: str, low: float, high: float, limit: int) -> Field:
    """Return a field for a tuple of at most `limit` numbers in low..high, packed as binary.

    code  the struct code of one number, such as "i" or "f"
    """
    size = struct.calcsize(code)

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(values) > limit:
            raise ValueError(f"expected at most {limit} numbers, got {len(values)}")
        if not (low <= min(values) and max(values) <= high):
            raise ValueError(f"expected numbers in {low}..{high}")
        # Comparisons do not find NaN, but a sum that contains NaN is NaN.
        if code == "f" and math.isnan(sum(values)):
            raise ValueError("expected numbers, got NaN")
        return values

    def write(values: tuple[Any, ...]) -> bytes:
        if not len(values):
            return b""
        try:
            return struct.pack(f"<{len(check(values))}{code}", *values)
        except struct.error as error:
            raise ValueError(str(error)) from error

    def read(data: Wire) -> tuple[Any, ...]:
        if type(data) is not bytes or len(data) % size or len(data) > limit * size:
            raise ValueError(f"expected binary of at most {limit} x {size} bytes")
        return check(struct.unpack(f"<{len(data) // size}{code}", data)) if data else ()

    return Field(write, read)


def ragged(most_rows: int, most_numbers: int) -> Field:
    """Return a field for a tuple of tuples of token ids, packed as lengths and one flat array."""
    lengths = array("i", 1, most_numbers, most_rows)
    numbers = array("i", 0, I31, most_numbers)

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

    return Field(write, read)


def optional(field: Field) -> Field:
    """Return a field that may also be None."""
    return Field(
        lambda value: None if value is None else field.write(value),
        lambda value: None if value is None else field.read(value),
    )


def enum(kind: type[Any]) -> Field:
    """Return a field for members of an enumeration, packed by their value."""
    value_type = int if issubclass(kind, int) else str
    wires: dict[Any, Wire] = {member: value_type(member.value) for member in kind}
    members: dict[Wire, Any] = {wire: member for member, wire in wires.items()}

    def write(value: Any) -> Wire:
        if (wire := wires.get(value)) is None:
            raise ValueError(f"expected a {kind.__name__}, got {value!r:.40}")
        return wire

    def read(value: Wire) -> Any:
        if type(value) is not value_type or (member := members.get(value)) is None:
            raise ValueError(f"expected a {kind.__name__}, got {value!r:.40}")
        return member

    return Field(write, read)


def record(kind: type[Any], *schema: Field) -> Field:
    """Return a field for a dataclass, packed as an array; `schema` has one entry for each field."""
    names = [field.name for field in fields(kind)]
    assert len(names) == len(schema), f"{kind.__name__} has {len(names)} fields"
    writers = [(name, field.write) for name, field in zip(names, schema, strict=True)]
    readers = [field.read for field in schema]

    def write(value: Any) -> list[Wire]:
        body, name = [], ""
        try:
            for name, write_one in writers:  # for the error message
                body.append(write_one(getattr(value, name)))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}: {error}") from error
        return body

    def read(value: Wire) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise ValueError(f"expected the {len(readers)} fields of {kind.__name__}")
        return kind(*[read_one(item) for read_one, item in zip(readers, value, strict=True)])

    return Field(write, read)


def several(item: Field, limit: int) -> Field:
    """Return a field for a tuple of at most `limit` items."""

    def sized(values: Any, kind: type[Any]) -> Any:
        if type(values) is not kind or len(values) > limit:
            raise ValueError(f"expected at most {limit} items")
        return values

    return Field(
        lambda values: list(map(item.write, sized(values, tuple))),
        lambda values: tuple(map(item.read, sized(values, list))),
    )


FLAG = checked(_flag)


# -- consistency -----------------------------------------------------------------------------------

# Rules between the fields of one message: the encoder and the decoder both check them.


def check(message: m.Message) -> None:
    """Raise ValueError if the fields of a message contradict each other."""
    match message:
        case m.Draft():
            count = len(message.tokens)
            if len(message.parents) != count or len(message.scores) != count:
                raise ValueError("tokens, parents and scores differ in length")
            if any(parent >= index for index, parent in enumerate(message.parents)):
                raise ValueError("a parent must come before its child")
            if message.first_number > message.number:
                raise ValueError("first_number is above number")
            if message.source in m.OWN_SOURCES:
                raise ValueError("drafts of the target's own sources must not be sent")
            _check_proposals(message)
        case m.Verdict():
            if message.num_accepted > message.num_drafted:
                raise ValueError("more tokens accepted than drafted")
            if len(message.rejected) > message.num_drafted - message.num_accepted:
                raise ValueError("more tokens rejected than drafted")
            if len(message.sources) not in (0, message.num_accepted):
                raise ValueError("not every accepted token has a source")
            if message.base_len + len(message.tokens) > m.MAX_TEXT_LEN:
                raise ValueError("the text is too long")
            if message.logprobs is not None:
                _check_rows(message.logprobs, len(message.tokens))
        case m.Features():
            if message.num_rows >= message.end_len:
                raise ValueError("the first token has no feature before it")
            if len(message.data) % message.num_rows:
                raise ValueError("the features differ in length")
        case m.PromptLogprobs():
            if message.start < 1:
                raise ValueError("the first token has no logprob")
            _check_rows(message.logprobs, len(message.logprobs))
        case m.Open():
            if len(message.sampling.bias_ids) != len(message.sampling.bias_values):
                raise ValueError("bias_ids and bias_values differ in length")
            if not 1 <= message.num_prompt <= len(message.tokens):
                raise ValueError("num_prompt must be in 1..number of tokens")
            if len(message.tokens) >= message.limits.max_len:
                raise ValueError("a text of its greatest length is not opened")
            if message.sampling.is_greedy and message.rule is not m.Rule.COUPLED:
                raise ValueError("a greedy text has no ratio to judge drafts by")
            if message.rule is not m.Rule.COUPLED and message.policy.branches > 1:
                raise ValueError("a tree needs coupled verification")
            lookup = message.lookup
            if lookup is not None and lookup.ngram_min > lookup.ngram_max:
                raise ValueError("ngram_min is above ngram_max")
            if lookup is not None and lookup.remember and message.rule is not m.Rule.COUPLED:
                raise ValueError("copies of earlier texts need coupled verification")
        case _:
            pass


def _check_proposals(draft: m.Draft) -> None:
    """Raise ValueError unless each drafted token has a probability above 0 in its own proposal."""
    if not draft.proposals:
        return
    if len(draft.proposals) != len(draft.tokens):
        raise ValueError("tokens and proposals differ in number")
    for token, proposal in zip(draft.tokens, draft.proposals, strict=True):
        if len(proposal.ids) != len(proposal.probs):
            raise ValueError("ids and probabilities of a proposal differ in number")
        if any(one >= other for one, other in pairwise(proposal.ids)):
            raise ValueError("the ids of a proposal must ascend")
        if dict(zip(proposal.ids, proposal.probs, strict=True)).get(token, 0.0) <= 0.0:
            raise ValueError("a token has no chance in its own proposal")


def _check_rows(logprobs: m.Logprobs, num_rows: int) -> None:
    """Raise ValueError unless the logprobs have `num_rows` rows of equal width."""
    width = logprobs.width
    is_even = len(logprobs.ids) == len(logprobs.values) == num_rows * width
    if len(logprobs) != num_rows or not is_even or (num_rows and width > 1 + m.MAX_LOGPROBS):
        raise ValueError("ids, values and ranks of the logprobs do not fit each other")


# -- codec -----------------------------------------------------------------------------------------

LONGEST_TEXT = 2000  # characters, of at most four bytes each

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
    text(m.MAX_GRAMMAR_LEN),
    array("i", 0, I31, 256),
    array("i", 0, I31, m.MAX_ALLOWED),
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
    *[FLAG] * 3,
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
_FINGERPRINT = record(m.Fingerprint, integer(1, I31), text(128), array("i", 0, I31, 256), text(128))
_TRACE_RECORDS = binary(m.TRACE_RECORD_BYTES, 0, m.MAX_TRACE_RECORDS)
_LAYERS = array("i", -1, U16, m.MAX_LAYERS)
_MARK = record(m.SessionMark, _SESSION, _INCARNATION, _LENGTH, _HASH, _LENGTH)

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
        integer(1, I31),
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
        integer(0, m.MAX_WINDOW),
        number(0.0, 1.0),
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
        *(text(64), text(200), text(64)),
    ),
    m.Welcome: record(
        m.Welcome, integer(1, I31), _SOURCE, FLAG, binary(1, 0, m.MAX_TOKENIZER_BYTES)
    ),
    m.Heartbeat: record(
        m.Heartbeat,
        several(_MARK, m.MAX_SESSIONS),
        _COUNT,
        text(200),
        *[array("q", 0, U63, len(Phase))] * 2,
        *[_COUNT] * 2,
        *[_MICROSECONDS] * 4,
        _COUNT,
        *[_MICROSECONDS] * 2,
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
# By msgpack's first byte of an unsigned integer: how the bytes behind it are read. An integer below
# 128 is that first byte itself.
_INTEGERS = {0xCC + index: struct.Struct(f">{code}") for index, code in enumerate("BHIQ")}
_KIND_BYTES = {kind: bytes([index]) for index, kind in enumerate(_KINDS)}


def encode(message: m.Message) -> bytes:
    """Return the frame of a message. Raises LocalProtocolError if the message breaks a limit."""
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
    """Return the message in a frame. Raises RemoteProtocolError if the frame is not valid."""
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
            max_str_len=4 * max(LONGEST_TEXT, m.MAX_GRAMMAR_LEN),
            max_bin_len=max(4 * m.MAX_TEXT_LEN, m.MAX_FEATURE_BYTES),
        )
        message: m.Message = _SCHEMAS[kind].read(body)
        check(message)
    # msgpack raises ValueError subclasses, but StackError and UnpackException are not all of them.
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{kind.__name__}: {error}") from error
    return message


def head_of(frame: bytes, number: int) -> list[int]:
    """Return the first `number` fields of a frame without decoding the rest; all are integers.

    Raises RemoteProtocolError if there are no such numbers.
    """
    found: list[int] = []
    try:
        # An array of up to 15 items has a header of one byte, a longer one of three.
        at = 2 if frame[1] < 0xA0 else 4
        for _ in range(number):
            first = frame[at]
            at += 1
            if first >= 0x80:
                layout = _INTEGERS[first]
                first = layout.unpack_from(frame, at)[0]
                at += layout.size
            found.append(first)
    except (LookupError, struct.error) as error:
        raise RemoteProtocolError("the frame has no session number") from error
    return found


def session_of(frame: bytes) -> int:
    """Return the session id of a frame without decoding the rest; it must be the first field.

    Raises RemoteProtocolError if there is no such number.
    """
    return head_of(frame, 1)[0]


def kind_of(frame: bytes) -> type[Any]:
    """Return the class of the message in a frame, without decoding the message.

    Raises RemoteProtocolError for an unknown kind.
    """
    if not frame or frame[0] >= len(_KINDS):
        raise RemoteProtocolError("a frame of no known kind")
    return _KINDS[frame[0]]
