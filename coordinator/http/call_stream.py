"""Makes OpenAI's messages of answers: thoughts, text, and calls of tools.

A whole answer is read as a stream of one part, so that both say the same of the same tokens.
"""

import json
import secrets
import string
from collections.abc import Sequence
from typing import Any

from coordinator.api.reasoning import Thoughts, ThoughtStream
from coordinator.http.spellings import ARGUMENTS, Call, calls_in, may_be_calls, places_of_marks
from coordinator.http.tools import Tools

IN_CALL = 2  # brackets that are open within a call of a list of calls: [ and {
# Mistral's templates take ids of this length alone.
ID_LEN, ID_SIGNS = 9, string.ascii_letters + string.digits


class AnswerStream:
    """Makes the deltas of one answer: its thoughts, and then its text and calls.

    thoughts  what is known of them before they are written; None: this target writes none
    hidden    special tokens that are in the answer as marks alone, and are no part of its text
    tells_thoughts  False: they are left out
    """

    def __init__(
        self,
        tools: Tools,
        thoughts: Thoughts | None = None,
        *,
        hidden: Sequence[str] = (),
        tells_thoughts: bool = True,
    ) -> None:
        self._thoughts = None if thoughts is None else ThoughtStream(thoughts)
        self._calls = CallStream(tools)
        self._hidden = hidden
        self._tells_thoughts = tells_thoughts

    @property
    def has_calls(self) -> bool:
        """True if the answer has called a tool so far."""
        return self._calls.has_calls

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the delta for the next part of the answer."""
        if self._thoughts is None:
            return self._shown(self._calls.delta(text, is_last=is_last))
        thoughts, text = self._thoughts.read(text, is_last=is_last)
        made: dict[str, Any] = {}
        if thoughts and self._tells_thoughts:
            # vLLM has renamed the field; clients read one or the other.
            made = {"reasoning": thoughts, "reasoning_content": thoughts}
        if text or is_last:
            made |= self._shown(self._calls.delta(text, is_last=is_last))
        if not made.get("content", True):
            del made["content"]
        return made

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of a whole answer."""
        made = self.delta(text, is_last=True)
        content = made.pop("content", None)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if "tool_calls" in made:
            made["tool_calls"] = _joined(made["tool_calls"])
        elif content is None and "reasoning" not in made:
            message["content"] = ""
        return message | made

    def _shown(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return a delta without the marks that are no part of its text."""
        for name in self._hidden if "content" in made else ():
            made["content"] = made["content"].replace(name, "")
        return made


class CallStream:
    """Makes the deltas of an answer, or of what follows its thoughts.

    has_calls  the answer has called a tool so far

    A grammar holds an answer to calls under `required` and a function's name: the arguments are
    passed on as they come. Under `auto` what may be calls is held back until the answer is whole,
    or until it is clear that it is text. Text before calls is passed on.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._is_begun = False  # some text has been passed on
        self._scanner = Scanner() if tools.choice == "required" else None
        self.has_calls = False

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the delta for the next part of the answer."""
        if self._scanner is not None:
            return self._with_calls(self._scanner.read(text))
        if self._tools.choice == "named":
            return self._with_calls(self._named(text))
        if self._tools.choice == "none":
            return {"content": text}
        self._held += text
        told, calls, rest = self._told(is_last=is_last)
        self._held = self._held[len(told) :]
        told += rest.rstrip() if self._is_begun or told else rest.strip()
        self._is_begun = self._is_begun or bool(told)
        return ({"content": told} if told else {}) | self._with_calls(_numbered(calls))

    def _told(self, *, is_last: bool) -> tuple[str, list[Call], str]:
        """Return the text that can be passed on; once all is there, calls and the text behind too.

        White space is held back with what it may precede.
        """
        held = self._held
        first = len(held) - len(held.lstrip())
        for place in [*([] if self._is_begun else [first]), *places_of_marks(held)]:
            is_whole = place == first and not self._is_begun
            if may_be_calls(held, place, is_whole=is_whole):
                before = held[:place].rstrip()
                if not is_last:
                    return before, [], ""
                calls, rest = calls_in(held[place:], self._tools.schemas)
                if calls:
                    return before, calls, rest
        return held if is_last else held.rstrip(), [], ""

    def _with_calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        self.has_calls = self.has_calls or bool(calls)
        return {"tool_calls": calls} if calls else {}

    def _named(self, text: str) -> list[dict[str, Any]]:
        """Return the parts of calls for more arguments of the named function."""
        (name,) = self._tools.schemas
        begun = [] if self.has_calls else [_begun(0, name)]
        return [*begun, _more(0, text)] if text else []


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


def _numbered(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "id": new_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of a whole answer, put together of their parts."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        index = part["index"]
        if index in calls:
            calls[index]["function"]["arguments"] += part["function"]["arguments"]
        else:
            calls[index] = {key: value for key, value in part.items() if key != "index"}
    return list(calls.values())


def new_id() -> str:
    """Return a fresh id of a call."""
    return "".join(secrets.choice(ID_SIGNS) for _ in range(ID_LEN))
