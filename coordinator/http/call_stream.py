"""Turns the parts of a streamed answer into OpenAI's deltas, with the tool calls in it."""

import json
from typing import Any

from coordinator.http.tools import ARGUMENTS, Call, Tools, as_json, new_id

IN_CALL = 2  # brackets that are open within a call of a list of calls: [ and {


class CallStream:
    """Makes the deltas of one streamed answer.

    has_calls  the answer has called a tool so far

    A grammar holds an answer to calls under `required` and a function's name: the arguments are
    passed on as they come. Under `auto` an answer that may be calls is held back until it is whole,
    or until it is clear that it is text.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._is_text = tools.choice == "none"
        self._scanner = Scanner() if tools.choice == "required" else None
        self.has_calls = False

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the delta for the next part of the answer."""
        if self._scanner is not None:
            return self._with_calls(self._scanner.read(text))
        if self._tools.choice == "named":
            return self._with_calls(self._named(text))
        if self._is_text:
            return {"content": text}
        self._held += text
        if is_last and (calls := self._tools.calls(self._held)):
            return self._with_calls(_numbered(calls))
        if is_last or not self._tools.may_be_calls(self._held):
            held, self._held, self._is_text = self._held, "", True
            return {"content": held} if held else {}
        return {}

    def _with_calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        self.has_calls = self.has_calls or bool(calls)
        return {"tool_calls": calls} if calls else {}

    def _named(self, text: str) -> list[dict[str, Any]]:
        """Return the parts of calls for more arguments of the named function."""
        (name,) = self._tools.schemas
        begun = [] if self.has_calls else [_begun(0, name)]
        return [*begun, _more(0, text)] if text else begun


class Scanner:
    """Reads a list of calls as it is written: [{"name": "f", "arguments": {...}}, ...].

    `_depth` counts the open brackets. Within a call, `_key` is the key whose value follows, and
    `_string` the last string. `_is_inside` is True within the arguments of the call `_index`.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._index = -1
        self._key: str | None = None
        self._string = ""
        self._quotes = ""  # the string that is being read, with its first quotation mark
        self._is_escaped = False
        self._is_inside = False

    def read(self, text: str) -> list[dict[str, Any]]:
        """Return the parts of calls that the next part of the list adds, in OpenAI's form."""
        parts: list[dict[str, Any]] = []
        arguments = ""
        for sign in text:
            was_inside = self._is_inside
            if self._quotes:
                name = self._in_string(sign)
                if name is not None:
                    self._index += 1
                    parts.append(_begun(self._index, name))
            else:
                self._outside(sign)
            if was_inside or self._is_inside:
                arguments += sign
            if was_inside and not self._is_inside:
                parts.append(_more(self._index, arguments))
                arguments = ""
        if arguments:
            parts.append(_more(self._index, arguments))
        return parts

    def _in_string(self, sign: str) -> str | None:
        """Read the next character of a string; return the name of a call that begins with it."""
        self._quotes += sign
        if self._is_escaped or sign == "\\":
            self._is_escaped = not self._is_escaped
            return None
        if sign != '"':
            return None
        self._string, self._quotes = self._quotes, ""
        is_name = self._depth == IN_CALL and self._key == "name"
        return str(json.loads(self._string)) if is_name else None

    def _outside(self, sign: str) -> None:
        """Read the next character outside of strings."""
        if sign == '"':
            self._quotes = sign
        elif sign in "{[":
            if self._depth == IN_CALL and self._key in ARGUMENTS:
                self._is_inside = True
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            if self._depth == IN_CALL:
                self._is_inside = False
        elif self._depth == IN_CALL and sign == ":":
            self._key = str(json.loads(self._string))
        elif self._depth == IN_CALL and sign == ",":
            self._key = None


def _begun(index: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": new_id(), "type": "function", "function": function}


def _more(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def _numbered(calls: list[Call]) -> list[dict[str, Any]]:
    return [{"index": index, **call} for index, call in enumerate(as_json(calls))]
