"""A conversation in a request: its messages in every form that OpenAI's client sends.

What the client itself was given in an answer can be sent back as it is: fields that are null, a
refusal in place of a content, and the forms that tool calls had earlier.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from coordinator.api.conversations import with_arguments
from coordinator.http.prompting import Prompting
from coordinator.http.tools import Tools, read_tools
from proto.errors import ConfigurationError, shown

# The parts of a content that are text, and where each has it.
TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_MESSAGES = 1 << 16

T = TypeVar("T")
# A list of which only the first wrong item is told: there may be millions.
Many = Annotated[list[T], Field(fail_fast=True)]


class ChatMessage(BaseModel):
    """One message of a conversation; a chat template may read further fields of it."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Many[dict[str, Any]] | None = None


class Conversation(Prompting):
    """The fields that decide what prompt a chat template makes of a conversation."""

    messages: Annotated[Many[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for a chat template, text parts joined. Raises ConfigurationError."""
        return [as_read(one.model_dump(exclude_unset=True)) for one in self.messages or ()]

    def asked_tools(self) -> Tools:
        """Return the tools that the answer may or must call. Raises ConfigurationError."""
        return read_tools(self.tools, self.tool_choice, is_one=self.parallel_tool_calls is False)

    def arguments(self) -> dict[str, Any]:
        """Return the variables of the chat template; it is told the tools, except for none.

        As in vLLM, an effort also says whether the target thinks, unless the request says it.
        """
        given = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            given["tools"] = self.tools
        if self.documents is not None:
            given["documents"] = self.documents
        if self.reasoning_effort is not None:
            given.setdefault("enable_thinking", self.reasoning_effort != "none")
            given["reasoning_effort"] = self.reasoning_effort
        return given


def as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it. Raises ConfigurationError."""
    read = {"content": None} | {name: value for name, value in message.items() if value is not None}
    if isinstance(read["content"], list):
        read["content"] = "".join(map(_text_of, read["content"]))
    read = _with_content(_in_present_form(read))
    with_calls: dict[str, Any] = with_arguments(read)
    return with_calls


def _text_of(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    text = part.get(TEXT_OF[kind]) if isinstance(kind, str) and kind in TEXT_OF else None
    if not isinstance(text, str):
        raise ConfigurationError(
            f"messages: only texts can be read, and this part is another: {shown(dict(part))}"
        )
    return text


def _in_present_form(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the forms that OpenAI's API had before it had tools."""
    call = message.pop("function_call", None)
    if call is not None and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message | {"role": "tool"} if message["role"] == "function" else message


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with what stands in place of its content, if it has none.

    A past answer may be a refusal, or speech with its words; or it may be empty.
    """
    refusal, audio = message.pop("refusal", None), message.pop("audio", None)
    message.pop("annotations", None)  # where its words come from: they are no part of the text
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # an empty list of calls is none
    if message["content"] is not None or message["role"] != "assistant":
        return message
    if isinstance(audio, Mapping) and "transcript" not in audio:
        raise ConfigurationError("messages: past speech cannot be heard; give its words as content")
    said = audio.get("transcript") if isinstance(audio, Mapping) else refusal
    is_silent = said is None and not message.get("tool_calls")
    return message | {"content": "" if is_silent else said}
