"""Routes that need no node: models, ids of requests, tokens, and what is wrong with a body."""

from types import SimpleNamespace
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from starlette.testclient import TestClient

from coordinator.api.chat import ChatTemplate
from coordinator.api.models.tokenizers import OUR_TARGET
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import Tokenization
from coordinator.http.errors import refusal_of
from coordinator.http.figures import Figures
from coordinator.http.jobs import Job
from coordinator.http.routes import make_app
from proto.errors import (
    AwayError,
    ClosedError,
    ConfigurationError,
    IncompatibleError,
    NodeError,
    SlipstreamError,
    TextError,
    TransportError,
)

NAME = "maker/target"
SPECULATION = SimpleNamespace(speculation=None, requests=None)  # nothing comes so far


class Reading:
    """A pair that only reads prompts; of a conversation it makes a plain transcript."""

    encode, encode_chat = Pair.encode, Pair.encode_chat
    _refusing_long = Pair._refusing_long

    def __init__(self) -> None:
        self.config = SimpleNamespace(target=str(OUR_TARGET))
        self.tokenization = Tokenization.of_model(str(OUR_TARGET), None)
        self.chat_template = ChatTemplate(None, {}, "x")
        self.max_len = 2048

    def _tokenizer(self) -> Tokenization | None:
        return self.tokenization


@pytest.fixture(scope="module")
def client() -> TestClient:
    llm: Any = SimpleNamespace(
        pair=Reading(), check_ready=lambda: None, check_takes=lambda: None, asking=SPECULATION
    )
    return TestClient(make_app(llm, NAME, Figures(NAME)), base_url="http://localhost")


def test_a_model_is_found_by_its_name_with_slashes_or_not_at_all(client: TestClient) -> None:
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["has_chat_template"] is False
    for path in (NAME, NAME.replace("/", "%2F"), str(OUR_TARGET)):
        found = client.get(f"/v1/models/{path}")
        assert (found.status_code, found.json()) == (200, listed)
    for path in ("", "another", "maker", f"{NAME}/x"):
        missing = client.get(f"/v1/models/{path}")
        assert missing.status_code == 404
        error = missing.json()["error"]
        assert error["code"] == "model_not_found"
        assert "\n" not in error["message"]


def test_the_openai_client_finds_the_model(client: TestClient) -> None:
    openai = OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
    assert openai.models.retrieve(NAME).id == NAME
    with pytest.raises(NotFoundError):
        openai.models.retrieve("another")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_has_no_tokens_here(client: TestClient, path: str) -> None:
    for name, status in ((NAME, 200), (None, 200), ("", 200), ("another", 404)):
        body = {"model": name, "prompt": "x", "tokens": [5]}
        assert client.post(path, json=body).status_code == status


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "1"},
    ],
)
def test_every_message_of_a_chat_has_tokens(client: TestClient, message: dict[str, Any]) -> None:
    answer = client.post("/tokenize", json={"messages": [message], "return_token_strs": True})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) > 3


def test_tokens_are_refused_where_the_chat_route_refuses(client: TestClient) -> None:
    messages = [{"role": "user", "content": "x"}]
    for body, word in (
        ({"messages": []}, "empty"),
        ({"messages": messages, "tool_choice": "required"}, "tools"),
        ({"messages": messages, "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": messages, "prompt": "x"}, "either"),
        ({"prompt": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ):
        answer = client.post("/tokenize", json=body)
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"prompt": [-1]}, "prompt: a token id is a whole number from 0 on, not -1"),
        ({"prompt": [[5], [-1]]}, "prompt: a token id is a whole number from 0 on, not -1"),
        ({"prompt": [5, "a"]}, "prompt: a token id is a whole number from 0 on, not 'a'"),
        ({"prompt": [True]}, "prompt: a token id is a whole number from 0 on, not True"),
        ({"prompt": ["a", 5]}, "prompt: expected a text, token ids or a list of either, got 5"),
        ({"prompt": {}}, "prompt: expected a text, token ids or a list of either, got {}"),
        ({"prompt": []}, "prompt: the list is empty; give at least one prompt"),
        ({"prompt": [[]]}, "prompt: a list of token ids is empty; give at least one token"),
        ({}, "prompt: Field required"),
        ({"prompt": None}, "prompt: Field required"),
        (
            {"prompt": "x", "stop": 5},
            "stop: Input should be a valid string or Input should be a valid list",
        ),
        ({"prompt": "x", "stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        (
            {"prompt": "x", "stop_token_ids": [5, -1]},
            "stop_token_ids.1: Input should be greater than or equal to 0",
        ),
        ({"prompt": "x", "suffix": "y"}, "suffix: 'y' is not supported on /v1/completions; leave"),
        ({"prompt": "x", "best_of": 2}, "best_of is not supported; leave it out, or make it equal"),
        (
            {"prompt": "x", "response_format": {"type": "xml"}},
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema'",
        ),
    ],
)
def test_what_is_wrong_with_a_body_is_one_line_that_names_it(
    client: TestClient, body: dict[str, Any], line: str
) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(line)


def test_a_message_of_another_kind_is_named_without_the_forms_that_were_tried(
    client: TestClient,
) -> None:
    for message, place in (
        ({"role": "user", "content": 5}, "messages.0.content: "),
        ({"role": "user", "content": ["x"]}, "messages.0.content.0: "),
        ({"content": "x"}, "messages.0.role: "),
    ):
        answer = client.post("/v1/chat/completions", json={"messages": [message]})
        assert answer.json()["error"]["message"].startswith(place)


def test_jobs_have_the_same_id_only_if_they_have_the_same_name() -> None:
    def ids(name: str, num_prompts: int) -> set[str]:
        anything: Any = None
        return Job(anything, anything, name, [anything] * num_prompts, "", anything).ids

    assert ids("job", 1).isdisjoint(ids("job-7", 3))
    assert ids("job", 9).isdisjoint(ids("job-7", 3))
    assert not ids("job", 1).isdisjoint(ids("job", 3))


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    for seed in (-2, -1.0, 1 << 63):
        with pytest.raises(ConfigurationError, match="seed"):
            SamplingParams(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        NodeError("the target process was ended by signal 9 (SIGKILL)"),
        TransportError("the socket is gone"),
        IncompatibleError("the target has another release"),
        ClosedError("the coordinator was closed"),
        AwayError("the target is away; try again later"),
    ],
)
def test_a_pair_that_has_ended_or_is_away_is_status_503_with_a_time_to_ask_again(
    error: SlipstreamError,
) -> None:
    def check_ready() -> None:
        raise error

    llm: Any = SimpleNamespace(
        pair=Reading(), check_ready=check_ready, check_takes=check_ready, asking=SPECULATION
    )
    client = TestClient(make_app(llm, NAME, Figures(NAME)), base_url="http://localhost")
    messages = [{"role": "user", "content": "x"}]
    for answer in (
        client.get("/health"),
        client.post("/v1/completions", json={"prompt": "x"}),
        client.post("/v1/chat/completions", json={"messages": messages, "stream": True}),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == str(error)


def test_a_text_that_cannot_be_completed_is_a_fault_of_the_server() -> None:
    assert refusal_of(TextError("the target sent no logits")).status == 500


def test_a_mistake_of_the_server_is_told_to_the_client_and_its_place_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "a text that nobody may read"

    def mistake() -> None:
        raise KeyError(secret)

    llm: Any = SimpleNamespace(
        pair=Reading(), check_ready=mistake, check_takes=mistake, asking=SPECULATION
    )
    app = make_app(llm, NAME, Figures(NAME))
    answer = TestClient(app, "http://localhost", raise_server_exceptions=False).post(
        "/v1/completions", json={"prompt": "x"}
    )
    assert answer.status_code == 500
    assert "a mistake of the server (KeyError)" in answer.json()["error"]["message"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "KeyError at " in line
    assert "test_routes.py:" in line
    assert secret not in line + answer.text
