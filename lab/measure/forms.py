"""Schemas and patterns of several kinds, drawn from a seed, whose answers are short."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "age", "city", "tags", "id", "size", "is_open", "next", "unit", "note")


def schema_of(seed: int) -> Schema:
    """Return a schema whose answers have at most a few dozen tokens."""
    rng = random.Random(seed)
    kinds = (_object, _list, _union, _references, _tree)
    return kinds[seed % len(kinds)](rng)


def pattern_of(seed: int) -> str:
    """Return a regular expression, read alike by Python and by llguidance."""
    rng = random.Random(seed)
    parts: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(WORDS),
        lambda: f"[a-z]{{{rng.randint(1, 3)},{rng.randint(3, 6)}}}",
        lambda: f"[0-9]{{{rng.randint(1, 4)}}}",
        lambda: f"({'|'.join(rng.sample(WORDS, 3))})",
        lambda: f"({rng.choice('xyz')}[A-F]?){{0,{rng.randint(1, 3)}}}",
        lambda: rng.choice((r"\.", ", ", "-", "é", r"\+", " ")),
        lambda: f"(?:{rng.choice(WORDS)}-)?",
    )
    return "".join(rng.choice(parts)() for _ in range(rng.randint(2, 6)))


def _simple(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
            {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 10)},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample(WORDS, rng.randint(1, 4))},
            {"const": rng.choice((1, "one", None, True, {"a": [1]}))},
            {"type": "string", "format": rng.choice(("date", "uuid", "ipv4", "time"))},
            {"type": "number", "minimum": 0, "maximum": 1},
        )
    )


def _object(rng: random.Random) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _simple(rng) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _list(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": rng.choice((_simple, _object))(rng),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _union(rng: random.Random) -> Schema:
    return {"anyOf": [_object(rng), _simple(rng), {"allOf": [_object(rng)]}]}


def _references(rng: random.Random) -> Schema:
    return {
        "$defs": {"part": _object(rng), "kind": _simple(rng)},
        "type": "object",
        "properties": {"part": {"$ref": "#/$defs/part"}, "kind": {"$ref": "#/$defs/kind"}},
        "required": ["part", "kind"],
        "additionalProperties": False,
    }


def _tree(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _simple(rng),
            "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
