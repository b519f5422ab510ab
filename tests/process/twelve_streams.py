"""Twelve streams of every kind, and what their clients read: it has to be an undisturbed text."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

LIMIT_S = 120.0
AT_ONCE = 6
PROMPT = "def read_lines(path):\n    "
CHAT = {"messages": [{"role": "user", "content": "Write a loop."}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
SAMPLED = {"temperature": 0.8, "max_tokens": 150, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": PROMPT, **SAMPLED, "temperature": 0.0}),
    ("completions", {"prompt": PROMPT, **SAMPLED, "seed": 1}),
    ("completions", {"prompt": PROMPT, **SAMPLED, "seed": 2, "presence_penalty": 0.9}),
    ("completions", {"prompt": PROMPT, **SAMPLED, "seed": 3, "n": 2, "max_tokens": 80}),
    ("completions", {"prompt": PROMPT, **SAMPLED, "seed": 4, "logprobs": 2}),
    ("completions", {"prompt": PROMPT, **SAMPLED, "seed": 5, "min_tokens": 90, "stop": ["return"]}),
    ("chat/completions", {**CHAT, **SAMPLED, "seed": 6}),
    ("chat/completions", {**CHAT, **SAMPLED, "seed": 7, "n": 2, "max_tokens": 90}),
    ("chat/completions", {**CHAT, "temperature": 0.8, "seed": 8, "response_format": FORM}),
    ("completions", {"prompt": "class Queue:\n", **SAMPLED, "seed": 9}),
    ("completions", {"prompt": "import os\n", **SAMPLED, "seed": 10, "top_p": 0.9}),
    ("completions", {"prompt": "for key in ", **SAMPLED, "seed": 11, "repetition_penalty": 1.2}),
]


@dataclass
class Heard:
    """What a client has read of an answer, by choice."""

    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    roles: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    num_tokens: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """One event."""
        assert "error" not in event, event
        self.names.add(event["id"])
        if (usage := event.get("usage")) and not event["choices"]:
            self.num_tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            assert "token_ids" not in choice
            index, delta = choice["index"], choice.get("delta", {})
            assert index not in self.reasons, "a choice goes on behind its end"
            self.text[index] += choice.get("text") or delta.get("content") or ""
            self.roles[index] += "role" in delta
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())

    def check(self, other: "Heard") -> None:
        """It is what the other one has read."""
        assert self.text == other.text
        assert self.roles == other.roles
        assert self.reasons == other.reasons
        assert self.num_tokens == other.num_tokens > 0
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(self.names) == 1, "the client sees one answer"


def ask(
    url: str,
    path: str,
    body: dict[str, Any],
    begun: threading.Semaphore | None = None,
    *,
    key: str = "",
) -> Heard:
    """Read a stream to its end; `begun` is released after some of its events."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    heard, num = Heard(), 0
    with (
        httpx.Client(timeout=LIMIT_S, headers=headers) as client,
        client.stream("POST", f"{url}/v1/{path}", json=asked) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in lines_of(response):
            if line == "data: [DONE]":
                return heard
            if line.startswith("data: "):
                heard.add(json.loads(line.removeprefix("data: ")))
                num += 1
                if num == 5 and begun is not None:
                    begun.release()
    raise AssertionError("the stream has broken off")


def lines_of(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream, which only a line feed ends."""
    left = b""
    for part in response.iter_bytes():
        *lines, left = (left + part).split(b"\n")
        yield from (line.decode() for line in lines)
