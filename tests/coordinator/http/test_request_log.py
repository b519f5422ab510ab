"""The line in the log for each request that was answered."""

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from coordinator.cli.log_format import JsonLine
from coordinator.http.guard import Guard, Rules
from coordinator.http.request_log import WRITTEN, Written, logger
from coordinator.http.work import Work

KEY = "a-key-of-enough-letters"
HEADERS = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {KEY}".encode())]
BODY = {"type": "http.request", "body": b'{"prompt": "a secret"}', "more_body": False}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams two parts of an answer of three tokens."""
    assert (await receive())["body"] == BODY["body"]
    written = scope["state"][WRITTEN] = Written(prompt_tokens=5)
    headers = [(b"X-Request-ID", b"cmpl-7")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    written.came(2, None, 0.25)
    await send({"type": "http.response.body", "body": b"secret", "more_body": True})
    written.came(1, "stop", 0.5)
    await send({"type": "http.response.body", "body": b""})


def logged(
    caplog: pytest.LogCaptureFixture,
    *received: Message,
    path: str = "/v1/completions",
    headers: list[tuple[bytes, bytes]] = HEADERS,
    most_sent: int = 9,
    logs: bool = True,
) -> list[logging.LogRecord]:
    """What is logged of one request; its client takes so many parts of the answer."""
    left, sent = list(received), []

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        if len(sent) == most_sent:
            raise OSError
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
    scope["client"] = ("10.0.0.9", 5)
    guard = Guard(app, Rules(checks_host=False, keys=(KEY,)), Work(8), logs=logs)
    with caplog.at_level(logging.INFO, logger.name):
        try:
            asyncio.run(guard(scope, receive, send))
        except OSError:
            assert len(sent) == most_sent
    return caplog.records


def test_a_request_has_one_line_with_what_came_and_nothing_that_was_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (record,) = logged(caplog, BODY)
    told = json.loads(JsonLine().format(record))
    seconds = told.pop("seconds")
    assert 0 < seconds < 60
    assert told.pop("time").endswith("Z")
    assert told.pop("message") == (
        f"POST /v1/completions 200 in {seconds:.3f} s, key 0, cmpl-7: 5 + 3 tokens, "
        "the first after 0.250 s, stop"
    )
    assert told == {
        "level": "info",
        "logger": "slipstream.requests",
        "request_id": "cmpl-7",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "key 0",
        "is_whole": True,
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "first_token_s": 0.25,
        "finish_reasons": ["stop"],
    }
    assert "secret" not in JsonLine().format(record)
    assert KEY not in JsonLine().format(record)


def test_a_request_that_is_refused_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    (record,) = logged(caplog, BODY, headers=HEADERS[:1])
    told = json.loads(JsonLine().format(record))
    assert (told["status"], told["client"], told["is_whole"]) == (401, "10.0.0.9", True)
    assert "prompt_tokens" not in told


def test_of_a_client_that_goes_the_line_says_how_far_it_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (record,) = logged(caplog, BODY, most_sent=2)
    told = json.loads(JsonLine().format(record))
    assert (told["status"], told["is_whole"], told["completion_tokens"]) == (200, False, 3)
    assert told["message"].endswith("; not complete")


def test_a_client_that_goes_before_it_has_asked_is_no_status_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (record,) = logged(caplog, {"type": "http.disconnect"})
    assert json.loads(JsonLine().format(record))["status"] == 499


def test_nothing_is_logged_of_health_nor_where_it_was_not_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert logged(caplog, BODY, path="/health") == []
    assert logged(caplog, BODY, logs=False) == []
