"""Reads JSON back into the frozen dataclasses that it was written from (pure).

A file may have been damaged, or edited by hand. Wrong values are found when it is read; otherwise a
string in the place of a number would end an experiment hours later, when its tables are made.
"""

from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

# The value of `__pydantic_config__` of such a class: unknown fields are refused.
NO_OTHERS = ConfigDict(extra="forbid")
Record = TypeVar("Record")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}  # kept, because they are slow to make


def from_json(kind: type[Record], text: str) -> Record:
    """Return an instance of `kind`, parsed from JSON with strict types. Raises ValueError."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    found: Record = _ADAPTERS[kind].validate_json(text, strict=True)
    return found
