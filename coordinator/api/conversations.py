"""Checks conversations and prepares them for a chat template, as transformers does.

A template comes with a model and is not trusted: it gets copies made of plain JSON values alone.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from proto.errors import ConfigurationError, shown

Messages = Sequence[Mapping[str, Any]]

# The names that a message's reasoning may have. Templates read the first or the second of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
# What may stand in a message in place of a content.
_INSTEAD = ("tool_calls", *REASONING)


def check(messages: Messages, *, is_plain: bool) -> None:
    """Raise ConfigurationError for a malformed conversation.

    is_plain  True: the template is ours, which shows texts and tool calls alone
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigurationError(f"a conversation is a list of messages, not {shown(messages)}")
    if not messages:
        raise ConfigurationError("the conversation is empty: give at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not _says(message):
            raise ConfigurationError(
                f'a message has a "role" and a "content"; this one is {shown(message)}'
            )
        role, content = message["role"], message.get("content")
        if not isinstance(role, str):
            raise ConfigurationError(f'the "role" of a message is a string, not {shown(role)}')
        has_calls = content is None and isinstance(message.get("tool_calls"), Sequence)
        is_other = has_calls if is_plain else _is_structured(content)
        if not isinstance(content, str) and not is_other:
            raise ConfigurationError(f'the "content" of a message is a text, not {shown(content)}')


def _says(message: Mapping[str, Any]) -> bool:
    """True if a message has a content, or something that may stand in its place."""
    return "content" in message or any(message.get(name) is not None for name in _INSTEAD)


def _is_structured(content: object) -> bool:
    """True for a message content that is no string: None (with tool calls) or a list of parts."""
    if isinstance(content, Sequence):
        return all(isinstance(part, Mapping) for part in content)
    return content is None


def prepared(messages: Messages) -> list[dict[str, Any]]:
    """Return copies of the messages as transformers gives them to a template.

    They hold JSON values alone, no key whose value is null, and a message's reasoning under the
    names that templates read, whichever of them it has.
    """
    return [_with_reasoning(plain(_without_nulls(message))) for message in messages]


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its null values, which many templates would show as "None"."""
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    said = next((message[name] for name in REASONING if name in message), None)
    if said is None:
        return message
    return {"thinking": said, **message, "reasoning_content": said}


def plain(value: Any) -> Any:
    """Return a copy made of JSON values; an object of another kind becomes the name of its kind.

    Such objects have methods that a template could call.
    """
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            return kind(value)
    match value:
        case None:
            return None
        case Mapping():
            return {plain(key): plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
        case tuple():
            return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic's models
        return plain(dump())
    return f"<{type(value).__name__}>"


def size_of(value: Any, most: int) -> int:
    """Return about how many characters a value of JSON has, counted up to `most`."""
    size, left = 0, [value]
    while left and size < most:
        one = left.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
        size += 1
    return size


def with_arguments(message: Any) -> Any:
    """Return a message whose tool calls have their arguments as a dict, as in vLLM.

    Chat templates want a dict, and OpenAI's API has a JSON text. transformers converts nothing.
    """
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list | tuple):
        return message
    try:
        return {**message, "tool_calls": [_read_call(plain(call)) for call in calls]}
    except RecursionError:  # whoever renders it says that it is nested too deeply
        return message


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # an answer may have been cut within them
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a string, is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


# -- continuing the last message -------------------------------------------------------------------

# Put behind the last message's content, to find that place in the prompt. Plain letters stay the
# same in whatever way a template shows the content. The space at the end tells if a template
# removes spaces there: then the content's own are removed, too.
_MARK = "THE-LAST-MESSAGE-ENDS-HERE "


def marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with a mark at the end of the last one, and that message's text.

    Raises ConfigurationError if it has no text.
    """
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}], content
    parts = list(content or ())
    for place in reversed(range(len(parts))):
        if isinstance(text := parts[place].get("text"), str):
            parts[place] = {**parts[place], "text": text + _MARK}
            return [*before, {**last, "content": parts}], text
    raise ConfigurationError(
        "continue_final_message: the last message has no text that could be continued"
    )


def until_mark(prompt: str, text: str) -> str:
    """Return a prompt up to the mark behind `text`. Raises ConfigurationError: it is not there."""
    place = prompt.rfind(_MARK.rstrip())
    if place < 0 or text.strip() not in prompt:
        raise ConfigurationError(
            "continue_final_message: the chat template does not show the last message as it is"
        )
    return prompt[:place] if prompt.startswith(_MARK, place) else prompt[:place].rstrip()
