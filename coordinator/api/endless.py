"""Finds JSON schemas that no finite text fits: what they require always requires more (pure).

An object that requires a property of its own kind is such a schema. A grammar of it allows every
next token and never the end, so that each answer would be cut off.
"""

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Ends = Mapping[str, bool]  # by $ref: whether some finite text fits what it points at
REF = "$ref"
LONGEST_INDEX = 8  # digits


def has_an_end(schema: Any) -> bool:
    """True if some finite text may fit the schema, as far as references and requirements say.

    What points outside the schema counts as finite: the library of grammars refuses it.
    """
    targets: dict[str, Any] = {}
    _collect(schema, schema, targets)
    ends = dict.fromkeys(targets, False)
    while True:
        found = {name: ends[name] or _ends(target, ends) for name, target in targets.items()}
        if found == ends:
            return _ends(schema, ends)
        ends = found


def _collect(value: Any, root: Any, targets: dict[str, Any]) -> None:
    """Add what every `$ref` in the value points at, by the reference."""
    if isinstance(value, dict):
        name = value.get(REF)
        if isinstance(name, str) and name not in targets:
            is_found, target = _pointed_at(root, name)
            if is_found:
                targets[name] = target
        for part in value.values():
            _collect(part, root, targets)
    elif isinstance(value, list):
        for part in value:
            _collect(part, root, targets)


def _pointed_at(root: Any, name: str) -> tuple[bool, Any]:
    """Return whether a JSON pointer such as `#/$defs/tree` is found, and what it points at."""
    if not name.startswith("#"):
        return False, None
    found = root
    for part in unquote(name[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and (index := _index(key)) < len(found):
            found = found[index]
        else:
            return False, None
    return True, found


def _index(key: str) -> int:
    """Return the place in a list that a part of a pointer names; one behind every list if none."""
    is_short = key.isascii() and key.isdigit() and len(key) < LONGEST_INDEX
    return int(key) if is_short else sys.maxsize


def _ends(schema: Any, ends: Ends) -> bool:
    """True if some finite text fits the schema, where references end as `ends` says."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    name = schema.get(REF)
    if isinstance(name, str) and not ends.get(name, True):
        return False
    if not all(_ends(part, ends) for part in _listed(schema.get("allOf"))):
        return False
    for choice in ("anyOf", "oneOf"):
        if choice in schema and not any(_ends(part, ends) for part in _listed(schema[choice])):
            return False
    kinds = schema.get("type")
    match [kinds] if isinstance(kinds, str) else kinds:
        case ["object"]:
            return _object_ends(schema, ends)
        case ["array"]:
            return _array_ends(schema, ends)
    return True


def _object_ends(schema: dict[str, Any], ends: Ends) -> bool:
    """True if each required property can be finite."""
    own = schema.get("properties")
    known = own if isinstance(own, dict) else {}
    others = schema.get("additionalProperties", True)
    return all(
        _ends(known.get(name, others), ends)
        for name in _listed(schema.get("required"))
        if isinstance(name, str)
    )


def _array_ends(schema: dict[str, Any], ends: Ends) -> bool:
    """True if each item that the list must have can be finite."""
    least = schema.get("minItems", 0)
    if type(least) is not int or least < 1:
        return True
    first = _listed(schema.get("prefixItems"))
    needed = first[:least]
    if least > len(first):
        needed = [*needed, schema.get("items", True)]
    return all(_ends(part, ends) for part in needed)


def _listed(value: Any) -> list[Any]:
    """Return a list as it is; another value, which the library refuses, as an empty one."""
    return value if isinstance(value, list) else []
