"""Reads back JSON lines and files as the frozen dataclasses that wrote them (pure).

A file may have been damaged, or edited by hand. What does not fit is found when it is read: a
number that is a text would end an experiment hours later, when its tables are made.
"""

from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

# The value of `__pydantic_config__` of such a class: a field that it lacks is refused.
NO_OTHERS = ConfigDict(extra="forbid")
Record = TypeVar("Record")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}  # to make one takes as long as many lines


def from_json(kind: type[Record], text: str) -> Record:
    """The record, every field of the type that its class states. Raises ValueError."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    found: Record = _ADAPTERS[kind].validate_json(text, strict=True)
    return found
