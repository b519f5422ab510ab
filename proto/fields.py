"""How the fields of a message are written and read: types, ranges and sizes.

A field turns a value into what msgpack takes, and back; both ways check it and raise ValueError.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

U16, U32, U63, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
I31 = (1 << 31) - 1

Wire = Any  # a value as msgpack gives it, unchecked until a field has read it


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is written and read; both raise ValueError."""

    write: Callable[[Any], Wire]
    read: Callable[[Wire], Any]


def checked(check: Callable[[Any], Any]) -> Field:
    """A field whose values travel as they are."""
    return Field(check, check)


def integer(low: int, high: int) -> Field:
    """Whole numbers of this range, its ends included."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high}, got {value!r:.40}")
        return value

    return checked(check)


def number(low: float, high: float) -> Field:
    """Numbers of this range."""

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
    """Texts of at most so many characters."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > limit:
            raise ValueError(f"expected a text of at most {limit} characters, got {value!r:.40}")
        value.encode()  # raises UnicodeEncodeError, a ValueError, for half a character
        return value

    return checked(check)


def binary(size: int, least: int = 1, most: int = 1) -> Field:
    """Bytes: from `least` to `most` times `size`."""
    lengths = range(least * size, most * size + 1, size)

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) not in lengths:
            raise ValueError(f"expected {least}..{most} x {size} bytes, got {value!r:.40}")
        return value

    return checked(check)


def array(code: str, low: float, high: float, limit: int) -> Field:
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

    return Field(write, read)


def ragged(most_rows: int, most_numbers: int) -> Field:
    """A tuple of tuples of token ids: their lengths, and all of them in a row."""
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
    """A field that may be None."""
    return Field(
        lambda value: None if value is None else field.write(value),
        lambda value: None if value is None else field.read(value),
    )


def enum(kind: type[Any]) -> Field:
    """A member of an enumeration, by its value."""
    value_type = int if issubclass(kind, int) else str

    def write(value: Any) -> Wire:
        return value_type(kind(value).value)

    def read(value: Wire) -> Any:
        if type(value) is not value_type:
            raise ValueError(f"expected a {kind.__name__}, got {value!r:.40}")
        return kind(value)

    return Field(write, read)


def record(kind: type[Any], *schema: Field) -> Field:
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

    return Field(write, read)


def several(item: Field, limit: int) -> Field:
    """A tuple of at most so many."""

    def each(function: Callable[[Any], Any], values: Any, kind: type[Any]) -> Any:
        if type(values) is not kind or len(values) > limit:
            raise ValueError(f"expected at most {limit} items")
        return [function(value) for value in values]

    return Field(
        lambda values: each(item.write, values, tuple),
        lambda values: tuple(each(item.read, values, list)),
    )


FLAG = checked(_flag)
