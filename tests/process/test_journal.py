"""Answers that are kept: they outlive connections and coordinators, and are written once."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.pair import Pair
from coordinator.http import keeping
from coordinator.journal.records import Came, read
from coordinator.journal.writing import JOURNAL
from tests.process.patience import wait_for
from tests.process.served import LIMIT_S, Served, serving
from tests.process.test_resume import Read

pytestmark = pytest.mark.process

PROMPT = "def read_lines(path):\n    "
CHAT = [{"role": "user", "content": "Write a loop."}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 40, "ignore_eos": True}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": PROMPT, **SAMPLED, "temperature": 0.0}),
    "penalties": (
        COMPLETIONS,
        {"prompt": PROMPT, **SAMPLED, "presence_penalty": 0.9, "frequency_penalty": 0.7},
    ),
    "two": (COMPLETIONS, {"prompt": PROMPT, **SAMPLED, "n": 2}),
    "logprobs": (COMPLETIONS, {"prompt": PROMPT, **SAMPLED, "logprobs": 2, "echo": True}),
    "prompts": (COMPLETIONS, {"prompt": [PROMPT, "import "], **SAMPLED}),
    "stop": (COMPLETIONS, {"prompt": PROMPT, **SAMPLED, "max_tokens": 90, "stop": ["\n"]}),
    "chat": (CHATS, {"messages": CHAT, **SAMPLED, "n": 2}),
    "schema": (CHATS, {"messages": CHAT, **SAMPLED, "ignore_eos": False, "response_format": FORM}),
    "tools": (
        CHATS,
        {"messages": CHAT, **SAMPLED, "tools": [TOOL], "tool_choice": "required"},
    ),
}


class Stream:
    """The events of a stream, with their ids."""

    def __init__(self, served: Served, path: str, body: dict[str, Any], **headers: str) -> None:
        self.ids: list[str] = []
        self.chunks: list[dict[str, Any]] = []
        self._served, self._path, self._headers = served, path, headers
        self._body = {**body, "stream": True, "return_token_ids": True}

    def read(self, most: int = 1 << 20, method: str = "POST") -> "Stream":
        """Read so many events, or to the end; then close the connection."""
        how: dict[str, Any] = {"json": self._body} if method == "POST" else {}
        headers = {name.replace("_", "-"): one for name, one in self._headers.items()}
        with (
            self._served.client() as client,
            client.stream(method, self._path, headers=headers, **how) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("id: "):
                    self.ids.append(line.removeprefix("id: "))
                elif line.startswith("data: {"):
                    self.chunks.append(json.loads(line.removeprefix("data: ")))
                    assert "choices" in self.chunks[-1], self.chunks[-1]
                    assert "error" not in self.chunks[-1], self.chunks[-1]
                if len(self.chunks) >= most:
                    break
        return self


def said(*streams: Stream) -> tuple[dict[int, Any], list[float]]:
    """What these streams have said together, by choice, and log-probabilities."""
    found = Read()
    calls: dict[int, str] = {}
    for stream in streams:
        for chunk in stream.chunks:
            found.add(chunk)
            for choice in chunk["choices"]:
                for call in choice.get("delta", {}).get("tool_calls", ()):
                    told = call["function"].get("arguments") or ""
                    calls[choice["index"]] = calls.get(choice["index"], "") + told
    told = {
        index: (found.ids[index], found.text[index], found.reason.get(index), calls.get(index))
        for index in found.ids
    }
    return told, [one or 0.0 for index in sorted(found.ids) for one in found.logprobs[index]]


def assert_same(found: Any, expected: Any, where: object = "") -> None:
    """Both have said the same."""
    assert found[0] == expected[0], where
    assert found[1] == pytest.approx(expected[1], abs=1e-4), where


@pytest.fixture
def server(embedded: Pair, tmp_path: Path) -> Iterator[Served]:
    with serving(embedded, journal=tmp_path / "journal") as served:
        yield served


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_resumes_behind_any_event_and_gets_each_token_once(
    server: Served, kind: str
) -> None:
    path, body = KINDS[kind]
    whole = Stream(server, path, body, X_Request_ID=kind).read()
    assert len(whole.ids) == len(whole.chunks)
    num_texts = server.llm.pair.service.num_texts
    for cut in {0, 1, len(whole.ids) // 3, len(whole.ids) // 2, len(whole.ids) - 1}:
        before = Stream(server, path, body)
        before.chunks = whole.chunks[: cut + 1]
        rest = Stream(server, f"{path}/{kind}", body, Last_Event_ID=whole.ids[cut]).read(
            method="GET"
        )
        assert_same(said(before, rest), said(whole), cut)
    again = Stream(server, path, body, X_Request_ID=kind).read()
    assert_same(said(again), said(whole))
    assert server.llm.pair.service.num_texts == num_texts == 0, "a complete text is written again"


def test_the_same_request_at_once_is_written_once(server: Served) -> None:
    path, body = KINDS["two"]
    body = {**body, "max_tokens": 120}
    with ThreadPoolExecutor(3) as clients:
        asked = [
            clients.submit(Stream(server, path, body, X_Request_ID="one").read) for _ in range(3)
        ]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, len(server.llm.request_ids))
            time.sleep(0.005)
        answers = [said(one.result()) for one in asked]
    assert answers[0] == answers[1] == answers[2]
    assert most == 1


def test_what_nobody_reads_is_written_no_longer_and_goes_on_for_who_comes_back(
    server: Served,
) -> None:
    path, body = KINDS["penalties"]
    body = {**body, "max_tokens": 150}
    whole = Stream(server, path, body, X_Request_ID="whole").read()
    begun = Stream(server, path, body, X_Request_ID="left").read(20)
    server.wait_until_idle()
    rest = Stream(server, f"{path}/left", body, Last_Event_ID=begun.ids[-1]).read(method="GET")
    assert_same(said(begun, rest), said(whole))
    with server.client() as client:
        answer = client.get(f"{path}/left").json()
    assert answer["choices"][0]["text"] == said(whole)[0][0][1]
    assert answer["usage"]["completion_tokens"] == 150


def test_who_may_ask_for_what_is_kept(embedded: Pair, tmp_path: Path) -> None:
    keys = ("a" * 16, "b" * 16)
    path, body = KINDS["greedy"]
    with serving(embedded, keys=keys, journal=tmp_path / "journal") as server:
        Stream(server, path, body, X_Request_ID="mine").read()
        with server.client() as client:
            other = {"Authorization": f"Bearer {keys[1]}"}
            assert client.get(f"{path}/mine").status_code == 200
            assert client.get(f"{path}/mine", headers=other).status_code == 404
            assert client.get(f"{CHATS}/mine").status_code == 404
            named = {"X-Request-ID": "mine"}
            for wrong in ({"headers": other | named}, {"headers": named}):
                refused = client.post(path, json={**body, "max_tokens": 9}, **wrong)
                assert refused.status_code == 400
                assert "another request with the id" in refused.json()["error"]["message"]
            bad = client.get(f"{path}/mine", headers={"Last-Event-ID": "1,2"})
            assert bad.status_code == 400


def test_an_answer_is_forgotten_after_a_while(
    embedded: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "TICK_S", 0.02)
    path, body = KINDS["greedy"]
    folder = tmp_path / "journal"
    with serving(embedded, journal=folder, journal_keep_s=0.1) as server:
        Stream(server, path, body, X_Request_ID="old").read()
        with server.client() as client:
            assert wait_for(lambda: b'"gone"' in (folder / JOURNAL).read_bytes(), LIMIT_S)
            assert client.get(f"{path}/old").status_code == 404
    with serving(embedded, journal=folder) as server, server.client() as client:
        assert client.get(f"{path}/old").status_code == 404


def test_a_coordinator_goes_on_with_what_was_synced_when_the_one_before_it_died(
    embedded: Pair, tmp_path: Path
) -> None:
    """As after a kill at any moment: the journal's file as it was then is all that is left."""
    expected, begun = {}, {}
    folder, left = tmp_path / "journal", tmp_path / "left"
    left.mkdir(mode=0o700)
    with serving(embedded, journal=folder) as server:
        for kind, (path, body) in KINDS.items():
            expected[kind] = said(Stream(server, path, body).read())

        def begin(kind: str) -> Stream:
            path, body = KINDS[kind]
            return Stream(server, path, body, X_Request_ID=f"again {kind}").read(12)

        copied = threading.Thread(
            target=lambda: (time.sleep(0.15), shutil.copy(folder / JOURNAL, left / JOURNAL))
        )
        with ThreadPoolExecutor(len(KINDS)) as clients:
            copied.start()
            asked = {kind: clients.submit(begin, kind) for kind in KINDS}
            begun = {kind: one.result() for kind, one in asked.items()}
        copied.join()
    # Whatever the disk did to the last record.
    content = (left / JOURNAL).read_bytes()
    (left / JOURNAL).write_bytes(content[:-3])
    noted = read(content)
    assert not noted.garbled
    with serving(embedded, journal=left) as server:
        for kind, (path, body) in KINDS.items():
            headers = {"X_Request_ID": f"again {kind}", "Last_Event_ID": begun[kind].ids[-1]}
            # If its request was not synced, it is repeated: the seed is in it.
            rest = Stream(server, path, body, **headers).read()
            assert_same(said(begun[kind], rest), expected[kind], kind)
    assert any(isinstance(one, Came) for one in noted.records)
