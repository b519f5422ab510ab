"""The HTTP server where many connect, say nothing, or ask at once."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from coordinator.api.pair import Pair
from tests.process.behaviours import MAX_MODEL_LEN
from tests.process.patience import wait_for
from tests.process.served import LIMIT_S, Served, serving

pytestmark = pytest.mark.process

KEYS = ("a-key-of-enough-letters", "another-key-of-someone")
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
REFUSED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
BEGUN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


@contextmanager
def crowd(served: Served, number: int, *says: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, each of which says one of these things and then nothing."""
    with ExitStack() as stack:
        made = [stack.enter_context(connected(served)) for _ in range(number)]
        for index, one in enumerate(made):
            one.sendall(says[index % len(says)])
        yield made


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass  # an answer that has come before
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize(
    "says", [(b"", b"GET", BEGUN), (REFUSED,), (HEALTH,), (b"", REFUSED, HEALTH)]
)
def test_connections_that_ask_nothing_keep_nobody_out_and_break_off_no_text(
    embedded: Pair, says: tuple[bytes, ...]
) -> None:
    with (
        serving(embedded, keys=KEYS[:1], max_connections=64) as served,
        served.writing("def f(", max_tokens=300) as events,
    ):
        next(events)
        with crowd(served, 300, *says) as made:
            for path, body in (("/health", None), ("/v1/completions", {"prompt": "x"})):
                begun = time.monotonic()
                with served.client() as client:
                    answer = client.get(path) if body is None else client.post(path, json=body)
                assert answer.status_code == 200
                assert time.monotonic() - begun < 5  # 0.1 s on a quiet machine
            assert sum(map(is_open, made)) < 64
        assert list(events)[-1] == "[DONE]"


def test_a_client_whose_key_is_wrong_does_not_stay_by_sending_its_body_slowly(
    embedded: Pair,
) -> None:
    header = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with (
        serving(embedded, keys=KEYS[:1], io_timeout_s=0.6) as served,
        connected(served) as slow,
    ):
        slow.sendall(header)
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 401")

        def goes_on() -> bool:
            try:
                slow.sendall(b"x")
            except ConnectionError:
                return False
            return True

        assert wait_for(lambda: not goes_on(), 5)


def test_more_requests_than_may_be_in_work_are_refused_and_health_is_not(embedded: Pair) -> None:
    with (
        serving(embedded, max_requests=1) as served,
        served.writing("def f(", max_tokens=MAX_MODEL_LEN - 8) as events,
    ):
        next(events)
        refused = served.post("/v1/completions", prompt="x")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "1 requests are in work" in refused.json()["error"]["message"]
        with served.client() as client:
            for path in ("/health", "/metrics", "/"):
                assert client.get(path).status_code == 200
        assert list(events)[-1] == "[DONE]"
        served.wait_until_idle()
        served.complete("x", max_tokens=2)


def test_each_key_is_a_client_and_made_up_headers_are_none(embedded: Pair) -> None:
    def clients_of(served: Served, *headers: dict[str, str]) -> list[str]:
        """Whose the texts are that run."""
        names = []
        for one in headers:
            asking = Served(served.url, served.llm, served.server, one)
            with asking.writing("def f(", max_tokens=MAX_MODEL_LEN - 8) as events:
                next(events)
                names += served.llm.admission.clients
            served.wait_until_idle()
        return names

    made_up = [{"Authorization": f"Bearer {name}"} for name in ("a", "b")]
    forwarded = [{"X-Forwarded-For": f"9.9.9.9, {last}"} for last in ("8.8.8.1", "8.8.8.2")]
    with serving(embedded) as served:
        assert clients_of(served, {}, *made_up, *forwarded) == ["127.0.0.1"] * 5
    with serving(embedded, forwarded_allow_ips="127.0.0.0/8") as served:
        assert clients_of(served, *forwarded) == ["8.8.8.1", "8.8.8.2"]
    with serving(embedded, keys=KEYS) as served:
        with_keys = [{"Authorization": f"Bearer {key}"} for key in KEYS]
        assert clients_of(served, *with_keys) == ["key 0", "key 1"]
        assert Served(served.url, served.llm, served.server).post("/tokenize").status_code == 401
