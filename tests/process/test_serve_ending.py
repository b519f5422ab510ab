"""The end of the HTTP server: what it still answers, and how what it breaks off ends."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from coordinator.api.pair import Pair
from tests.process.behaviours import MAX_MODEL_LEN
from tests.process.patience import wait_for
from tests.process.served import LIMIT_S, Served, serving

pytestmark = pytest.mark.process

LONG = {"prompt": "def f(", "max_tokens": MAX_MODEL_LEN - 8, "ignore_eos": True}


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def is_there(served: Served) -> bool:
    try:
        httpx.get(f"{served.url}/metrics", timeout=LIMIT_S)
    except httpx.TransportError:
        return False
    return True


def streamed(served: Served) -> list[str]:
    """All events of a long text."""
    with served.writing(**LONG) as events:
        return list(events)


def in_work(served: Served, number: int) -> bool:
    return wait_for(lambda: len(served.llm.request_ids) == number, LIMIT_S)


def told_to_ask_again(error: dict[str, Any]) -> bool:
    return error["type"] == "service_unavailable_error" and "ask again" in error["message"]


def test_a_signal_lets_running_texts_end_and_refuses_new_ones(
    embedded: Pair, clients: ThreadPoolExecutor
) -> None:
    with serving(embedded, drain_timeout_s=60) as served:
        running = clients.submit(streamed, served)
        assert in_work(served, 1)
        served.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503, LIMIT_S)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = served.post(path, **LONG)
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert told_to_ask_again(refused.json()["error"])
        assert is_there(served)
        whole = running.result(LIMIT_S)
        assert wait_for(lambda: not is_there(served), 3)
        assert whole[-1] == "[DONE]"
        assert json.loads(whole[-2])["choices"][0]["finish_reason"] == "length"


def test_what_is_left_at_the_end_of_the_drain_is_told_so_whether_it_streams_runs_or_waits(
    embedded: Pair, clients: ThreadPoolExecutor
) -> None:
    with serving(embedded, drain_timeout_s=0.3) as served:
        streams = [clients.submit(streamed, served) for _ in range(6)]
        assert in_work(served, 6)
        plain = [clients.submit(served.post, "/v1/completions", **LONG) for _ in range(4)]
        assert in_work(served, 10)
        assert served.llm.admission.num_waiting
        served.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: not is_there(served), 5)
        for events in (one.result(LIMIT_S) for one in streams):
            error = json.loads(events[-1])["error"]
            assert (error["status"], error["retry_after"]) == (503, 1)
            assert told_to_ask_again(error)
            assert len(events) > 1
        for answer in (one.result(LIMIT_S) for one in plain):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert told_to_ask_again(answer.json()["error"])


def test_a_second_signal_ends_it_at_once(embedded: Pair, clients: ThreadPoolExecutor) -> None:
    with serving(embedded, drain_timeout_s=600) as served:
        running: Future[list[str]] = clients.submit(streamed, served)
        assert in_work(served, 1)
        served.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503, LIMIT_S)
        served.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: not is_there(served), 3)
        assert json.loads(running.result(LIMIT_S)[-1])["error"]["status"] == 503


def test_without_a_request_in_work_a_signal_ends_it_at_once(embedded: Pair) -> None:
    with serving(embedded, drain_timeout_s=600) as served:
        served.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: not is_there(served), 3)
