"""Thoughts of a target over HTTP: apart from the answer, which a grammar holds and they do not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from tests.process.served import AWAKE, Served, serving
from tests.tiny_models import make_model
from tests.tiny_tokenizer import sentencepiece_tokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.process

MARKS = ["[THINK]", "[/THINK]", "<|python_tag|>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}. {% endfor %}"
    "{% if begun %}[THINK]{% endif %}{# [/THINK] #}"
)
CHOICES = ["the cat", "a text"]
SCHEMA = {"type": "object", "properties": {"city": {"enum": CHOICES}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "the", "parameters": SCHEMA | {"additionalProperties": False}},
    }
]
# Draws are from the whole vocabulary, so that a mark comes after some tokens, or a call does.
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a cat"}],
    "temperature": 1,
    "seed": 1,
    "max_tokens": 400,
    "chat_template_kwargs": {"begun": True},
}


@pytest.fixture(scope="module")
def closing() -> int:
    """The token that ends thoughts."""
    return sentencepiece_tokenizer().get_vocab_size() + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model to whose tokenizer the marks are special tokens, which drafts for itself."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    target = make_model(
        "llama",
        tmp_path_factory.mktemp("models") / "target",
        vocab=tokenizer.get_vocab_size(),
        scale=0.5,
    )
    tokenizer.save(str(target / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(said))
    config = PairConfig(
        target=str(target), drafter=str(target), dtype="float32", simulate_target_ms=1.0
    )
    with Pair(config) as pair, serving(pair, speculation=AWAKE) as served:
        yield served


def message(server: Served, **body: Any) -> dict[str, Any]:
    """The message of an answer; it is the same whole, as a stream, and by plain decoding."""
    path, body = "/v1/chat/completions", ASKED | body
    answer = server.post(path, **body).json()
    (choice,) = answer["choices"]
    alone = server.post(path, **body, speculative={"enabled": False}).json()
    assert _but_for_ids(alone["choices"][0]["message"]) == _but_for_ids(choice["message"])
    made: dict[str, Any] = {"content": ""}
    for chunk in server.events(path, **body):
        delta = chunk["choices"][0]["delta"]
        for name in {"content", "reasoning", "reasoning_content"} & delta.keys():
            made[name] = made.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            made.setdefault("tool_calls", []).append(part["function"].get("arguments", ""))
    assert made["content"] == (choice["message"]["content"] or "")
    assert made.get("reasoning") == choice["message"].get("reasoning")
    assert made.get("reasoning") == made.get("reasoning_content")
    calls = choice["message"].get("tool_calls", [])
    assert "".join(made.get("tool_calls", [])) == "".join(
        call["function"]["arguments"] for call in calls
    )
    counts = answer["metrics"]["speculative_decoding"]
    assert counts["mean_acceptance_length"] > 1, "speculation is dead"
    found: dict[str, Any] = choice["message"]
    return found


def _but_for_ids(said: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in said.get("tool_calls", ())]
    return said | {"tool_calls": calls}


def test_thoughts_of_any_form_come_before_an_answer_that_a_grammar_holds(
    server: Served, closing: int
) -> None:
    bias = {str(closing): 2.0}
    for seed in range(2):
        form = {"choice": CHOICES}
        said = message(server, seed=seed, structured_outputs=form, logit_bias=bias)
        assert len(said["reasoning"]) > 1
        assert not any(mark in said["reasoning"] for mark in MARKS)
        assert said["content"] in CHOICES
        said = message(server, seed=seed, tools=TOOLS, tool_choice="required", logit_bias=bias)
        (call, *_) = said["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in CHOICES
        assert said["reasoning"]
        assert said["content"] is None


def test_a_free_answer_is_divided_at_the_mark_although_it_is_a_special_token(
    server: Served, closing: int
) -> None:
    said = message(server, logit_bias={str(closing): 2.0}, ignore_eos=True)
    assert said["reasoning"]
    assert said["content"]
    assert not any(mark in said["content"] for mark in MARKS)
    cut = message(server, logit_bias={str(closing): -100.0}, ignore_eos=True)
    assert cut["content"] is None
    assert len(cut["reasoning"]) > len(said["reasoning"])


def test_thoughts_stay_in_the_text_where_the_server_is_told_so(server: Served) -> None:
    with serving(server.llm.pair, reasoning_parser="none") as other:
        answer = other.post("/v1/chat/completions", **ASKED).json()
    said = answer["choices"][0]["message"]
    assert "reasoning" not in said
    assert said["content"]


def test_a_mark_of_calls_is_read_although_it_is_a_special_token(
    server: Served, closing: int
) -> None:
    # The grammar stands for a model that was trained to write calls so.
    form = {"grammar": """start: <|python_tag|> "the.call(city='a text')" """}
    no_thoughts = {"logit_bias": {str(closing - 1): -100}, "chat_template_kwargs": {"begun": False}}
    said = message(server, tools=TOOLS, structured_outputs=form, **no_thoughts)
    assert said["tool_calls"][0]["function"] == {"name": "the", "arguments": '{"city": "a text"}'}
    assert said["content"] is None
