"""Tool calls: what a request may ask, and the form of the answer to it."""

import json
import re
from typing import Any

import pytest

from coordinator.http.bodies import ChatBody, CompletionBody
from coordinator.http.tools import read_tools
from proto.errors import ConfigurationError
from tests.tiny_tokenizer import sentencepiece_tokenizer

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
MESSAGES = [{"role": "user", "content": "x"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat(**fields: Any) -> ChatBody:
    """A body of the chat route."""
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (NAMED, "named"),
    ],
)
def test_a_choice_is_read(choice: Any, expected: str) -> None:
    tools = read_tools(TOOLS, choice)
    assert tools.choice == expected
    assert list(tools.schemas) == (["weather"] if expected == "named" else ["weather", "time"])
    assert (tools.form is not None) == (expected in ("required", "named"))


def test_auto_without_tools_asks_for_nothing() -> None:
    assert read_tools([], "auto").choice == "none"
    assert read_tools(None, "auto").choice == "none"


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "function"}], None, "tools: expected"),
        ([{"type": "function", "function": {"name": ""}}], None, "has a name"),
        ([{"type": "function", "function": {"name": "f", "parameters": 1}}], None, "JSON schema"),
        ([*TOOLS, *TOOLS], None, "two of them"),
        ([], "required", "there are no tools"),
        (TOOLS, "must", "tool_choice: expected"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "no tool is called"),
        (TOOLS, {"type": "x"}, "tool_choice: expected"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        read_tools(tools, choice)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 100


def test_the_form_of_an_answer_is_read_under_every_name() -> None:
    schema = {"type": "object"}
    by_openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for body in (
        chat(response_format=by_openai),
        chat(guided_json=schema),
        chat(structured_outputs={"json": schema}),
        CompletionBody.model_validate({"prompt": "x", "guided_json": json.dumps(schema)}),
    ):
        form = body.params(0).structured_outputs
        assert form is not None
        assert json.loads(form.source) == schema
    form = chat(response_format={"type": "json_object"}).params(0).structured_outputs
    assert form is not None
    assert form.kind == "json_object"
    assert chat(response_format={"type": "text"}, tools=TOOLS).params(0).structured_outputs is None
    with pytest.raises(ConfigurationError, match="given twice"):
        chat(guided_regex="a", guided_choice=["a"]).params(0)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        chat(guided_regex="a", tools=TOOLS, tool_choice="required").params(0)
    with pytest.raises(ConfigurationError, match=r"json_schema\.schema is missing"):
        chat(response_format={"type": "json_schema"}).params(0)


def test_references_within_the_arguments_of_a_tool_still_point_at_its_own_parts() -> None:
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Grammars

    node = {
        "type": "object",
        "properties": {"below": {"$ref": "#"}, "of": {"$ref": "#/$defs/kind"}},
        "$defs": {"kind": {"enum": [1]}},
    }
    tools = [{"type": "function", "function": {"name": n, "parameters": node}} for n in "ab"]
    form = read_tools(tools, "required").form
    assert form is not None
    source = form.source
    assert source.count('"#/items/anyOf/1/properties/arguments"') == 1
    assert source.count('"#/items/anyOf/1/properties/arguments/$defs/kind"') == 1
    assert Grammars(sentencepiece_tokenizer()).of(form)


def test_parameters_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"items": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        _ = read_tools(tools, "required").form


def test_calls_one_after_another_are_one_call_in_an_answer() -> None:
    one = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).form()
    several = chat(tools=TOOLS, tool_choice="required").form()
    assert one is not None
    assert several is not None
    assert json.loads(one.source)["maxItems"] == 1
    assert "maxItems" not in json.loads(several.source)


def test_templates_get_the_tools_and_the_arguments_of_earlier_calls_as_dicts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}
    earlier = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    body = chat(messages=earlier, tools=TOOLS)
    assert body.arguments() == {"tools": TOOLS}
    assert chat(tools=TOOLS, tool_choice="none").arguments() == {}
    said = body.conversation()[1]
    assert said["content"] is None
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_schema_counts_its_characters_alike_in_openais_words_and_in_vllms() -> None:
    schema = {"enum": ["é" * 30_000]}
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    form = chat(response_format=openai).form()
    assert form == chat(structured_outputs={"json": schema}).form()
