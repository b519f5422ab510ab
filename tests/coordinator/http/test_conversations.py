"""Messages come in every form that OpenAI's client sends; what it was given can be sent back."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from coordinator.api.chat import ChatTemplate
from coordinator.http.bodies import ChatBody, TokenizeBody
from coordinator.http.conversations import as_read
from proto.errors import ConfigurationError

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
READ = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CITATION = {"start_index": 0, "end_index": 1, "title": "t", "url": "u"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "x", "refusal": None, "audio": None, "function_call": None}, {"content": "x"}),
        ({"content": "x", "tool_calls": None, "annotations": None}, {"content": "x"}),
        ({"content": "x", "tool_calls": [], "annotations": []}, {"content": "x"}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"refusal": "no"}, {"content": "no"}),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": ""}, {"content": ""}),
        ({"content": "x", "name": "me"}, {"content": "x", "name": "me"}),
        ({"content": None, "tool_calls": [CALL]}, {"content": None, "tool_calls": [READ]}),
        ({"content": "x", "tool_calls": [CALL]}, {"content": "x", "tool_calls": [READ]}),
        (
            {"content": None, "function_call": CALL["function"]},
            {
                "content": None,
                "tool_calls": [{"type": "function", "function": READ["function"]}],  # type: ignore[dict-item]
            },
        ),
        (
            {"content": None, "audio": {"id": "1", "data": "", "transcript": "said"}},
            {"content": "said"},
        ),
        (
            {"content": "x", "annotations": [{"type": "url_citation", "url_citation": CITATION}]},
            {"content": "x"},
        ),
        ({"content": "x", "reasoning_content": "r"}, {"content": "x", "reasoning_content": "r"}),
    ],
)
def test_a_past_answer_is_read_in_every_form(
    message: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert as_read({"role": "assistant", **message}) == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "tool", "tool_call_id": "1", "content": "aa"},
        ),
        (
            {"role": "function", "name": "f", "content": "r"},
            {"role": "tool", "name": "f", "content": "r"},
        ),
        (
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "developer", "content": "a"},
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}], "name": "me"},
            {"role": "user", "content": "a", "name": "me"},
        ),
    ],
)
def test_other_roles_have_parts_and_earlier_names(
    message: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert as_read(message) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (None, {}), ("{}", {}), ('{"a', '{"a'), ({"a": 1}, {"a": 1})],
)
def test_arguments_of_calls_are_dicts_unless_they_were_cut(arguments: Any, expected: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (read,) = as_read({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert read["function"] == {"name": "f", "arguments": expected}


@pytest.mark.parametrize(
    "given",
    [
        {"content": "x"},
        {"content": ""},
        {"content": None, "refusal": "no"},
        {"content": None, "tool_calls": [CALL]},
        {"content": "x", "tool_calls": [CALL, CALL]},
        {"content": None},
    ],
)
@pytest.mark.parametrize("leaves_out", [True, False])
def test_what_the_client_was_given_can_be_sent_back(
    given: dict[str, Any], *, leaves_out: bool
) -> None:
    """With the fields that it fills with null, and without them; also for a plain transcript."""
    answer = ChatCompletionMessage.model_validate({"role": "assistant", **given})
    sent = json.loads(answer.model_dump_json(exclude_unset=leaves_out))
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "q"}, sent]})
    text = ChatTemplate(None, {}, "x").render(body.conversation(), body.arguments())
    assert (given.get("content") or given.get("refusal") or "") in text
    assert text.endswith("Assistant:")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "messages: only texts can be read, and this part is another: {'type': 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages: only texts can be read"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages: only texts can be read"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages: only texts can be read"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages: past speech cannot be heard"),
    ],
)
def test_what_is_no_text_is_refused(message: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        as_read(message)
    assert str(caught.value).startswith(line)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 5, "stream": True},
        {"chat_template_kwargs": {"a": 1}, "documents": [{"title": "t", "text": "x"}]},
        {"reasoning_effort": "low", "temperature": 0.5},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ],
)
def test_the_tokens_of_a_conversation_are_those_of_the_chat_route(body: dict[str, Any]) -> None:
    chat = ChatBody.model_validate({"messages": USER, **body})
    tokenize = TokenizeBody.model_validate({"messages": USER, **body})
    assert chat.conversation() == tokenize.conversation()
    assert chat.arguments() == tokenize.arguments()


def test_an_effort_goes_to_the_template_and_says_whether_the_target_thinks() -> None:
    for effort, thinks in (("low", True), ("none", False)):
        body = ChatBody.model_validate({"messages": USER, "reasoning_effort": effort})
        assert body.arguments() == {"reasoning_effort": effort, "enable_thinking": thinks}
    said = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    body = ChatBody.model_validate({"messages": USER, **said})
    assert body.arguments() == {"reasoning_effort": "low", "enable_thinking": False}
