"""What is said of a value that does not fit its setting, in words of our own.

The library that checks settings speaks to programmers. Each of its kinds of errors has words here,
which stand between "expected" and "got".
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError

from proto.errors import did_you_mean, shown

# -- values ----------------------------------------------------------------------------------------

# Values as programs hand them over, before their types are checked: a number of numpy is a number.
#
# Nothing else changes its type: True is no 1, b"a" no "a", and a set has no order.

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


# -- refusals --------------------------------------------------------------------------------------

OURS = "slipstream"  # the kind of an error whose message is such words already
WHOLE, NUMBER, TRUTH, TEXT = "a whole number", "a number", "true or false", "a text"
LIST, TABLE = "a list", "a dict (a table)"


def _number(value: object) -> str:
    """A bound as a person writes it: 1, not 1.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _many(words: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: words.format(_number(context[name]))


# Of the words that stand for a type, whatever was wrong with it.
TYPES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), TRUTH),
    **dict.fromkeys(("string_type", "string_sub_type", "path_type"), TEXT),
    **dict.fromkeys(("tuple_type", "list_type"), LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), TABLE),
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
    """Of the first setting that does not fit, as a line: name is what its owner calls it.

    given  all settings, as they were handed over: lists are lists there
    """
    first = errors[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if isinstance(given, Mapping) and len(first["loc"]) == 1:
        value = given.get(first["loc"][0])
    if kind == "missing":
        return f"{name} is missing"
    if kind == "literal_error":
        # A setting that is one of several lists of words has an error for each.
        same = [one for one in errors if one["loc"][:1] == first["loc"][:1]]
        lists = [one.get("ctx", {}).get("expected", "") for one in same if one["type"] == kind]
        return _one_of(name, " ".join(lists), value)
    if kind == "value_error":  # the command line has an error of its own for lists of words
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
    """Of words in quotes; what stands for "nothing was said" is none that one would write."""
    return one_of(name, [word for word in re.findall(r"'([^']*)'", quoted) if word], value)


def one_of(name: str, words: Collection[str], value: object) -> str:
    """Of a value that is none of these words, as a line."""
    meant = did_you_mean(value, words) if isinstance(value, str) else ""
    return f"{name}: expected one of {', '.join(words)}, got {shown(value)}{meant}"
