"""Who may ask, by the headers of a request and the size of its body."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import Message, Receive, Scope, Send

from coordinator.http.clients import networks
from coordinator.http.guard import Guard, Rules, client_of, host_name, refusal
from coordinator.http.work import Work

KEY = "a-key-of-enough-letters"
LOCAL = Rules(checks_host=True)
JSON = ("content-type", "application/json")


def status_of(
    rules: Rules, *headers: tuple[str, str], method: str = "GET", path: str = "/v1"
) -> int:
    """200 if it passes."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    found = refusal(rules, method, path, raw)
    return 200 if found is None else found.status


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "127.0.0.5", "[::1]:8000", "LOCALHOST:80"]
)
def test_a_loopback_name_is_let_in(host: str) -> None:
    assert status_of(LOCAL, ("host", host)) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"]
)
def test_a_rebound_name_is_refused(host: str) -> None:
    assert status_of(LOCAL, ("host", host)) == 403


def test_a_name_that_was_allowed_is_let_in() -> None:
    rules = Rules(checks_host=True, hosts=("slipstream.test",))
    assert status_of(rules, ("host", "slipstream.test:8000")) == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:9999", ""])
def test_a_page_elsewhere_is_refused(origin: str) -> None:
    assert status_of(LOCAL, ("host", "localhost:8000"), ("origin", origin)) == 403


def test_our_own_page_and_one_that_was_allowed_are_let_in() -> None:
    host = ("host", "localhost:8000")
    assert status_of(LOCAL, host, ("origin", "http://localhost:8000")) == 200
    rules = Rules(checks_host=True, origins=("https://page.test",))
    assert status_of(rules, host, ("origin", "https://page.test")) == 200


def test_a_cross_site_request_without_an_origin_is_refused() -> None:
    assert status_of(LOCAL, ("host", "localhost"), ("sec-fetch-site", "cross-site")) == 403


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 401),
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"Basic {KEY}", 401),
        ("Bearer", 401),
        (f"Bearer {KEY}x", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_every_route_but_health_and_the_files_of_the_page_wants_the_key(
    sent: str | None, status: int
) -> None:
    rules = Rules(checks_host=False, keys=(KEY,))
    headers = [] if sent is None else [("authorization", sent)]
    for path in ("/v1/models", "/metrics", "/status", "/health/x", "/page", "/page/../metrics"):
        assert status_of(rules, *headers, path=path) == status
    for path in ("/health", "/", "/page/main.js"):
        assert status_of(rules, *headers, path=path) == 200


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_of_several_keys_lets_in_and_is_a_client_of_its_own(number: int) -> None:
    keys = tuple(f"{KEY}-{name}" for name in "abc")
    rules = Rules(checks_host=False, keys=keys)
    sent = ("authorization", f"Bearer {keys[number]}")
    assert status_of(rules, sent, path="/v1/models") == 200
    assert status_of(rules, ("authorization", f"Bearer {KEY}"), path="/v1/models") == 401
    raw = [
        (name.encode(), value.encode()) for name, value in (sent, ("x-forwarded-for", "1.1.1.1"))
    ]
    assert client_of(rules, "5.5.5.5", raw) == f"key {number}"


def test_without_keys_the_address_alone_is_the_client() -> None:
    raw = [(b"authorization", b"Bearer x"), (b"x-forwarded-for", b"1.1.1.1")]
    assert client_of(LOCAL, "5.5.5.5", raw) == "5.5.5.5"
    behind = Rules(checks_host=False, proxies=networks(("5.5.5.5",)))
    raw.append((b"X-Forwarded-For", b"6.6.6.6"))
    assert client_of(behind, "5.5.5.5", raw) == "6.6.6.6"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_form_cannot_send_anything(kind: str) -> None:
    host = ("host", "localhost")
    assert status_of(LOCAL, host, ("content-type", kind), method="POST") == 415
    assert status_of(LOCAL, host, JSON, method="POST") == 200


def test_a_body_that_says_that_it_is_too_large_is_not_read() -> None:
    rules = Rules(checks_host=False, max_body=1 << 20)
    headers = [JSON, ("content-length", str((1 << 20) + 1))]
    assert status_of(rules, *headers, method="POST") == 413


@pytest.mark.parametrize(
    ("header", "name"),
    [("A:1", "a"), ("[::1]:80", "::1"), ("[::1", "::1"), (":", ""), (" b ", "b")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


def answered(rules: Rules, parts: Iterable[Message], work: Work | None = None) -> tuple[int, bytes]:
    """Status, and what of the body has reached the routes."""
    left, sent, seen = list(parts), [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(Guard(app, rules, work or Work(8))(scope, receive, send))
    return (sent[0]["status"] if sent else 0), b"".join(seen)


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_comes_whole() -> None:
    rules = Rules(checks_host=False)
    assert answered(rules, [part(b"ab", more=True), part(b"c", more=False)]) == (200, b"abc")


def test_a_body_over_the_limit_is_refused_although_it_did_not_say_so() -> None:
    rules = Rules(checks_host=False, max_body=3)
    assert answered(rules, [part(b"ab", more=True), part(b"cd", more=True)]) == (413, b"")


def test_a_body_that_does_not_come_is_refused_in_time() -> None:
    rules = Rules(checks_host=False, io_timeout_s=0.05)
    assert answered(rules, [part(b"ab", more=True)]) == (408, b"")


def test_a_client_that_goes_while_it_sends_is_answered_nothing() -> None:
    rules = Rules(checks_host=False)
    assert answered(rules, [part(b"ab", more=True), {"type": "http.disconnect"}]) == (0, b"")


def test_a_request_that_cannot_begin_is_refused_before_its_body_is_read() -> None:
    rules, full = Rules(checks_host=False, io_timeout_s=20), Work(1)
    full.begin()
    assert answered(rules, [], full) == (503, b"")
    full.leave()
    assert answered(rules, [part(b"ab", more=False)], full) == (200, b"ab")
    assert full.num == 0


def test_a_body_that_comes_when_the_server_ends_is_too_late() -> None:
    rules, work = Rules(checks_host=False), Work(8)

    class Ending(dict[str, object]):
        """The last part of a body; while it is read, a signal comes."""

        def get(self, name: str, default: object = None) -> object:
            work.drain(0.0, 6.0)
            return super().get(name, default)

    last = Ending(part(b"ab", more=False))
    assert answered(rules, [last], work) == (503, b"")
