"""Structured output on real nodes: answers are valid, and those of the target alone."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from coordinator.api.asking import Asking
from coordinator.api.config import SpeculationConfig
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch
from coordinator.api.structured import StructuredOutputsParams
from tests.process.drawn_forms import answered, forms
from tests.process.served import LIMIT_S, Served, client_of, serving

pytestmark = pytest.mark.process
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PROMPT = "Once upon a time"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = r"[a-z]{3,8}(, [a-z]{3,8}){2,4}\."
FORMS = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=PATTERN),
}
PLAIN = SpeculationConfig(policy="ar")


def is_valid(name: str, text: str) -> bool:
    """Whether a whole answer is what was asked."""
    if name == "regex":
        return re.fullmatch(PATTERN, text) is not None
    jsonschema.validate(json.loads(text), PERSON)
    return True


def written(pair: Pair, way: SpeculationConfig, params: SamplingParams) -> RequestOutput:
    """The texts of one request."""
    (request,) = Asking(pair, way).requests(PROMPT, params)
    for _ in Batch(pair, [request]).steps():
        pass
    return request.whole()


def ids(output: RequestOutput) -> list[tuple[int, ...]]:
    """The tokens of each text."""
    return [made.token_ids for made in output.outputs]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_writes_the_valid_text_of_the_target_alone(
    embedded: Pair, name: str, temperature: float
) -> None:
    n = 1 if temperature == 0 else 2
    params = SamplingParams(
        structured_outputs=FORMS[name], temperature=temperature, seed=5, max_tokens=300, n=n
    )
    alone, accepted = written(embedded, PLAIN, params), 0
    for made in alone.outputs:
        assert made.finish_reason == "stop"
        assert is_valid(name, made.text), made.text
    for policy in ("auto", "tree", "sync"):
        output = written(embedded, SpeculationConfig(policy=policy), params)
        assert ids(output) == ids(alone), policy
        for made in output.outputs:
            assert made.metrics is not None
            assert made.metrics.speculative_decoding is not None
            accepted += made.metrics.speculative_decoding.num_accepted_draft_tokens
    assert accepted > 0


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_classical_rules_write_valid_texts(embedded: Pair, verify: str) -> None:
    way = SpeculationConfig(policy="pipelined", verify=verify)
    params = SamplingParams(
        structured_outputs=FORMS["json"], temperature=1.0, seed=6, max_tokens=300, n=2
    )
    for made in written(embedded, way, params).outputs:
        assert is_valid("json", made.text)


def test_behind_the_end_a_text_may_go_on_and_penalties_do_not_break_the_form(
    embedded: Pair,
) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(structured_outputs=form, ignore_eos=True, max_tokens=12)
    output = written(embedded, SpeculationConfig(), params)
    assert ids(output) == ids(written(embedded, PLAIN, params))
    assert re.match("yes|no", output.outputs[0].text)
    assert len(output.outputs[0].token_ids) == 12
    params = SamplingParams(
        structured_outputs=FORMS["json"], repetition_penalty=1.3, bad_words=["red"], max_tokens=300
    )
    output = written(embedded, SpeculationConfig(), params)
    assert ids(output) == ids(written(embedded, PLAIN, params))
    assert is_valid("json", output.outputs[0].text)


@pytest.mark.slow
def test_answers_to_a_hundred_drawn_forms_fit_and_are_those_of_the_target_alone(
    embedded: Pair,
) -> None:
    tally = answered(embedded, forms(100))
    assert tally.wrong == []
    assert tally.refused == []
    assert tally.num_whole > 0.9 * tally.num_answers
    assert tally.num_accepted > 0


# -- over HTTP -------------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}},
    },
]
ASKED: dict[str, Any] = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "Weather?"}],
    "max_tokens": 220,
    "seed": 1,
}


@pytest.fixture(scope="module")
def server(embedded: Pair) -> Iterator[Served]:
    """One for all tests."""
    with serving(embedded) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own."""
    with client_of(server) as made:
        yield made


def test_the_openai_client_gets_json_whole_and_streamed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    whole = client.chat.completions.create(**ASKED, response_format=form)
    content = whole.choices[0].message.content or ""
    assert is_valid("json", content)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ASKED, response_format=form, stream=True)
    )
    assert streamed == content
    by_vllm = client.chat.completions.create(
        **ASKED, extra_body={"structured_outputs": {"json": PERSON}}
    )
    assert by_vllm.choices[0].message.content == content
    by_pattern = client.completions.create(
        model="embedded", prompt=PROMPT, max_tokens=64, extra_body={"guided_regex": PATTERN}
    )
    assert is_valid("regex", by_pattern.choices[0].text)


def test_the_openai_client_gets_tool_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": choice}
        whole = client.chat.completions.create(**asked)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        calls: Any = message.tool_calls
        for call in calls:
            assert call.function.name in ("weather", "now")
            if call.function.name == "weather":
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        parts: list[Any] = []
        reasons = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            parts += chunk.choices[0].delta.tool_calls or []
            reasons.append(chunk.choices[0].finish_reason)
        assert reasons[-1] == "tool_calls"
        found = [part.function.name for part in parts if part.id]
        assert found == [call.function.name for call in calls]
        for index, call in enumerate(calls):
            text = "".join(part.function.arguments for part in parts if part.index == index)
            assert json.loads(text) == json.loads(call.function.arguments)
    said = [
        *ASKED["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
    ]
    after = client.chat.completions.create(
        **{**ASKED, "messages": said, "max_tokens": 8}, tools=TOOLS, tool_choice="auto"
    )
    assert after.choices[0].finish_reason == "length"
    assert after.choices[0].message.content


def test_what_cannot_be_followed_is_refused_at_once_while_another_text_goes_on(
    server: Served,
) -> None:
    endless = {**PERSON, "properties": {"name": {"$ref": "#"}}, "required": ["name"]}
    bad: list[dict[str, Any]] = [
        {"structured_outputs": {"json": endless}},
        {"structured_outputs": {"json": '{"a":' * 9000 + "1" + "}" * 9000}},
        {"structured_outputs": {"json": {"enum": ["x" * 1_000_000]}}},
        {"structured_outputs": {"regex": "((((a{50}){50}){50}){50}){50}"}},
        {"structured_outputs": {"jsn": "{}"}},
        {"structured_outputs": {"json": "{}", "regex": "a"}},
        {"guided_json": {"type": "wat"}},
        {"guided_grammar": "start: foo"},
        {"guided_choice": []},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
    ]
    counts = [0]

    def listen() -> None:
        asked = {"prompt": PROMPT, "max_tokens": 340, "ignore_eos": True}
        counts[0] = len(server.events("/v1/completions", **asked))

    other = threading.Thread(target=listen)
    other.start()
    with server.client() as client:
        for body in bad:
            response = client.post("/v1/completions", json={"prompt": "x", **body})
            assert response.status_code == 400, (body.keys(), response.text)
            message = response.json()["error"]["message"]
            assert "\n" not in message
            assert len(message) <= 160, message
    other.join(LIMIT_S)
    assert counts[0] > 20
