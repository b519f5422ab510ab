"""Makes one-line error messages for values that do not fit their settings.

pydantic, which checks the settings, has messages for programmers. For each of its error types there
are words here for users, which stand between "expected" and "got".
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError

from proto.errors import did_you_mean, shown

# -- values ----------------------------------------------------------------------------------------

# Values as the caller passes them, before their types are checked: a number of numpy becomes a
# number of Python.
#
# No other type is converted: True is not 1, b"a" is not "a", and a set is not a list.

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(value: object) -> object:
    """Return the value with lists as tuples, mappings as dicts, and numpy's scalars as Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(scalar, value))
    if isinstance(value, Mapping):
        return {scalar(key): scalar(one) for key, one in value.items()}
    return scalar(value)


def scalar(value: Any) -> object:
    """Return a scalar of numpy as Python's int, float, str or bool; other values unchanged."""
    if isinstance(value, type) or getattr(value, "ndim", None) != 0:
        return value
    return value.item() if hasattr(value, "item") else value


def check_texts(value: object, *, are_names: bool) -> None:
    """Raise PydanticCustomError if the value, or a part of it, is a string that cannot be used.

    are_names  the strings name models, files or hosts: control characters are refused too
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


# -- refusals --------------------------------------------------------------------------------------

OURS = "slipstream"  # the type of an error whose message already has words for users
WHOLE, NUMBER, TRUTH, TEXT = "a whole number", "a number", "true or false", "a text"
LIST, TABLE = "a list", "a dict (a table)"


def _number(value: object) -> str:
    """Return a bound as a person writes it: 1, not 1.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _many(words: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: words.format(_number(context[name]))


# The words for the expected type, for each error type that means a wrong type.
TYPES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), TRUTH),
    **dict.fromkeys(("string_type", "string_sub_type", "path_type"), TEXT),
    **dict.fromkeys(("tuple_type", "list_type"), LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), TABLE),
    "is_instance_of": "StructuredOutputsParams",  # of the only setting that is such an object
    "finite_number": "a finite number",
    "string_unicode": "a text of valid Unicode",
}
BOUNDS = {
    "greater_than_equal": _many("at least {}", "ge"),
    "greater_than": _many("more than {}", "gt"),
    "less_than_equal": _many("at most {}", "le"),
    "less_than": _many("less than {}", "lt"),
    "string_too_long": _many("at most {} characters", "max_length"),
}


def refusal(name: str, errors: Sequence[ErrorDetails], given: object) -> str:
    """Return the error message for the first setting that does not fit, in one line.

    name   the name by which the caller gave the setting
    given  all settings as the caller passed them, before lists were made tuples
    """
    first = errors[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if isinstance(given, Mapping) and len(first["loc"]) == 1:
        value = given.get(first["loc"][0])
    if kind == "missing":
        return f"{name} is missing"
    if kind == "literal_error":
        # A setting that allows several lists of words has one error for each list.
        same = [one for one in errors if one["loc"][:1] == first["loc"][:1]]
        lists = [one.get("ctx", {}).get("expected", "") for one in same if one["type"] == kind]
        return _one_of(name, " ".join(lists), value)
    if kind == "value_error":  # the command line's own error for a wrong word
        told = str(context.get("error", first["msg"]))
        _, is_list, words = told.partition(" is not one of ")
        return _one_of(name, words, value) if is_list else f"{name}: {told}"
    if kind == "too_long":
        most, number = context["max_length"], context["actual_length"]
        return f"{name}: expected at most {most} of them, got {number or 'more'}"
    if kind == "too_short":
        return f"{name}: expected at least {context['min_length']} of them, got none"
    return f"{name}: expected {_expected(kind, context, first['msg'])}, got {shown(value)}"


def _expected(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in BOUNDS:
        return BOUNDS[kind](context)
    if kind == "string_too_short":
        number = context["min_length"]
        return f"{TEXT} that is not empty" if number == 1 else f"at least {number} characters"
    return message if kind == OURS else TYPES.get(kind, "something else")


def _one_of(name: str, quoted: str, value: object) -> str:
    """Return the message for a value that is none of the quoted words (without the empty one)."""
    return one_of(name, [word for word in re.findall(r"'([^']*)'", quoted) if word], value)


def one_of(name: str, words: Collection[str], value: object) -> str:
    """Return the message for a value that is none of these words, with a similar word if any."""
    meant = did_you_mean(value, words) if isinstance(value, str) else ""
    return f"{name}: expected one of {', '.join(words)}, got {shown(value)}{meant}"
