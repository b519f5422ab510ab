"""Messages that the codec takes, each with one field changed as no honest node would.

The fields are those of the dataclasses, so a new field of a message is attacked as soon as it is
there; a field of an unknown type fails here.
"""

import functools
import random
import types
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from proto.codec import decode, encode
from proto.errors import ProtocolError
from proto.messages import (
    Ack,
    Draft,
    Fault,
    FaultCode,
    Logprobs,
    Lookup,
    Message,
    Proposal,
    Role,
    SessionMark,
)
from tests.proto.test_codec import EXAMPLES, ROWS

TRIES = 300
POWERS = (7, 8, 15, 16, 20, 21, 31, 32, 40, 48, 62, 63, 64)
INTEGERS = (-2, -1, 0, 1, 2, *((1 << power) + step for power in POWERS for step in (-1, 0, 1)))
FLOATS = (-1e30, -1e9, -100.0, -1.0, -1e-30, 0.0, 1e-45, 1e-30, 0.5, 1.0, 2.0, 100.0, 1e3)
WORDS = ("", "\x1b[2J", "\n", "\x00", "x" * 16, "é" * 64, "x" * 128, "\U0001f600" * 200)
# What an honest node may say as well, so that a text may change by it, or end: the tokens of the
# target, of which only unknown ids are sent, and that a node or a text has failed.
TOKENS = frozenset(("tokens", "rejected", "ids"))
IN_RANGE = {"code": (FaultCode.FAILED, FaultCode.UNUSABLE)}
# Values that may stand in a field that is None in honest messages.
FILLED: dict[type, Any] = {
    Logprobs: ROWS,
    Lookup: Lookup(2, 4, (7, 8)),
    Ack: Ack(0, 1, 1),
    SessionMark: SessionMark(1, 1, 2, 77),
}

Draw = random.Random


@functools.cache
def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The annotations of a message's fields."""
    return typing.get_type_hints(kind)


def paths(kind: type[Any]) -> Iterator[tuple[str, ...]]:
    """Every field of a message, and of the messages inside it."""
    hints = hints_of(kind)
    for field in fields(kind):
        yield (field.name,)
        if (inner := _inner(hints[field.name])) is not None:
            yield from ((field.name, *path) for path in paths(inner))


def _inner(hint: Any) -> type[Any] | None:
    """The dataclass in an annotation, alone, optional, or in a tuple."""
    found = [one for one in (hint, *typing.get_args(hint)) if is_dataclass(one)]
    return typing.cast("type[Any]", found[0]) if found else None


def outside(draw: Draw, honest: Message, path: tuple[str, ...], num_ids: int) -> Message | None:
    """The message with one field changed; None if the codec takes no such one.

    num_ids  number of the target's logits
    """
    for _ in range(TRIES):
        try:
            made = _changed(draw, honest, path, num_ids)
            if made != honest:
                return decode(encode(made))
        except (ProtocolError, IndexError, ValueError):
            continue
    return None


def _changed(draw: Draw, value: Any, path: tuple[str, ...], num_ids: int) -> Any:
    name, *rest = path
    hint = hints_of(type(value))[name]
    old = getattr(value, name)
    if not rest:
        return replace(value, **{name: _other(draw, old, hint, name, num_ids)})
    if isinstance(value, Draft) and name == "proposals" and not old:
        old = tuple(Proposal((token,), (1.0,)) for token in value.tokens)
    if not old and (inner := _inner(hint)) is not None and inner in FILLED:
        old = FILLED[inner] if old is None else (FILLED[inner],)
    if isinstance(old, tuple):
        index = draw.randrange(len(old))
        new = _changed(draw, old[index], tuple(rest), num_ids)
        return replace(value, **{name: (*old[:index], new, *old[index + 1 :])})
    return replace(value, **{name: _changed(draw, old, tuple(rest), num_ids)})


def _other(draw: Draw, old: Any, hint: Any, name: str, num_ids: int) -> Any:
    """Another value of a type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        some = next(one for one in args if one is not type(None))
        return FILLED[some] if old is None and some in FILLED else None
    if origin is tuple:
        return _other_tuple(draw, old, args[0], name, num_ids)
    if is_dataclass(hint):
        return old  # its fields are changed one by one
    if isinstance(hint, type) and issubclass(hint, Enum):
        return draw.choice([one for one in hint if one not in IN_RANGE.get(name, ())])
    match hint():
        case bool():
            return not old
        case int():
            return draw.choice((*INTEGERS, old + 1, old - 1, draw.getrandbits(63)))
        case float():
            return draw.choice(FLOATS)
        case str():
            return draw.choice((*WORDS, old + "\x07", old[::-1]))
        case bytes():
            return draw.choice((b"", old[:-1], old[:-8], old * 2, old + bytes(16)))
    raise AssertionError(f"{name} has the type {hint}: say how it is attacked")


def _other_tuple(draw: Draw, old: Any, item: Any, name: str, num_ids: int) -> Any:
    if is_dataclass(item):
        return draw.choice(((), old[:-1], old * 2, old * 9))
    if typing.get_origin(item) is tuple:
        return (*old, (num_ids,))
    is_token = item is int and name in TOKENS
    pool: Any = FLOATS if item is float else INTEGERS
    index = draw.randrange(len(old)) if old else 0
    if is_token:
        pool = [one for one in (num_ids, num_ids + 1, *INTEGERS) if one >= num_ids]
    if name == "parents":
        pool = (-2, -1, *range(index))  # the codec takes no others
    new = draw.choice(pool)
    one_other = (*old[:index], new, *old[index + 1 :])
    if is_token or name == "parents":
        return one_other
    return draw.choice((one_other, one_other, (*old, new), (), old * 2, (new,) * 300))


Key = tuple[str, tuple[str, ...]]  # kind and field
ALL_FIELDS: frozenset[Key] = frozenset(
    (type(one).__name__, path) for one in EXAMPLES for path in paths(type(one))
)
GIVEN_UP = 16  # tries in vain after which a field counts as one that cannot be changed alone


class Attacker:
    """Makes messages of every kind with every field changed, each field about as often.

    made    number of messages, by kind and field
    last    kind and field of the last one
    """

    def __init__(self, role: Role, num_ids: int, seed: int) -> None:
        self.made: Counter[Key] = Counter()
        self.last: Key = ("", ())
        self._draw = random.Random(f"{role} {seed}")
        self._num_ids = num_ids
        self._tries: Counter[Key] = Counter()
        self._examples: dict[str, Message] = {}
        for example in EXAMPLES:
            self._examples.setdefault(type(example).__name__, example)
        self._honest: dict[bytes, dict[str, Message]] = {}  # the latest of each kind, by sender
        self._about: dict[bytes, dict[str, Any]] = {}

    @property
    def impossible(self) -> set[Key]:
        """Fields that cannot be changed alone, because the codec compares them with others."""
        return {key for key in ALL_FIELDS if self._tries[key] >= GIVEN_UP and not self.made[key]}

    @property
    def least(self) -> int:
        """How often the field was changed that was changed least."""
        return min(self.made[key] for key in ALL_FIELDS - self.impossible)

    def forget(self) -> None:
        """Forget the honest messages: others begin."""
        self._honest.clear()
        self._about.clear()

    def saw(self, sender: bytes, honest: Message) -> None:
        """An honest message of a node, which later ones of that node are made of."""
        if isinstance(honest, Draft) and not honest.tokens:
            return  # most of its fields can have no other values
        self._honest.setdefault(sender, {})[type(honest).__name__] = honest
        session, incarnation = (getattr(honest, name, 0) for name in ("session", "incarnation"))
        if session and incarnation:
            self._about[sender] = {"session": session, "incarnation": incarnation}

    def next(self, sender: bytes) -> Message | None:
        """A message in which a field is changed that rarely was; None: not at this moment."""
        tries = self._tries
        keys = ALL_FIELDS - self.impossible
        key = min(keys, key=lambda one: (self.made[one], tries[one], one))
        tries[key] += 1
        honest = self._honest.get(sender, {}).get(key[0])
        made = None if honest is None else self._changed(honest, key[1])
        if made is None:  # none was sent yet, or it is too short, as a draft of one token
            known = {field.name for field in fields(self._examples[key[0]])}
            about = {k: v for k, v in self._about.get(sender, {}).items() if k in known}
            made = self._changed(replace(self._examples[key[0]], **about), key[1])
        if made is not None:
            self.made[key] += 1
            self.last = key
        return made

    def _changed(self, honest: Message, path: tuple[str, ...]) -> Message | None:
        if isinstance(honest, Fault):
            honest = replace(honest, code=FaultCode.GAP)
        return outside(self._draw, honest, path, self._num_ids)
