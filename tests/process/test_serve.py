"""The HTTP server on real nodes: what it writes, whom it refuses, and what it leaves behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coordinator.api.asking import Asking
from coordinator.api.config import SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch
from tests.forking.server import command_of, is_server
from tests.process.behaviours import MAX_MODEL_LEN
from tests.process.patience import wait_for
from tests.process.served import LIMIT_S, Served, serving
from tests.programs import ROOT

pytestmark = pytest.mark.process

PROMPT = "def main(argv):\n    "
END = "<|endoftext|>"
CHAT = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def server(embedded: Pair) -> Iterator[Served]:
    """One for all tests that leave it as it was."""
    with serving(embedded) as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Served) -> Iterator[None]:
    yield
    server.wait_until_idle()


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text of a stream, of either kind."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in choices)


def expected(pair: Pair, prompt: Any, params: SamplingParams) -> list[str]:
    """The same texts by the Python API."""
    (request,) = Asking(pair, SpeculationConfig()).requests(prompt, params)
    for _ in Batch(pair, [request]).steps():
        pass
    return [made.text for made in request.whole().outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_the_python_api_and_drafts_are_accepted(
    embedded: Pair, server: Served, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=48)
    how = {"policy": "sync"}  # it waits for drafts, however busy the machine is
    answer = server.complete(
        PROMPT, temperature=temperature, seed=7, max_tokens=48, speculative=how
    )
    assert [one["text"] for one in answer["choices"]] == expected(embedded, PROMPT, params)
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_a_stream_is_the_same_text_in_parts(server: Served) -> None:
    asked = {"prompt": PROMPT, "seed": 3, "max_tokens": 40, "n": 2}
    whole = server.complete(**asked)
    chunks = server.events("/v1/completions", stream_options={"include_usage": True}, **asked)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one["text"] for one in whole["choices"]]
    assert len(chunks) > 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_openai_client_completes_chats_and_streams(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
        (model,) = client.models.list().data
        asked: dict[str, Any] = {"model": model.id, "messages": CHAT, "max_tokens": 12, "seed": 5}
        whole = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert whole.choices[0].logprobs is not None
        rows = whole.choices[0].logprobs.content or []
        assert len(rows) == 12
        assert all(len(row.top_logprobs) == 2 for row in rows)
        streamed = ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == whole.choices[0].message.content
        legacy = client.completions.create(model=model.id, prompt="a = [", stop="]", temperature=0)
        assert "]" not in legacy.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=model.id, prompt="x", temperature=-1)


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask_for_it(server: Served) -> None:
    ids = server.post("/tokenize", prompt=PROMPT).json()["tokens"]
    for max_tokens in (0, 1):
        (choice,) = server.complete(
            ids, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1
        )["choices"]
        scored = choice["logprobs"]
        assert len(scored["tokens"]) == len(ids) + max_tokens
        assert scored["token_logprobs"][0] is None
        assert all(value <= 0 for value in scored["token_logprobs"][1:])
        assert "".join(scored["tokens"]) == choice["text"]
        starts = [
            choice["text"].find(token, at)
            for token, at in zip(scored["tokens"], scored["text_offset"], strict=True)
        ]
        assert starts == scored["text_offset"]


@pytest.mark.parametrize("as_ids", [True, False])
def test_offsets_cut_the_text_into_its_tokens_whole_and_as_a_stream(
    server: Served, *, as_ids: bool
) -> None:
    text = "# é🙂=1\n# 日本語\n"
    ids = server.post("/tokenize", prompt=text).json()["tokens"]
    asked = {"echo": True, "logprobs": 3, "max_tokens": 8, "seed": 2, "prompt": ids}
    asked |= {"structured_outputs": {"choice": ["🙂é"]}} | ({} if as_ids else {"prompt": text})
    (whole,) = server.complete(**asked)["choices"]
    scored, offsets = whole["logprobs"], whole["logprobs"]["text_offset"]
    assert whole["text"] == text + "🙂é"
    parts = [whole["text"][begin:end] for begin, end in pairwise([*offsets, len(whole["text"])])]
    assert "".join(parts) == whole["text"]
    for token, part in zip(scored["tokens"], parts, strict=True):
        assert part == token or token.startswith("bytes:") or (token, part) == (END, "")
    assert scored["tokens"][-1] == END
    rows = zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True)
    assert all(top is None or top[token] == value for token, value, top in rows)
    streamed: dict[str, list[Any]] = {name: [] for name in scored}
    shown = ""
    for chunk in server.events("/v1/completions", **asked):
        (choice,) = chunk["choices"]
        shown += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            streamed[name] += values
    assert shown == whole["text"]
    assert streamed["tokens"] == scored["tokens"]
    assert streamed["text_offset"] == offsets


def test_a_conversation_has_as_many_tokens_as_the_chat_route_counts(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for body in (
        {"messages": CHAT},
        {"messages": [{"role": "user", "content": parts}], "tools": tools},
        {"messages": CHAT, "tools": tools, "tool_choice": "none"},
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": parts},
            ]
        },
    ):
        answer = server.post("/v1/chat/completions", max_tokens=1, **body)
        assert answer.status_code == 200, answer.text
        tokens = server.post("/tokenize", max_tokens=1, **body).json()
        assert tokens["count"] == answer.json()["usage"]["prompt_tokens"]


def test_an_id_is_taken_only_while_a_request_of_that_very_id_runs(server: Served) -> None:
    long = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        server.client() as client,
        client.stream(
            "POST", "/v1/completions", json=long, headers={"X-Request-ID": "job-7"}
        ) as running,
    ):
        assert running.headers["X-Request-ID"] == "job-7"
        short = {"prompt": ["a", "b"], "max_tokens": 1}
        for name, status in (("job", 200), ("job-7-0", 200), ("job-7", 400)):
            answer = client.post("/v1/completions", json=short, headers={"X-Request-ID": name})
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_tells_of_its_speculation_if_it_is_asked_to(server: Served, path: str) -> None:
    what = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    # Under sync drafts are waited for, also on a busy machine.
    how = {"policy": "sync"}
    asked = {**what, "temperature": 0, "max_tokens": 48}
    usual = server.events(path, **asked)
    assert not any("speculation" in chunk for chunk in usual)
    chunks = server.events(path, **asked, speculative={**how, "events": True})
    told = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    tokens = [token for part in told for token in part["tokens"]]
    spans = [span for part in told for span in part["spans"]]
    text = "".join(token["text"] for token in tokens)
    assert text == text_of(usual) == text_of(chunks)
    assert sum(token["id"] is not None for token in tokens) == 48
    assert {span["device"] for span in spans} == {"drafter", "target"}
    passes = [span for span in spans if span["device"] == "target"]
    drafted = sum(token["origin"] == "draft:model" for token in tokens)
    assert sum(span["accepted"] for span in passes) == drafted > 0
    assert all(one["end_ms"] <= two["begin_ms"] for one, two in pairwise(passes))


def test_speculation_is_switched_off_and_set_for_a_request_alone(server: Served) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 32}
    usual = server.complete(**asked)
    plain = server.complete(**asked, speculative={"enabled": False})
    sync = server.complete(**asked, speculative={"policy": "sync", "num_speculative_tokens": 2})
    assert plain["choices"][0]["text"] == usual["choices"][0]["text"]
    assert sync["choices"][0]["text"] == usual["choices"][0]["text"]
    assert plain["metrics"] is None
    assert sync["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2


def test_more_tokens_than_there_is_room_for_are_refused_and_not_cut(server: Served) -> None:
    with server.client() as client:
        for path, name, given in (
            ("/v1/completions", "max_tokens", {"prompt": PROMPT}),
            ("/v1/chat/completions", "max_completion_tokens", {"messages": CHAT}),
        ):
            body = {**given, name: MAX_MODEL_LEN}
            refused = client.post(path, json=body)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert re.fullmatch(
                rf"{name} is {MAX_MODEL_LEN}, but behind (\d+) tokens of prompt there is room for "
                r"(\d+); ask for fewer",
                message,
            )
            room = int(message.split("room for ")[1].split(";")[0])
            answer = client.post(path, json={**body, name: room, "temperature": 0})
            assert answer.status_code == 200


def test_a_client_that_goes_ends_its_text(server: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": MAX_MODEL_LEN - 64, "ignore_eos": True}
    with server.client() as client:
        with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
            lines = response.iter_lines()  # without it the connection would be closed
            next(lines)
            assert 0 < server.llm.kv_cache_usage < 1
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/completions", json=asked, timeout=0.3)
    server.wait_until_idle()
    assert server.llm.kv_cache_usage == 0


def test_more_texts_than_lanes_wait_and_all_are_right(embedded: Pair, server: Served) -> None:
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20) for seed in range(24)]
    wanted = [expected(embedded, PROMPT, one)[0] for one in params]

    def ask(seed: int) -> str:
        answer = server.complete(PROMPT, temperature=0.9, seed=seed, max_tokens=20)
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(24) as clients:
        assert list(clients.map(ask, range(24))) == wanted


def test_a_full_queue_refuses_and_says_when_to_try_again(embedded: Pair) -> None:
    with serving(embedded, max_queue=0) as served:
        lanes = served.llm.admission.num_lanes
        response = served.post("/v1/completions", prompt="x", n=lanes + 1)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        served.complete("x", max_tokens=2)
        served.wait_until_idle()


def test_with_a_key_nobody_else_gets_in(embedded: Pair) -> None:
    with serving(embedded, keys=["a-key-of-enough-letters"]) as served:
        served.complete("x", max_tokens=2)
        with httpx.Client(base_url=served.url) as stranger:
            assert stranger.get("/health").status_code == 200
            for path in ("/v1/models", "/metrics", "/version"):
                assert stranger.get(path).status_code == 401


def test_figures_count_what_was_accepted_under_vllms_names(server: Served) -> None:
    def figure(name: str) -> float:
        with server.client() as client:
            text = client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)

    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:generation_tokens_total")
    before = [figure(name) for name in names]
    how = {"policy": "sync"}  # it waits for drafts, however busy the machine is
    answer = server.complete(PROMPT, max_tokens=40, temperature=0, speculative=how)
    accepted, written = (figure(name) - old for name, old in zip(names, before, strict=True))
    spec = answer["metrics"]["speculative_decoding"]
    assert accepted == spec["num_accepted_draft_tokens"] > 0
    assert written == 40


BAD: list[dict[str, Any]] = [
    {},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [["a"]]},
    {"prompt": [["1"]]},
    {"prompt": "x", "stop_token_ids": ["1"]},
    {"prompt": {}},
    {"prompt": None},
    {"prompt": 3},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [10**30]},
    {"prompt": ["a"] * 65},
    {"prompt": "x " * 3000},
    {"prompt": "\ud800"},
    *({"prompt": "x", "temperature": bad} for bad in (-1, 101, "hot", [], {})),
    *({"prompt": "x", "top_p": bad} for bad in (0, 1.5, -1, "a")),
    *({"prompt": "x", "top_k": bad} for bad in (-2, 0.5, 10**12)),
    *({"prompt": "x", "min_p": bad} for bad in (-1, 2)),
    *({"prompt": "x", "max_tokens": bad} for bad in (-1, 0, 10**9, "many", 1.5)),
    *({"prompt": "x", "n": bad} for bad in (0, -1, 65, 1.5, "a")),
    {"prompt": "x", "n": 2, "temperature": 0},
    *({"prompt": "x", "seed": bad} for bad in (-2, 2**63, "a", 0.5)),
    *({"prompt": "x", "stop": bad} for bad in ("", [""], [1], {}, ["a"] * 65)),
    *({"prompt": "x", "logprobs": bad} for bad in (-1, 21, "a")),
    *({"prompt": "x", "logit_bias": bad} for bad in ({"a": 1}, {"1": 101}, {"-1": 1}, [])),
    {"prompt": "x", "best_of": 3},
    {"prompt": "x", "suffix": "y"},
    {"prompt": "x", "prompt_logprobs": 1},
    {"prompt": "x", "truncate_prompt_tokens": 3},
    {"prompt": "x", "stop_token_ids": [10**9]},
    {"prompt": "x", "repetition_penalty": 0},
    {"prompt": "x", "presence_penalty": 3},
    {"prompt": "x", "min_tokens": 20, "max_tokens": 10},
    {"prompt": "x", "speculative": {"policy": "none"}},
    {"prompt": "x", "speculative": {"num_speculative_tokens": 0}},
    {"prompt": "x", "speculative": {"unknown": 1}},
    {"prompt": "x", "stream": "maybe"},
    {"prompt": "x", "stream_options": 1},
]


def test_a_bad_request_gets_one_line_and_the_next_one_is_answered(server: Served) -> None:
    assert len(BAD) >= 60
    with server.client() as client:
        for body in BAD:
            headers = {"Content-Type": "application/json"}
            response = client.post("/v1/completions", content=json.dumps(body), headers=headers)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["message"], body
            assert "\n" not in error["message"], body
        for raw in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000):
            headers = {"Content-Type": "application/json"}
            response = client.post("/v1/completions", content=raw, headers=headers)
            assert response.status_code == 400, raw[:20]
        assert client.get("/nothing").status_code == 404
        assert client.get("/v1/completions").status_code == 405
    assert server.complete("x", max_tokens=2, temperature=0)["usage"]["completion_tokens"] == 2


def test_a_slow_reader_slows_nobody_and_its_text_still_ends(server: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        server.client() as slow,
        slow.stream("POST", "/v1/completions", json=asked) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        other = server.complete(PROMPT, max_tokens=20, ignore_eos=True)
        assert other["usage"]["completion_tokens"] == 20
        assert sum(line.startswith("data: {") for line in lines) > 1


def test_echo_with_several_texts_streams(server: Served) -> None:
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 6, "seed": 4}
    whole = server.complete(**asked)
    texts = ["", ""]
    for chunk in server.events("/v1/completions", **asked):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert all(text.startswith(PROMPT) for text in texts)


def test_a_header_that_does_not_come_closes_the_connection(embedded: Pair) -> None:
    with serving(embedded, io_timeout_s=0.5) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for words in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
                connection.sendall(words)
                assert connection.recv(1 << 16) == b""
        served.complete("x", max_tokens=2)


def started(*options: str) -> "subprocess.Popen[str]":
    """The command, with the embedded pair."""
    command = [sys.executable, "-m", "coordinator", "serve", "--port", "0", *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def url_of(process: "subprocess.Popen[str]") -> str:
    """Where it listens, once it says so."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+(?=/v1:)", line):
            return found[0]
    raise AssertionError("it never was ready")


def ends(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Status and last line; within ten seconds."""
    _, said = process.communicate(timeout=10)
    return process.returncode, said.strip().splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [0, 3, 15])
def test_sigterm_ends_the_server_and_its_nodes_while_a_text_runs_also_after_a_stop(
    stopped_s: int,
) -> None:
    process = started()
    url = url_of(process)
    nodes = descendants(process.pid)
    assert len(nodes) >= 2
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
        if stopped_s:
            process.send_signal(signal.SIGSTOP)
            time.sleep(stopped_s)
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert ends(process) == (128 + signal.SIGTERM, "ended by SIGTERM")
    assert wait_for(lambda: not any(Path(f"/proc/{node}").exists() for node in nodes), 5)


@pytest.mark.long
def test_a_target_that_dies_without_restarts_ends_the_server_with_its_line() -> None:
    process = started("--target-restarts", "0")
    url = url_of(process)
    target = next(node for node in descendants(process.pid) if "target_node" in command_of(node))
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = (one for one in response.iter_lines() if one)
        next(lines)
        os.kill(target, signal.SIGKILL)
        error = json.loads(list(lines)[-1].removeprefix("data: "))["error"]
        assert (error["status"], error["retry_after"]) == (503, 1)
        assert error["message"].startswith("the target")
    status, line = ends(process)
    assert status == 1
    assert line.startswith("error: the target")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def descendants(parent: int) -> list[int]:
    """Process ids of all descendants, but for the one from which nodes are forked."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            if not is_server(child):
                found += [child, *descendants(child)]
    return found


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key"),
        (["--api-key-file", os.devnull], "at least 16"),
        (["--insecure", "--host", "no.such.host.invalid"], "cannot listen"),
        (["--allow-origin", "*"], "--allow-origin"),
        (["--max-queue", "-1"], "--max-queue"),
    ],
)
def test_a_server_that_cannot_be_started_says_why_in_a_line(options: list[str], line: str) -> None:
    status, said = ends(started(*options))
    assert status == 2
    assert said.startswith("error: ")
    assert line in said


def test_an_occupied_port_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, said = ends(started("--port", port))
    assert status == 2
    assert f"cannot listen at 127.0.0.1:{port}" in said
