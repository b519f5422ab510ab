"""Tool calls of the chat route: what a request asks about tools, and the grammar for it.

With `tool_choice` required an answer is held to a JSON list of calls by a grammar, and with a
function's name to the arguments alone. With auto it is free, and `spellings.py` reads the calls in
it. `call_stream.py` makes OpenAI's `tool_calls` of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError, shown

MAX_TOOLS, MAX_NAME = 128, 64
CHOICES = ("none", "auto", "required")


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
            return StructuredOutputsParams(json=schema, called="the schema of tools")
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
            json={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}},
            called="the schema of tools",
        )


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
    if choice == "auto" and not schemas:  # clients say it whether they have tools or not
        choice = "none"
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
