"""OpenAI's own client, with a byte-level tokenizer and with one of the sentencepiece kind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.completion_choice import CompletionChoice
from pydantic import BaseModel

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from tests.process.served import AWAKE, client_of, serving
from tests.tiny_models import make_model
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer, sentencepiece_tokenizer

pytestmark = pytest.mark.process
pytest.importorskip("llguidance")

MODEL = "embedded"  # its name here
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["é🙂", "the cat"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the cat é🙂"}],
    "max_tokens": 80,
    "seed": 3,
    "temperature": 1.0,
}
PROMPT = "the cat é🙂 is"


class Place(BaseModel):
    """What an answer is to be."""

    city: Literal["é🙂", "the cat"]
    days: Literal[1, 2]


def tokenizer_of(kind: str, folder: Path) -> int:
    """Save a tokenizer in a folder that is there; return the number of its tokens."""
    if kind == "byte-level":
        save_bytewise_tokenizer(folder)
        return VOCAB_SIZE
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of a random model that drafts for itself, of a target that waits for it."""
    words = tmp_path_factory.mktemp("words")
    size = tokenizer_of(request.param, words)
    folder = make_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab=size)
    (words / "tokenizer.json").rename(folder / "tokenizer.json")
    config = PairConfig(
        target=str(folder), drafter=str(folder), dtype="float32", simulate_target_ms=3.0
    )
    with (
        Pair(config) as pair,
        serving(pair, speculation=AWAKE) as served,
        client_of(served) as made,
    ):
        yield made


def assert_accepted(answer: Any) -> None:
    """Some drafts of an answer were accepted."""
    found = answer.model_extra["metrics"]["speculative_decoding"]
    assert found["mean_acceptance_length"] > 1, "speculation is dead"


def test_a_chat_is_the_same_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    content = answer.choices[0].message.content
    assert content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 80
    assert_accepted(answer)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**ASKED, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert last.usage == answer.usage
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_completion_and_its_echo_are_the_same_whole_and_as_a_stream(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "seed": 5, "logprobs": 2}
    for echo in (False, True):
        answer = client.completions.create(**asked, echo=echo)
        (whole,) = answer.choices
        assert whole.text.startswith(PROMPT) == echo
        assert_accepted(answer)
        check_places(whole)
        parts = [
            chunk.choices[0] for chunk in client.completions.create(**asked, echo=echo, stream=True)
        ]
        assert "".join(part.text for part in parts) == whole.text
        assert whole.logprobs is not None
        for name, values in whole.logprobs.model_dump().items():
            told = [one for part in parts if part.logprobs for one in getattr(part.logprobs, name)]
            if name == "top_logprobs":
                assert [row and {*row} for row in told] == [row and {*row} for row in values]
            else:
                close = pytest.approx(values, abs=1e-4) if name == "token_logprobs" else values
                assert told == close, name


def check_places(choice: CompletionChoice) -> None:
    """The names, numbers and places of the tokens of a completion fit its text."""
    found = choice.logprobs
    assert found is not None
    assert found.tokens
    assert found.text_offset
    assert found.token_logprobs
    assert found.top_logprobs
    ends = [*found.text_offset[1:], len(choice.text)]
    texts = [choice.text[a:b] for a, b in zip(found.text_offset, ends, strict=True)]
    assert "".join(texts) == choice.text
    for name, number, likely in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        if likely is not None:
            assert likely[name] == number


def test_logprobs_of_a_chat_hold_the_bytes_of_the_answer(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        **ASKED, logprobs=True, top_logprobs=2, response_format=form
    )
    (choice,) = answer.choices
    assert choice.message.content is not None
    assert json.loads(choice.message.content)["city"] in ("é🙂", "the cat")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    said = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert said.lstrip().startswith(choice.message.content.encode().lstrip())
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_tool_is_called_and_its_answer_sent_back(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    asked["parallel_tool_calls"] = False
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageToolCall)
    assert json.loads(call.function.arguments)["city"] in ("é🙂", "the cat")
    arguments = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += (part.function and part.function.arguments) or ""
    assert arguments == call.function.arguments
    said = [
        *ASKED["messages"],
        choice.message,  # as the client has it
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(**{**ASKED, "messages": said}, tools=TOOLS)
    assert after.choices[0].message.content


def test_a_parsed_answer_is_an_object_of_its_class(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**ASKED, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
