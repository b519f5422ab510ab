"""Tool calls of the chat route: what a request asks, the grammar for it, and calls in an answer.

A model calls a tool by writing JSON, which is read here and answered as OpenAI's `tool_calls`
(pure). With `tool_choice` required or a function's name the answer is held to such JSON by a
grammar; with auto it is read where it happens to have this form:

    auto, required   {"name": "f", "arguments": {...}}, a list of such objects, and each of both
                     also between <tool_call> and </tool_call>, as many models write it
    a named function  the arguments alone
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError, shown

MAX_TOOLS, MAX_NAME = 128, 64
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CHOICES = ("none", "auto", "required")
ARGUMENTS = ("arguments", "parameters")  # the second one is Llama's


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request, and how the answer may use them.

    schemas  JSON schema of each tool's arguments, by its name
    choice   none, auto, required; or "named": the answer is the arguments of the only tool
    is_one   under required: the answer is one call, not several
    """

    schemas: Mapping[str, Any]
    choice: str = "none"
    is_one: bool = False

    @property
    def form(self) -> StructuredOutputsParams | None:
        """Return what the answer must look like; None: any text. Raises ConfigurationError."""
        if self.choice == "named":
            (schema,) = self.schemas.values()
            return StructuredOutputsParams(json=schema)
        if self.choice != "required":
            return None
        try:
            calls = [
                _call_schema(name, _moved(schema, f"#/items/anyOf/{index}/properties/arguments"))
                for index, (name, schema) in enumerate(self.schemas.items())
            ]
        except RecursionError as error:
            raise ConfigurationError("tools: parameters are nested too deeply") from error
        most = {"maxItems": 1} if self.is_one else {}
        return StructuredOutputsParams(
            json={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
        )

    def calls(self, answer: str) -> list[Call]:
        """Return the calls in a whole answer; []: it is no call, or not complete."""
        if self.choice == "named":
            (name,) = self.schemas
            return [Call(name, answer)]
        text = answer.strip()
        values = _between_tags(text) if text.startswith(OPEN) else [_value(text)]
        listed = [
            one for value in values for one in (value if isinstance(value, list) else [value])
        ]
        return self._known([_call(one) for one in listed])

    def may_be_calls(self, beginning: str) -> bool:
        """True if an answer that begins so may turn out to be calls, under auto or required."""
        text = beginning.lstrip()
        return text[:1] in ("", "{", "[") or OPEN.startswith(text) or text.startswith(OPEN)

    def _known(self, made: Sequence[Call | None]) -> list[Call]:
        """Return the calls if each is one, of a tool of this request; else []."""
        calls = [call for call in made if call is not None and call.name in self.schemas]
        return calls if len(calls) == len(made) else []


NO_TOOLS = Tools({})


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, is_one: bool = False
) -> Tools:
    """Return what a request says about tools. Raises ConfigurationError.

    tools, choice  its fields `tools` and `tool_choice`
    is_one         its field `parallel_tool_calls` is false
    """
    schemas = dict(map(_schema, tools or ()))
    if len(schemas) != len(tools or ()):
        raise ConfigurationError("tools: two of them have one name; rename one")
    if len(schemas) > MAX_TOOLS:
        raise ConfigurationError(f"tools: {len(schemas)} of them; at most {MAX_TOOLS}")
    if choice is None:
        choice = "auto" if schemas else "none"
    if isinstance(choice, Mapping):
        name = _named(choice)
        if name not in schemas:
            raise ConfigurationError(
                f"tool_choice: no tool is called {shown(name)}; add it to tools"
            )
        return Tools({name: schemas[name]}, "named")
    if choice not in CHOICES:
        raise ConfigurationError(
            f"tool_choice: expected none, auto, required or a function, got {shown(choice)}"
        )
    if choice != "none" and not schemas:
        raise ConfigurationError(f"tool_choice is {choice}, but there are no tools; give some")
    return Tools(schemas, choice, is_one)


def _named(choice: Mapping[str, Any]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ConfigurationError('tool_choice: expected {"type": "function", "function": {"name"}}')
    return name


def _schema(tool: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a tool's name and the schema of its arguments. Raises ConfigurationError."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise ConfigurationError('tools: expected {"type": "function", "function": {...}}')
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigurationError(f"tools: a function has a name of 1 to {MAX_NAME} characters")
    if schema is not None and not isinstance(schema, Mapping):
        raise ConfigurationError(f"tools: parameters of {name}: expected a JSON schema (a dict)")
    return name, {"type": "object", **(schema or {})}


def _call_schema(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for this place of a larger one: references to its own parts follow it."""
    if isinstance(schema, list | tuple):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _between_tags(text: str) -> list[Any]:
    """Return the JSON values of a text that begins with a tag; [None] if it has another form.

    Tags within the strings of a value are part of it. The last closing tag may be missing.
    """
    values: list[Any] = []
    text = text.removeprefix(OPEN)
    while text.strip():
        text = text.lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return [None]
        values.append(value)
        behind = text[end:].lstrip()
        if behind and not behind.startswith(CLOSE):
            return [None]
        text = behind.partition(OPEN)[2]  # what stands between two calls is no part of either
    return values


def _value(text: str) -> Any:
    """Return the JSON value of a text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> Call | None:
    """Return the call that a JSON value stands for; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], _as_text(arguments))


def _as_text(arguments: dict[str, Any]) -> str:
    """Return the arguments as JSON text; half of a surrogate pair stays the escape that it was."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isascii() or _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def new_id() -> str:
    """Return a fresh id of a call."""
    return f"call_{uuid4().hex[:24]}"


def as_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the calls of a whole answer in OpenAI's form."""
    return [
        {
            "id": new_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
