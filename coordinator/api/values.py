"""Values as programs hand them over, before their types are checked: a number of numpy is a number.

Nothing else changes its type: True is no 1, b"a" no "a", and a set has no order.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from coordinator.api.refusals import OURS

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(value: object) -> object:
    """The value, lists as tuples and every mapping as a dict."""
    if isinstance(value, list | tuple):
        return tuple(map(scalar, value))
    if isinstance(value, Mapping):
        return {scalar(key): scalar(one) for key, one in value.items()}
    return scalar(value)


def scalar(value: Any) -> object:
    """One number, text or truth value as Python has it; anything else as it is."""
    if isinstance(value, type) or getattr(value, "ndim", None) != 0:
        return value
    return value.item() if hasattr(value, "item") else value


def check_texts(value: object, *, are_names: bool) -> None:
    """Raise PydanticCustomError if the value, or a part of it, is a text that cannot work.

    are_names  of models, files and hosts: without control characters
    """
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, str):
            continue
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError(OURS, "a text of valid Unicode") from error
        if are_names and CONTROL.search(part):
            raise PydanticCustomError(OURS, "a text without control characters")
