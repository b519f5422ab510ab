"""How models write calls of tools, in one table with a row for each spelling (pure).

A model was trained to write calls in one spelling, and its chat template asks for it. Every answer
is read by all of them: a call counts only if it is complete and names a tool of the request.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ARGUMENTS = ("arguments", "parameters")  # the second one is Llama's
MAX_PYTHON = 1 << 16  # characters of a call in Python's syntax


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: str


Schemas = Mapping[str, Any]
Found = tuple[list[Call], str]  # calls, and the text between and behind them
Reader = Callable[[str, Schemas], Found | None]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way in which models write calls.

    mark     with what it begins, anywhere in an answer; "": only a whole answer is such a call
    follows  the signs with which it may go on, after white space; "": any sign
    read     returns the calls in the text from the mark on, and its other text; None: it has
             another form
    """

    mark: str
    follows: str
    read: Reader


# -- JSON ------------------------------------------------------------------------------------------


def _call(value: Any) -> Call | None:
    """Return the call that a JSON value stands for; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if isinstance(arguments, str):  # some models write JSON within a string
        arguments = _value(arguments)
    return Call(value["name"], as_text(arguments)) if isinstance(arguments, dict) else None


def _calls(values: Sequence[Any], rest: str = "") -> Found | None:
    """Return the calls in JSON values, each of which is one call or a list of calls."""
    listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
    made = [call for call in map(_call, listed) if call is not None]
    return (made, rest) if made and len(made) == len(listed) else None


def _value(text: str) -> Any:
    """Return the JSON value of a text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_value(text: str) -> tuple[Any, str]:
    """Return the JSON value with which a text begins, and what is behind it; (None, text): none."""
    text = text.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, text
    return value, text[end:].lstrip()


def as_text(arguments: dict[str, Any]) -> str:
    """Return the arguments as JSON text; half of a surrogate pair stays the escape that it was."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isascii() or _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bare_json(text: str, _schemas: Schemas) -> Found | None:
    """Read JSON values one after another, as Llama writes them with semicolons in between."""
    values: list[Any] = []
    while text.strip():
        value, behind = _first_value(text.lstrip("; \n"))
        if value is None:
            return None
        values.append(value)
        if behind and not behind.startswith(";"):
            return None
        text = behind
    return _calls(values)


# -- between tags ----------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _tagged_json(text: str, _schemas: Schemas) -> Found | None:
    """Read <tool_call>{...}</tool_call>, once or several times.

    Tags within the strings of a value are part of it. The last closing tag may be missing.
    """
    values: list[Any] = []
    rest = ""
    text = text.removeprefix(OPEN)
    while text.strip():
        value, behind = _first_value(text)
        if value is None or (behind and not behind.startswith(CLOSE)):
            return None
        values.append(value)
        other, _, text = behind.removeprefix(CLOSE).partition(OPEN)
        rest += other
    return _calls(values, rest)


# -- XML, as Qwen3-Coder writes it -----------------------------------------------------------------

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>\s*)?(?=<parameter=|\Z)", re.DOTALL
)


def _xml(text: str, schemas: Schemas) -> Found | None:
    """Read <function=NAME><parameter=KEY>VALUE</parameter>...</function>, also between tags."""
    made = []
    for function in _FUNCTION.finditer(text):
        name = function[1].strip()
        found = _PARAMETER.finditer(function[2])
        schema = schemas.get(name, {})
        arguments = {one[1].strip(): _typed(one[2], _schema_of(schema, one[1])) for one in found}
        made.append(Call(name, as_text(arguments)))
    rest = _FUNCTION.sub("", text).replace(OPEN, "").replace(CLOSE, "")
    return (made, rest) if made else None


def _schema_of(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key.strip()) if isinstance(properties, Mapping) else None


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names, its alternatives' included; empty: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else {one for one in kinds if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found |= _kinds(part)
    return found


_KINDS_OF = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value, of a type that its schema names; a text if nothing else fits."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema)
    spelt = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json.loads(spelt)
    except (ValueError, RecursionError):
        return text
    is_meant = type(value) is not str and not kinds.isdisjoint(_KINDS_OF[type(value)])
    return value if is_meant else text


# -- Mistral ---------------------------------------------------------------------------------------

MISTRAL = "[TOOL_CALLS]"
MISTRAL_ID, MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, _schemas: Schemas) -> Found | None:
    """Read [TOOL_CALLS] with a list of calls, or with NAME{...}, which later models write."""
    made: list[Call] = []
    while text.startswith(MISTRAL):
        text = text.removeprefix(MISTRAL)
        name = _MISTRAL_NAME.match(text)
        value, text = _first_value(text[name.end() :] if name else text)
        if name and isinstance(value, dict):
            made.append(Call(name[1], as_text(value)))
        elif name is None and (found := _calls([value])):
            made += found[0]
        else:
            return None
    return made, text


# -- Python's syntax, as Llama writes it -----------------------------------------------------------

PYTHON_TAG = "<|python_tag|>"
_BUILT_IN = ".call"  # Llama's own tools: brave_search.call(query="...")


def _tagged_python(text: str, schemas: Schemas) -> Found | None:
    """Read <|python_tag|> with a call in JSON or in Python's syntax."""
    text = text.removeprefix(PYTHON_TAG).strip()
    return _bare_json(text, schemas) if text.startswith(("{", "[")) else _in_python(f"[{text}]")


def _python_list(text: str, _schemas: Schemas) -> Found | None:
    """Read a list of calls, [f(x=1), g()]."""
    return _in_python(text.strip()) if text.strip().endswith(")]") else None


def _in_python(text: str) -> Found | None:
    try:
        tree = ast.parse(text, mode="eval").body if len(text) <= MAX_PYTHON else None
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(one) for one in tree.elts], ""
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def _python_call(node: ast.expr) -> Call:
    """Return the call that an expression stands for. Raises ValueError if it is none."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for word in node.keywords:
        if word.arg is None:
            raise ValueError("arguments without names")
        value = word.value
        if isinstance(value, ast.Name) and value.id in ("true", "false", "null"):
            arguments[word.arg] = json.loads(value.id)
        else:
            arguments[word.arg] = ast.literal_eval(value)
    return Call(ast.unparse(node.func).removesuffix(_BUILT_IN), as_text(arguments))


# -- the table -------------------------------------------------------------------------------------

SPELLINGS = (
    Spelling(OPEN, "{[", _tagged_json),  # Qwen, Hermes and many more
    Spelling(OPEN, "<", _xml),  # Qwen3-Coder
    Spelling("<function=", "", _xml),  # the same, where the model forgets the tag
    Spelling(MISTRAL, "", _mistral),
    Spelling(PYTHON_TAG, "", _tagged_python),  # Llama 3
    Spelling("", "{[", _bare_json),  # Llama 3, and models that were asked for JSON
    Spelling("", "[", _python_list),  # Llama 3.2 and 4
)
# What of these may be special tokens of a tokenizer, which texts do not show.
NAMES = (OPEN, CLOSE, MISTRAL, MISTRAL_ID, MISTRAL_ARGUMENTS, PYTHON_TAG)


_FIRST_SIGN = re.compile("|".join({re.escape(one.mark[0]) for one in SPELLINGS if one.mark}))


def calls_in(text: str, schemas: Schemas) -> Found:
    """Return the calls in a text that begins with them, and its other text; ([], ""): none.

    schemas  JSON schema of each tool's arguments, by its name. A call of another tool makes all of
             the text no calls
    """
    for spelling in SPELLINGS:
        if _may_be(spelling, text, 0):
            found = spelling.read(text, schemas)
            if found is not None and all(call.name in schemas for call in found[0]):
                return found
    return [], ""


def places_of_marks(text: str) -> list[int]:
    """Return each place where the first sign of a mark stands."""
    return [found.start() for found in _FIRST_SIGN.finditer(text)]


def may_be_calls(text: str, place: int, *, is_whole: bool) -> bool:
    """True if calls may begin at this place, as far as the text has come.

    is_whole  nothing but white space is before the place
    """
    return any(_may_be(one, text, place) for one in SPELLINGS if one.mark or is_whole)


def _may_be(spelling: Spelling, text: str, place: int) -> bool:
    """True if a text goes on at this place as the spelling does, as far as it has come."""
    mark = spelling.mark
    if not text.startswith(mark, place):
        return mark.startswith(text[place : place + len(mark)])
    behind = text[place + len(mark) :].lstrip()
    return not spelling.follows or not behind or behind[0] in spelling.follows
