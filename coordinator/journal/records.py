"""The records of the journal, and the lines of its file (pure).

A line is the checksum of a record in eight hexadecimal digits, a space, the record as JSON, and a
line feed. The first line is the head, which says whose journal it is.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proto.messages import Logprobs

VERSION = 1  # of the form of the file
CHECK_CHARS = 8


@dataclass(frozen=True, slots=True)
class Head:
    """Whose journal it is.

    target     the target's model and number type, for people
    num_ids    number of the target's token ids
    tokenizer  digest of its tokenizer; "": it has none
    """

    target: str
    num_ids: int
    tokenizer: str = ""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Asked:
    """A request was accepted.

    name     id of the request
    at       when (seconds since 1970)
    path     the route that it was sent to
    owner    who may read the answer: a digest of an API key, or an address
    client   with whom it shares out lanes
    body     the JSON of the request
    prompts  the token ids of its prompts
    n        texts behind each prompt; they are numbered through, prompt by prompt
    seed     of the answer, drawn if the request has none
    """

    name: str
    at: float
    path: str
    owner: str
    client: str
    body: Mapping[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    n: int
    seed: int

    @property
    def num_texts(self) -> int:
        """Return how many texts the answer has."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Came:
    """Tokens of a text were committed, behind its first `at` tokens; others there count no more."""

    name: str
    text: int
    at: int
    tokens: tuple[int, ...]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of the prompt of a text have come."""

    name: str
    text: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Ended:
    """A text is complete, or cannot be completed (`error`)."""

    name: str
    text: int
    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """An answer is written from now on, or is not: nobody reads it."""

    name: str
    is_running: bool


@dataclass(frozen=True, slots=True)
class TakenUp:
    """A coordinator that was started again goes on with an answer."""

    name: str


@dataclass(frozen=True, slots=True)
class Gone:
    """An answer is kept no longer."""

    name: str


Record = Asked | Came | Scored | Ended | Ran | TakenUp | Gone
KINDS: dict[str, type[Any]] = {
    "asked": Asked,
    "came": Came,
    "scored": Scored,
    "ended": Ended,
    "ran": Ran,
    "taken up": TakenUp,
    "gone": Gone,
}
NAMES = {kind: name for name, kind in KINDS.items()}


# -- lines -----------------------------------------------------------------------------------------


def head_line(head: Head) -> bytes:
    """Return the first line of a journal."""
    said = {"target": head.target, "num_ids": head.num_ids, "tokenizer": head.tokenizer}
    return _line({"journal": head.version, **said})


def line_of(record: Record) -> bytes:
    """Return the line of a record."""
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    found = fields.get("logprobs")
    if found is not None:
        fields["logprobs"] = [found.ids, found.values, found.ranks]
    return _line({"": NAMES[type(record)], **fields})


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in the file of a journal.

    head      None: the file is empty
    is_torn   the last record was cut off: its process was killed while it wrote
    garbled   where a record is damaged although others follow it; "": none is. `records` ends there
    """

    head: Head | None
    records: list[Record] = field(default_factory=list)
    is_torn: bool = False
    garbled: str = ""


def read(data: bytes) -> Found:
    """Return what a journal's file says. A journal of another form counts as garbled."""
    *lines, rest = data.split(b"\n")
    values: list[Any] = []
    begin = 0
    for number, line in enumerate(lines, 1):
        try:
            values.append(_head_of(_value(line)) if number == 1 else _record_of(_value(line)))
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not rest:
                return _found(values, is_torn=True)
            return _found(values, garbled=f"line {number} (byte {begin})")
        begin += len(line) + 1
    return _found(values, is_torn=bool(rest))


def _found(values: list[Any], *, is_torn: bool = False, garbled: str = "") -> Found:
    if not values:
        return Found(None, [], is_torn, garbled)
    return Found(values[0], values[1:], is_torn, garbled)


def _value(line: bytes) -> Any:
    """Return the JSON value of a line. Raises ValueError if its checksum is another one."""
    check, text = line[:CHECK_CHARS], line[CHECK_CHARS + 1 :]
    if int(check, 16) != zlib.crc32(text):
        raise ValueError("another checksum")
    return json.loads(text)


def _head_of(value: Mapping[str, Any]) -> Head:
    if value["journal"] != VERSION:
        raise ValueError("another form")
    return Head(str(value["target"]), int(value["num_ids"]), str(value["tokenizer"]))


def _record_of(value: dict[str, Any]) -> Record:
    kind = KINDS[value.pop("")]
    if value.get("logprobs") is not None:
        value["logprobs"] = Logprobs(*map(tuple, value["logprobs"]))
    if "tokens" in value:
        value["tokens"] = tuple(value["tokens"])
    if "prompts" in value:
        value["prompts"] = tuple(map(tuple, value["prompts"]))
    made: Record = kind(**value)
    return made
