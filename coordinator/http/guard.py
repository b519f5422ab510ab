"""Decides who may ask, and how much they may send: ASGI middleware in front of all routes.

What it defends, and why (docs/security.md):

Host      a web page can make a browser call a name of its own that leads to this machine (DNS
          rebinding). Such a call carries the page's name in `Host`, which is refused.
Origin    a page elsewhere can send a request without reading the answer. Browsers name the page in
          `Origin` and `Sec-Fetch-Site`; it is refused unless it was allowed.
Content   a form of a page elsewhere cannot send `application/json` without asking first.
API key   compared in constant time; every route wants it but /health and the files of the page.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.errors import Refusal, error_response
from coordinator.http.pages import FILES

OPEN_ROUTES = frozenset(("/health", *FILES))
LOOPBACK_NAMES = ("localhost",)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which requests are let through.

    checks_host    True if `Host` must be a loopback name or one of `hosts`
    key            the API key that clients must send; empty: none
    max_body       most bytes of a request's body
    io_timeout_s   most seconds for a request's body, and for each part of an answer
    """

    checks_host: bool
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    key: str = ""
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
    if rules.key and path not in OPEN_ROUTES:
        scheme, _, sent = given.get(b"authorization", "").partition(" ")
        is_right = hmac.compare_digest(sent.strip().encode(), rules.key.encode())
        if scheme.lower() != "bearer" or not is_right:
            return Refusal(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`")
    if method == "POST":
        kind = given.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return Refusal(415, "send JSON, with `Content-Type: application/json`")
    length = given.get(b"content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > rules.max_body:
        return too_large(rules)
    return None


def too_large(rules: Rules) -> Refusal:
    """Return the refusal (status 413) of a body that exceeds the limit."""
    return Refusal(413, f"the request is larger than {rules.max_body >> 20} MB")


class Guard:
    """Middleware that refuses requests by the rules, and limits the size and time of each."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request by its headers or body, or let the application answer it in time."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no web sockets
        rules = self._rules
        found = refusal(rules, scope["method"], scope["path"], scope["headers"])
        if found is None:
            try:
                body = await self._body(receive)
            except TimeoutError:
                found = Refusal(408, f"the request has not come within {rules.io_timeout_s:g} s")
            except OversizeError:
                found = too_large(rules)
            except ConnectionError:
                return
        if found is not None:
            await error_response(found)(scope, receive, send)
            return
        sent = False

        async def again() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        async def hurried(message: Message) -> None:
            async with asyncio.timeout(rules.io_timeout_s):
                await send(message)

        try:
            await self._app(scope, again, hurried)
        except TimeoutError:
            return  # the client does not read: the server closes its connection

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


class OversizeError(Exception):
    """A request's body exceeds the limit."""
