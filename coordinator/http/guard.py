"""Decides who may ask, and how much they may send: ASGI middleware in front of all routes.

What it defends, and why (docs/security.md):

Host      a web page can make a browser call a name of its own that leads to this machine (DNS
          rebinding). Such a call carries the page's name in `Host`, which is refused.
Origin    a page elsewhere can send a request without reading the answer. Browsers name the page in
          `Origin` and `Sec-Fetch-Site`; it is refused unless it was allowed.
Content   a form of a page elsewhere cannot send `application/json` without asking first.
API key   compared in constant time; every route wants it but /health and the files of the page.

It also bounds the requests in work (`work.py`). A request is in work from when its whole body has
come until it is answered; what anybody may ask (/health, the page), and /metrics, are not counted.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.clients import Network, client_at
from coordinator.http.errors import Refusal, again_after, error_response
from coordinator.http.pages import FILES
from coordinator.http.request_log import WRITTEN, Watched, write
from coordinator.http.work import Work

OPEN_ROUTES = frozenset(("/health", *FILES))
FIGURES = "/metrics"  # is answered also while the server drains
UNCOUNTED = OPEN_ROUTES | {FIGURES}
LOOPBACK_NAMES = ("localhost",)
# Where a scope's `state` has whose request it is, and the connection on which it came.
CLIENT, CONNECTION = "client", "connection"
OWNER = "owner"  # who alone may ask for its answer again


class Connection(Protocol):
    """The connection on which a request came."""

    def hold(self) -> None:
        """Do not close it for others until `release`."""

    def release(self) -> None:
        """Undo `hold`."""

    def drop(self) -> None:
        """Close it at once."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which requests are let through.

    checks_host    True if `Host` must be a loopback name or one of `hosts`
    keys           the API keys, one of which clients must send; empty: none is wanted
    proxies        addresses of reverse proxies whose X-Forwarded-For is believed
    max_body       most bytes of a request's body
    io_timeout_s   most seconds for a request's body, and for each part of an answer
    """

    checks_host: bool
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    proxies: tuple[Network, ...] = ()
    max_body: int = 8 << 20
    io_timeout_s: float = 30.0


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port and in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def is_loopback(name: str) -> bool:
    """True if the name can only mean this machine: "localhost", or a loopback address."""
    if name in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def refusal(
    rules: Rules, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> Refusal | None:
    """Return why a request is refused, by its headers alone; None: it may pass (pure)."""
    given = {name.lower(): value.decode("latin-1") for name, value in headers}
    host = given.get(b"host", "")
    name = host_name(host)
    if rules.checks_host and not is_loopback(name) and name not in rules.hosts:
        return Refusal(
            403, f"this server is not called {name[:80]!r}; start it with --allowed-host NAME"
        )
    origin = given.get(b"origin")
    if origin not in rules.origins:
        is_own = origin in (None, f"http://{host}", f"https://{host}")
        is_cross_site = given.get(b"sec-fetch-site") in ("cross-site", "same-site")
        if not is_own or is_cross_site:
            return Refusal(403, "a web page elsewhere may not use this server; see --allow-origin")
    if method == "OPTIONS" and origin in rules.origins:
        return None  # the browser asks before it sends the key
    wants_key = bool(rules.keys) and path not in OPEN_ROUTES
    if wants_key and key_number(rules.keys, given.get(b"authorization", "")) is None:
        return Refusal(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`")
    if method == "POST":
        kind = given.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return Refusal(415, "send JSON, with `Content-Type: application/json`")
    length = given.get(b"content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > rules.max_body:
        return too_large(rules)
    return None


def key_number(keys: Sequence[str], header: str) -> int | None:
    """Return which of the keys a header Authorization has; None: it has none of them.

    Each key is compared in constant time, and all are, so that no time tells anything of them.
    """
    scheme, _, sent = header.partition(" ")
    given = sent.strip().encode()
    found = [number for number, key in enumerate(keys) if hmac.compare_digest(given, key.encode())]
    return found[0] if found and scheme.lower() == "bearer" else None


def client_of(rules: Rules, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the name of a request's client: of its API key, or without keys of its address."""
    given = [(name.lower(), value.decode("latin-1")) for name, value in headers]
    if rules.keys:
        number = key_number(rules.keys, dict(given).get(b"authorization", ""))
        return f"key {number}"
    forwarded = [value for name, value in given if name == b"x-forwarded-for"]
    return client_at(peer, forwarded, rules.proxies)


def owner_of(rules: Rules, client: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return who may read an answer: a digest of the API key, or without keys the client."""
    if not rules.keys:
        return client
    given = {name.lower(): value for name, value in headers}
    key = given.get(b"authorization", b"").partition(b" ")[2].strip()
    return hashlib.sha256(key).hexdigest()


def too_large(rules: Rules) -> Refusal:
    """Return the refusal (status 413) of a body that exceeds the limit."""
    return Refusal(413, f"the request is larger than {rules.max_body >> 20} MB")


class Guard:
    """Middleware that refuses requests by the rules, and limits the number, size and time of them.

    work  counts the requests in work; while the server ends, it lets none begin
    logs  True: each request that is counted gets a line in the log when it was answered
    """

    def __init__(self, app: ASGIApp, rules: Rules, work: Work, *, logs: bool = False) -> None:
        self._app = app
        self._rules = rules
        self._work = work
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request by its headers or body, or let the application answer it in time."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no web sockets
        if not self._logs or scope["path"] in UNCOUNTED:
            await self._handle(scope, receive, send)
            return
        watched, begun = Watched(send), time.monotonic()
        try:
            await self._handle(scope, receive, watched)
        finally:
            state, peer = scope.get("state", {}), (scope.get("client") or ("",))[0]
            client, took_s = state.get(CLIENT, peer), time.monotonic() - begun
            write(scope, client, watched, state.get(WRITTEN), took_s)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        rules, path = self._rules, scope["path"]
        found = refusal(rules, scope["method"], path, scope["headers"]) or self._hindrance(path)
        body = b""
        if found is None:
            try:
                body = await self._body(receive)
            except TimeoutError:
                found = Refusal(408, f"the request has not come within {rules.io_timeout_s:g} s")
            except OversizeError:
                found = too_large(rules)
            except ConnectionError:
                return
        if found is None and (found := self._hindrance(path)) is None:
            await self._answer(scope, _Sent(body, receive), send)
            return
        await error_response(found)(scope, receive, send)

    def _hindrance(self, path: str) -> Refusal | None:
        """Return why no request to this path may begin now (503); None: it may."""
        work = self._work
        may_pass = path == FIGURES or (path in OPEN_ROUTES and not work.is_ending)
        if may_pass or (why := work.refused()) is None:
            return None
        return Refusal(503, why, headers=again_after(work.retry_after_s(time.monotonic())))

    async def _answer(self, scope: Scope, receive: "_Sent", send: Send) -> None:
        """Let the application answer a request whose body has come."""
        state: dict[str, Any] = scope.setdefault("state", {})
        peer = (scope.get("client") or ("",))[0]
        state[CLIENT] = client_of(self._rules, peer, scope["headers"])
        state[OWNER] = owner_of(self._rules, state[CLIENT], scope["headers"])
        connection: Connection | None = state.get(CONNECTION)
        answer = _Answer(send, self._rules.io_timeout_s)
        with self._counted(scope["path"], connection):
            try:
                await self._app(scope, receive, answer)
            except TimeoutError:
                if connection is not None:
                    connection.drop()  # the client does not read
            except asyncio.CancelledError:
                if not self._work.is_ending or answer.has_begun:
                    raise
                refused = Refusal(503, self._work.why, headers=again_after())
                await error_response(refused)(scope, receive, send)

    @contextmanager
    def _counted(self, path: str, connection: Connection | None) -> Iterator[None]:
        """Count a request as one in work, and hold its connection, while inside."""
        if path in UNCOUNTED:
            yield
            return
        self._work.begin()
        if connection is not None:
            connection.hold()
        try:
            yield
        finally:
            self._work.leave()
            if connection is not None:
                connection.release()

    async def _body(self, receive: Receive) -> bytes:
        """Read and return the whole body. Raises TimeoutError, OversizeError, ConnectionError."""
        parts, size = [], 0
        async with asyncio.timeout(self._rules.io_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self._rules.max_body:
                    raise OversizeError
                if not message.get("more_body"):
                    return b"".join(parts)


class _Sent:
    """Gives the application the whole body of a request, and then tells when its client goes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """Sends the parts of an answer, each within `limit_s` seconds. Raises TimeoutError.

    has_begun  the client has the status of the answer already
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self.has_begun = False
        self._send = send
        self._limit_s = limit_s

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        async with asyncio.timeout(self._limit_s):
            await self._send(message)


class OversizeError(Exception):
    """A request's body exceeds the limit."""
