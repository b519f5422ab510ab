"""Tool calls: what a request may ask, calls in whole answers, and in streams cut anywhere."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.bodies import ChatBody, CompletionBody
from coordinator.http.call_stream import CallStream
from coordinator.http.tools import Call, Tools, read_tools
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


ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
WANTED = Call("weather", '{"city": "Köln"}')
TAGS = Call("weather", '{"city": "<tool_call>"}')
END_TAGS = Call("weather", '{"city": "</tool_call>"}')


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        (ONE, [WANTED]),
        (f" [{ONE}, {ONE}]\n", [WANTED, WANTED]),
        (f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}", [WANTED, WANTED]),
        (ONE.replace("arguments", "parameters"), [WANTED]),
        ("", []),
        ("[]", []),
        ("It is fine.", []),
        (f"Here: <tool_call>{ONE}</tool_call>", []),
        (ONE[:-1], []),
        (ONE.replace("weather", "unknown"), []),
        ('{"name": "weather"}', []),
        ('{"name": 1, "arguments": {}}', []),
        ("[" * 5000, []),
        (f"<tool_call>[{ONE}, {ONE}]</tool_call>", [WANTED, WANTED]),
        (f"<tool_call>{ONE}</tool_call> and <tool_call>{ONE}</tool_call> so", [WANTED, WANTED]),
        (f"<tool_call>{ONE} and</tool_call>", []),
        (ONE.replace("Köln", "<tool_call>"), [TAGS]),
        (f"[{ONE.replace('Köln', '<tool_call>')}]", [TAGS]),
        (f"<tool_call>{ONE.replace('Köln', '</tool_call>')}</tool_call>", [END_TAGS]),
        (ONE.replace("Köln", "\\ud800"), [Call("weather", '{"city": "\\ud800"}')]),
    ],
)
def test_calls_in_a_whole_answer(answer: str, calls: list[Call]) -> None:
    assert read_tools(TOOLS, "auto").calls(answer) == calls


def streamed(tools: Tools, answer: str, cuts: list[int]) -> tuple[str, list[dict[str, Any]]]:
    """The content and the calls that a client puts together from the deltas."""
    stream = CallStream(tools)
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    content, calls = "", {}
    for number, (start, end) in enumerate(pairwise(places)):
        delta = stream.delta(answer[start:end], is_last=number == len(places) - 2)
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls[part["index"]] = {**part["function"], "id": part["id"]}
                continue
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert stream.has_calls == bool(calls)
    return content, [calls[index] for index in sorted(calls)]


@given(st.lists(st.integers(0, 80), max_size=8))
def test_a_stream_cut_anywhere_has_the_same_calls(cuts: list[int]) -> None:
    odd = {'a\\"]}{[': ["}", {"name": "x", "arguments": {"y": 1}}], "é": "\\"}
    calls = [{"name": "weather", "arguments": odd}, {"name": "time", "arguments": {}}]
    answer = json.dumps(calls, ensure_ascii=False, indent=1)
    content, found = streamed(read_tools(TOOLS, "required"), answer, cuts)
    assert content == ""
    assert [(c["name"], json.loads(c["arguments"])) for c in found] == [
        ("weather", odd),
        ("time", {}),
    ]
    assert len({c["id"] for c in found}) == 2
    content, found = streamed(read_tools(TOOLS, NAMED), '{"city": "x"}', cuts)
    assert (content, [c["arguments"] for c in found]) == ("", ['{"city": "x"}'])
    auto = read_tools(TOOLS, "auto")
    content, found = streamed(auto, f"<tool_call>{ONE}</tool_call>", cuts)
    assert (content, [c["arguments"] for c in found]) == ("", ['{"city": "Köln"}'])
    for text in ("It is {fine}.", '{"is": "JSON"}', "<tool", "<b>"):
        assert streamed(auto, text, cuts) == (text, [])
    assert streamed(read_tools(None, None), answer, cuts) == (answer, [])


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
