"""Thoughts and calls of tools in whole answers, and in streams that are cut anywhere."""

import json
import re
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.api.reasoning import READERS, Marks, ParserName, Thoughts, marks_of
from coordinator.http.call_stream import AnswerStream
from coordinator.http.spellings import SPELLINGS
from coordinator.http.tools import Tools, read_tools

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
AUTO = read_tools(TOOLS, "auto")
THINK = READERS["think"]
CUTS = st.lists(st.integers(0, 120), max_size=10)


def streamed(stream: AnswerStream, answer: str, cuts: list[int]) -> dict[str, Any]:
    """The message that a client puts together from the deltas."""
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    made: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for number, (start, end) in enumerate(pairwise(places)):
        delta = stream.delta(answer[start:end], is_last=number == len(places) - 2)
        for name in {"content", "reasoning", "reasoning_content"} & delta.keys():
            made[name] = made.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls[part["index"]] = {**part["function"]}
                continue
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert stream.has_calls == bool(calls)
    if calls:
        made["tool_calls"] = [calls[index] for index in sorted(calls)]
    return made


def whole(stream: AnswerStream, answer: str) -> dict[str, Any]:
    """The message of a whole answer, without its role, refusal and ids, and without nothing."""
    message = stream.message(answer)
    assert (message.pop("role"), message.pop("refusal")) == ("assistant", None)
    if "tool_calls" in message:
        message["tool_calls"] = [one["function"] for one in message["tool_calls"]]
    return {name: value for name, value in message.items() if value}


def call(city: str = "Köln", **more: Any) -> dict[str, Any]:
    """A call of the weather, as a message has it."""
    arguments = json.dumps({"city": city, **more}, ensure_ascii=False)
    return {"name": "weather", "arguments": arguments}


ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
TIME = {"name": "time", "arguments": "{}"}
XML = "<function=weather>\n<parameter=city>\nKöln\n</parameter>\n{}</function>"
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    # JSON, alone and between tags
    (ONE, {"tool_calls": [call()]}),
    (f" [{ONE}, {ONE}]\n", {"tool_calls": [call(), call()]}),
    (f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}", {"tool_calls": [call(), call()]}),
    (ONE.replace("arguments", "parameters"), {"tool_calls": [call()]}),
    (ONE.replace('{"city": "Köln"}', r'"{\"city\": \"Köln\"}"'), {"tool_calls": [call()]}),
    (f"Here: \n<tool_call>{ONE}</tool_call>", {"content": "Here:", "tool_calls": [call()]}),
    (f"a<tool_call>[{ONE}]", {"content": "a", "tool_calls": [call()]}),
    (
        f"<tool_call>{ONE}</tool_call> and <tool_call>{ONE}</tool_call> so",
        {"content": "and  so", "tool_calls": [call()] * 2},
    ),
    (
        f"before<tool_call>{XML.format('')}</tool_call>after",
        {"content": "beforeafter", "tool_calls": [call()]},
    ),
    (f"[TOOL_CALLS][{ONE}] That is all.", {"content": "That is all.", "tool_calls": [call()]}),
    (ONE.replace("Köln", "<tool_call>"), {"tool_calls": [call("<tool_call>")]}),
    (f"<tool_call>{ONE.replace('Köln', '</tool_call>')}", {"tool_calls": [call("</tool_call>")]}),
    (
        ONE.replace("Köln", "\\ud800"),
        {"tool_calls": [{"name": "weather", "arguments": '{"city": "\\ud800"}'}]},
    ),
    # Llama
    (f"{ONE}; {ONE}", {"tool_calls": [call(), call()]}),
    (f"<|python_tag|>{ONE}", {"tool_calls": [call()]}),
    ('<|python_tag|>weather.call(city="Köln", days=2)', {"tool_calls": [call(days=2)]}),
    ("[weather(city='Köln', exact=true), time()]", {"tool_calls": [call(exact=True), TIME]}),
    # Mistral
    (f"[TOOL_CALLS][{ONE}, {ONE}]", {"tool_calls": [call(), call()]}),
    (f'[TOOL_CALLS] [{ONE[:-1]}, "id": "abcdefghi"}}]', {"tool_calls": [call()]}),
    ('Yes.[TOOL_CALLS]weather[ARGS]{"city": "Köln"}', {"content": "Yes.", "tool_calls": [call()]}),
    (
        '[TOOL_CALLS]weather{"city": "Köln"}[TOOL_CALLS]time[CALL_ID]abc123def[ARGS]{}',
        {"tool_calls": [call(), TIME]},
    ),
    # Qwen's XML
    (f"<tool_call>\n{XML.format('')}\n</tool_call>", {"tool_calls": [call()]}),
    (f"Well\n\n{XML.format('')}", {"content": "Well", "tool_calls": [call()]}),
    (
        XML.format("<parameter=days>\n3\n</parameter>\n<parameter=exact>None</parameter>"),
        {"tool_calls": [call(days=3, exact=None)]},
    ),
    (XML.format("<parameter=days>\nsome\n"), {"tool_calls": [call(days="some")]}),
    (XML.replace("Köln", "3").format(""), {"tool_calls": [call("3")]}),
    (
        f"<tool_call>{XML.format('')}</tool_call><tool_call><function=time></function></tool_call>",
        {"tool_calls": [call(), TIME]},
    ),
]
TEXTS = [
    *("<tool_call>", "<tool_call>\n<", "<tool_call>\n<function"),
    *("", "[]", "It is fine.", "It is {fine}.", '{"is": "JSON"}', "<tool", "<b> [x](y) <", " \n"),
    *(ONE[:-1], ONE.replace("weather", "unknown"), '{"name": "weather"}', "[" * 5000),
    *('{"name": 1, "arguments": {}}', f"<tool_call>{ONE} and</tool_call>", f"{ONE} is it"),
    *(f"Say {ONE}", "The tag <tool_call> begins calls.", XML.format("")[:-3], "[weather('x')]"),
    *("[TOOL_CALLS]weather", "[TOOL_CALLS]other{}", "<|python_tag|>print(1)", "[a for a in b]"),
    *("[weather(city=open('x'))]", "<function=other></function>", "[weather(**{'city': 1})]"),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_a_whole_answer_has_the_calls_that_the_model_has_written(
    answer: str, expected: dict[str, Any]
) -> None:
    assert whole(AnswerStream(AUTO), answer) == expected


def test_each_spelling_is_among_the_answers() -> None:
    read = [
        spelling
        for spelling in SPELLINGS
        for answer, expected in ANSWERS
        if answer.removeprefix(expected.get("content", "")).strip().startswith(spelling.mark)
        and spelling.read(answer.removeprefix(expected.get("content", "")).strip(), {})
    ]
    assert set(read) == set(SPELLINGS)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_of_a_tool_of_the_request_stays_text(text: str) -> None:
    assert whole(AnswerStream(AUTO), text) == ({"content": text} if text else {})
    assert whole(AnswerStream(read_tools(TOOLS, "none")), ONE) == {"content": ONE}


@given(st.sampled_from(ANSWERS), CUTS)
def test_a_stream_cut_anywhere_has_the_calls_of_the_whole_answer(
    one: tuple[str, dict[str, Any]], cuts: list[int]
) -> None:
    assert streamed(AnswerStream(AUTO), one[0], cuts) == one[1]


@given(st.sampled_from(TEXTS), CUTS)
def test_a_stream_cut_anywhere_has_the_text_of_the_whole_answer(text: str, cuts: list[int]) -> None:
    assert streamed(AnswerStream(AUTO), text, cuts).get("content", "") == text


def test_text_is_passed_on_as_soon_as_it_can_be_no_call() -> None:
    stream = AnswerStream(AUTO)
    parts = ["It ", "is <", "b>", "fine <tool_call> ", "x", "[TOOL_", "CALLS", "]"]
    told = [stream.delta(part, is_last=False).get("content", "") for part in parts]
    assert told == ["It", " is", " <b>", "fine", " <tool_call> x", "", "", ""]


# -- under a grammar -------------------------------------------------------------------------------

ODD = {'a\\"]}{[': ["}", {"name": "x", "arguments": {"y": 1}}], "é": "\\"}
LISTED = [{"name": "weather", "arguments": ODD}, {"name": "time", "arguments": {}}]


@given(CUTS, st.integers(0, 200))
def test_calls_that_a_grammar_demands_are_the_same_whole_and_as_a_stream_also_when_cut_off(
    cuts: list[int], length: int
) -> None:
    required = read_tools(TOOLS, "required")
    answer = json.dumps(LISTED, ensure_ascii=False, indent=1)[:length]
    found = whole(AnswerStream(required), answer)
    assert streamed(AnswerStream(required), answer, cuts) == found
    assert found.keys() <= {"tool_calls"}
    written = json.dumps(LISTED[0]["arguments"], ensure_ascii=False, indent=1)
    for calls in found.values():
        assert [one["name"] for one in calls] == ["weather", "time"][: len(calls)]
        first = re.sub(r"\s", "", calls[0]["arguments"])
        assert re.sub(r"\s", "", written).startswith(first)
    named = read_tools(TOOLS, NAMED)
    begun = '{"city": "x"}'[:length]
    expected = {"tool_calls": [{"name": "weather", "arguments": begun}]} if begun else {}
    assert streamed(AnswerStream(named), begun, cuts) == whole(AnswerStream(named), begun)
    assert whole(AnswerStream(named), begun) == expected


def test_a_whole_list_of_calls_is_read_to_its_end() -> None:
    stream = AnswerStream(read_tools(TOOLS, "required"))
    calls = stream.message(json.dumps(LISTED))["tool_calls"]
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [ODD, {}]
    assert len({one["id"] for one in calls}) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one["id"]) for one in calls)
    assert all(one["type"] == "function" and "index" not in one for one in calls)


def test_a_required_call_that_was_cut_off_has_its_arguments_as_far_as_they_were_written() -> None:
    answer = '[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "Kö'
    found = whole(AnswerStream(read_tools(TOOLS, "required")), answer)
    assert found == {"tool_calls": [TIME, {"name": "weather", "arguments": '{"city": "Kö'}]}


# -- thoughts --------------------------------------------------------------------------------------


def thinking(text: str, answer: dict[str, Any]) -> dict[str, Any]:
    """A message with thoughts, under both names."""
    return {"reasoning": text, "reasoning_content": text, **answer}


THOUGHTS: list[tuple[bool, str, dict[str, Any]]] = [
    (True, "\nSo <it>\n is.\n</think>\n\nYes.\n", thinking("So <it>\n is.", {"content": "Yes.\n"})),
    (True, "<think>\nSo\n</think>Yes", thinking("So", {"content": "Yes"})),
    (False, "\n<think>So</think>Yes </think>", thinking("So", {"content": "Yes </think>"})),
    (False, "Yes <think>no</think>", {"content": "Yes <think>no</think>"}),
    (False, "<thin", {"content": "<thin"}),
    (False, " \n", {"content": " \n"}),
    (True, "</think>Yes", {"content": "Yes"}),
    (True, "never </thin ended \n", thinking("never </thin ended", {})),
    (True, "So</think>\n\n", thinking("So", {})),
    (False, "<think>", {}),
    (True, f"So\n</think>\n{ONE}", thinking("So", {"tool_calls": [call()]})),
    (
        True,
        f"<tool_call>{ONE}</think>I call.\n\n<tool_call>{ONE}",
        thinking(f"<tool_call>{ONE}", {"content": "I call.", "tool_calls": [call()]}),
    ),
]


@given(st.sampled_from(THOUGHTS), CUTS, st.sampled_from([THINK, *READERS.values()]))
def test_thoughts_leave_under_both_names_whole_and_in_a_stream_cut_anywhere(
    one: tuple[bool, str, dict[str, Any]], cuts: list[int], marks: Marks
) -> None:
    is_open, answer, expected = one

    def spelt(text: str) -> str:
        return text.replace("<think>", marks.opening).replace("</think>", marks.closing)

    assume(marks is THINK or "<thin" not in answer.replace("<think>", ""))  # half a mark
    wanted = json.loads(spelt(json.dumps(expected)))
    for tools in (AUTO, read_tools(None, None))[: 1 if "tool_calls" in expected else 2]:
        thoughts = Thoughts(marks, is_open)
        assert whole(AnswerStream(tools, thoughts), spelt(answer)) == wanted
        assert streamed(AnswerStream(tools, thoughts), spelt(answer), cuts) == wanted


def test_calls_that_a_grammar_demands_come_behind_the_thoughts() -> None:
    for tools in (read_tools(TOOLS, "required"), read_tools(TOOLS, NAMED)):
        text = f"[{ONE}]" if tools.choice == "required" else '{"city": "Köln"}'
        stream = AnswerStream(tools, Thoughts(THINK, is_open=True))
        assert whole(stream, f"[{{\n</think>\n\n{text}") == thinking("[{", {"tool_calls": [call()]})


def test_thoughts_can_be_left_out() -> None:
    stream = AnswerStream(AUTO, Thoughts(THINK, is_open=True), tells_thoughts=False)
    assert whole(stream, "So</think>Yes") == {"content": "Yes"}
    stream = AnswerStream(AUTO, Thoughts(THINK, is_open=False), tells_thoughts=False)
    assert whole(stream, '{"answer": 42}') == {"content": '{"answer": 42}'}


def test_special_tokens_that_mark_calls_are_no_part_of_a_text() -> None:
    stream = AnswerStream(AUTO, hidden=["[TOOL_CALLS]", "<|python_tag|>"])
    assert whole(stream, "a [TOOL_CALLS] b") == {"content": "a  b"}


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_thoughts_have_begun(
    prompt: str, *, is_open: bool
) -> None:
    assert Thoughts.after(prompt, THINK).is_open == is_open


def test_a_message_that_is_continued_may_end_within_thoughts() -> None:
    for message, is_open in (("<think>So", True), ("<think>So</think>It", False), ("So", False)):
        assert Thoughts.after(f"<assistant>{message}", THINK, message).is_open == is_open


def test_the_template_says_how_thoughts_are_marked() -> None:
    assert marks_of("auto", "{{ content.split('</think>')[-1] }}") == THINK
    assert marks_of("auto", "[THINK]x[/THINK]") == READERS["mistral"]
    assert marks_of("auto", "{{ content }}") is None
    assert marks_of("none", "</think>") is None
    assert marks_of("think", "") == THINK
    assert marks_of("qwen3", "") == THINK
    assert {*get_args(ParserName)} == {"auto", "none", *READERS}


def test_no_tools_and_no_thoughts_leave_every_delta_as_it_is() -> None:
    stream = AnswerStream(Tools({}))
    assert [stream.delta(part, is_last=False) for part in (" ", "<tool_call>", "")] == [
        {"content": " "},
        {"content": "<tool_call>"},
        {"content": ""},
    ]
