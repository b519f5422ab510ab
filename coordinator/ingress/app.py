"""Passes requests to servers, and streams back to clients; a stream survives the loss of servers.

What is decided is in `answer.py` and `servers.py`; this file has the connections and the clock.

A request goes to one server after another until one takes it (`_opened`). A stream that breaks off
goes on at another server (`_events`), as long as tokens come in between: after MOST_BREAKS in a row
without one, the request itself must be what breaks servers, and its client gets an error.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.http.clients import Network, client_at
from coordinator.http.errors import Refusal, again_after, error_response, mistake_of
from coordinator.http.jobs import ClientGoneError, unless_gone
from coordinator.http.large import json_bytes
from coordinator.http.streams import event_bytes
from coordinator.ingress.answer import Answer, says_it_ends
from coordinator.ingress.servers import Server, Servers
from proto.errors import SlipstreamError

T = TypeVar("T")
Json = dict[str, Any]

TEXTS = ("/v1/completions", "/v1/chat/completions")
FORWARDED = "x-forwarded-for"
# Headers that are of one connection, or that are made anew for the next one. The page's origin is
# this address, which the guard has compared; a server would take it for a page elsewhere.
OF_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
    *("accept-encoding", "date", "server", "origin", "referer", "sec-fetch-site", FORWARDED),
}
PROBE_S = 1.0  # between two questions about a server's health, and the most that an answer takes
CONNECT_S = 5.0
KEEP_ALIVE_S = 5.0  # while no server is there a stream says that it is alive
LOOK_S = 0.1  # between two looks for a server that is ready
MOST_BREAKS = 3  # of a request's connections in a row without a token in between
BEGINNING = 1024  # characters of a request that tell whether it begins like another one
LARGE = 1 << 16  # bytes of a request that is read in a thread
MAX_EVENT = 64 << 20  # bytes of one event of a stream
MARK, DONE, NAMED = b"data: ", b"data: [DONE]", b"id: "
REQUEST_ID = "x-request-id"
SEVERAL = "a server is lost, and an answer to several prompts cannot go on elsewhere; ask again"
BREAKS = (
    f"the servers broke off this request {MOST_BREAKS} times in a row; their logs may say why, and "
    "another request may pass"
)


class LostError(Exception):
    """Raised where a connection breaks, or its server is lost."""


class EndedError(Exception):
    """Raised in a request that is in work when this process ends."""


@dataclass(slots=True)
class Asking:
    """A request that servers are asked.

    body       returns what the next server is asked
    beginning  of the request; None: it has none that others may share
    until      when waiting for a server ends (monotonic)
    patient    True: a refusal that may pass is waited out; the client has got a part already
    avoided    the server whose connection broke last
    name       id of the request at a server that keeps its answer; "": none is known to keep it
    """

    request: Request
    body: Callable[[], bytes]
    until: float
    beginning: Hashable = None
    patient: bool = False
    avoided: Server | None = None
    name: str = ""
    num_breaks: int = 0
    tried: set[Server] = field(default_factory=set)

    def broke(self, server: Server) -> None:
        """Note that the connection to a server broke."""
        self.num_breaks += 1
        self.avoided = server


class Ingress:
    """An ASGI application in front of several servers of one model.

    wait_s   how long a request or a broken stream waits for a server that is ready
    draw     returns the seed of an answer that has none
    proxies  whose X-Forwarded-For is believed
    """

    def __init__(
        self,
        servers: Servers,
        *,
        wait_s: float,
        draw: Callable[[], int],
        proxies: tuple[Network, ...] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.servers = servers
        self._wait_s, self._draw, self._proxies = wait_s, draw, proxies
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        # Nothing of the environment: what it says of proxies and passwords is not for these.
        self.client = httpx.AsyncClient(
            timeout=timeout, limits=limits, transport=transport, trust_env=False
        )
        self._watching: list[asyncio.Task[None]] = []
        texts = [Route(path, self._text, methods=["POST"]) for path in TEXTS]
        others = Route("/{path:path}", self._other, methods=["GET", "POST", "HEAD"])
        self.app = Starlette(
            routes=[
                *texts,
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                others,
            ],
            exception_handlers={Exception: _mistake, ClientGoneError: _gone},
        )

    # -- what a server of HTTP has behind it ------------------------------------------------------

    def check_alive(self) -> None:
        """Do nothing: servers that are lost are waited for."""

    def end(self, error: SlipstreamError) -> None:
        """End all that is in work with this error."""
        self.servers.ended = str(error)

    # -- health -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask all servers how they are from now on, as long as this event loop runs."""
        self._watching = [asyncio.create_task(self._watch(one)) for one in self.servers.all]

    async def _watch(self, server: Server) -> None:
        while True:
            server.is_doubted, until = False, time.monotonic() + PROBE_S
            await self._probe(server)
            while time.monotonic() < until and not server.is_doubted:
                await asyncio.sleep(LOOK_S)

    async def _probe(self, server: Server) -> None:
        try:
            found = await self.client.get(f"{server.url}/health", timeout=PROBE_S)
        except httpx.TimeoutException:
            self.servers.probed(server, is_well=None)
        except (httpx.HTTPError, OSError):
            self.servers.broke(server)
        else:
            self.servers.probed(server, is_well=found.status_code == 200)

    async def _health(self, _: Request) -> Response:
        if self.servers.num_ready:
            return PlainTextResponse("")
        return error_response(_no_server())

    async def _metrics(self, _: Request) -> Response:
        """Return the figures of this process for Prometheus; servers have their own."""
        found = CollectorRegistry()
        ready = Gauge(
            "slipstream_router_servers_ready", "Servers that get requests", registry=found
        )
        ready.set(self.servers.num_ready)
        moved = Gauge("slipstream_router_moved_streams", "Streams moved so far", registry=found)
        moved.set(self.servers.num_moved)
        name, help_ = "slipstream_router_requests_running", "Requests in work by server"
        running = Gauge(name, help_, ["server"], registry=found)
        for server in self.servers.all:
            running.labels(server.url).set(server.num_running)
        return Response(generate_latest(found), media_type="text/plain; version=0.0.4")

    # -- requests ---------------------------------------------------------------------------------

    async def _other(self, request: Request) -> Response:
        """Pass a request that is no text to whichever server is the least busy."""
        return await self._whole(request, await request.body())

    async def _text(self, request: Request) -> Response:
        """Answer a request for a text."""
        raw = await request.body()
        body = await _read_json(raw)
        try:
            answer = Answer(body, self._draw())
        except ValidationError:
            return await self._whole(request, raw)  # a server says what is wrong
        beginning = _beginning(body)
        if not answer.streams:
            return await self._whole(request, await _written(answer.asked()), beginning)
        first = await _written(answer.asked())
        until = time.monotonic() + self._wait_s
        asking = Asking(request, lambda: first, until, beginning)
        opened = await unless_gone(request, self._opened(asking))
        if isinstance(opened, Response):
            return opened
        if opened.status_code != 200:
            return await self._refusal(opened)
        return StreamingResponse(
            self._events(asking, answer, opened), media_type="text/event-stream"
        )

    async def _whole(self, request: Request, body: bytes, beginning: Hashable = None) -> Response:
        """Return a whole answer; where its server is lost meanwhile, another one is asked."""
        asking = Asking(request, lambda: body, time.monotonic() + self._wait_s, beginning)

        async def ask() -> Response:
            while True:
                opened = await self._opened(asking)
                if isinstance(opened, Response):
                    return opened
                with suppress(LostError):
                    return await self._read(opened)
                asking.broke(opened.server)

        return await unless_gone(request, ask())

    async def _read(self, opened: "Opened") -> Response:
        """Return what a server answers, whole. Raises LostError."""
        try:
            content = await opened.unless_lost(opened.response.aread())
        except EndedError:
            return error_response(_ended(self.servers))
        finally:
            await opened.close()
        headers = _passed(opened.response.headers)
        return Response(content, opened.status_code, headers)

    async def _refusal(self, opened: "Opened") -> Response:
        """Return what a server answers that does not stream, as far as it comes."""
        try:
            return await self._read(opened)
        except LostError:
            return error_response(Refusal(502, "the server broke off its answer; ask again"))

    async def _opened(self, asking: Asking) -> "Opened | Response":
        """Return the answer of the first server that takes the request, whose body is not read yet.

        If none does within the time, a refusal: that of the last one, if there was one.
        """
        refused: Response | None = None
        while not self.servers.ended:
            if asking.num_breaks >= MOST_BREAKS:
                return error_response(Refusal(502, BREAKS))
            server = self.servers.choose(asking.tried, asking.beginning, asking.avoided)
            if server is None:
                is_over = time.monotonic() > asking.until
                if refused is not None and (is_over or not asking.patient):
                    return refused
                if is_over:
                    return error_response(_no_server())
                await asyncio.sleep(LOOK_S if refused is None else PROBE_S)
                asking.tried.clear()
                continue
            opened = Opened(self.servers, server)
            try:
                await opened.ask(self.client, asking, self._client_of(asking.request))
                if _may_pass(opened.status_code, is_patient=asking.patient):
                    refused = await self._read(opened)
                    asking.tried.add(server)
                    continue
            except LostError:
                asking.broke(server)
            except EndedError:
                break
            else:
                return opened
        return error_response(_ended(self.servers))

    def _client_of(self, request: Request) -> str:
        """Return the address from which a request came, as far as proxies are believed."""
        peer = request.client.host if request.client else ""
        return client_at(peer, request.headers.getlist(FORWARDED), self._proxies)

    # -- streams ----------------------------------------------------------------------------------

    async def _events(
        self, asking: Asking, answer: Answer, opened: "Opened"
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, from as many servers as it takes."""
        while True:
            num_tokens = answer.num_tokens
            try:
                async for event in self._of(opened, answer, asking):
                    yield event
                return
            except LostError:
                answer.broke()
            except EndedError:
                yield event_bytes(_ended(self.servers).as_event())
                return
            finally:
                await opened.close()
            if answer.is_whole:
                yield DONE + b"\n\n"
                return
            if answer.has_begun and not answer.may_move:
                yield event_bytes(Refusal(503, SEVERAL, headers=again_after()).as_event())
                return
            if answer.num_tokens > num_tokens:
                asking.num_breaks = 0
            asking.broke(opened.server)
            self.servers.num_moved += 1
            async with aclosing(self._moved(asking, answer)) as moved:
                async for found in moved:
                    if isinstance(found, Opened):
                        opened = found
                        break
                    yield found
                else:
                    return

    async def _moved(
        self, asking: Asking, answer: Answer
    ) -> AsyncGenerator["bytes | Opened", None]:
        """Yield what goes on with a stream, last; before it, and in its place, what is said."""
        body = await _written(answer.asked())
        asking.body, asking.patient, asking.tried = lambda: body, True, set()
        asking.until = time.monotonic() + self._wait_s
        opening = asyncio.ensure_future(self._opened(asking))
        try:
            while not (await asyncio.wait((opening,), timeout=KEEP_ALIVE_S))[0]:
                yield b": waiting for a server\n\n"
        finally:
            opening.cancel()
        found = opening.result()
        if isinstance(found, Opened) and found.status_code == 200:
            yield found
            return
        if isinstance(found, Opened):
            found = await self._refusal(found)
        told = _told_of(found)
        yield event_bytes(told)
        if told["error"].get("status") != 503:  # the request is at fault: it is not to be repeated
            yield DONE + b"\n\n"

    async def _of(self, opened: "Opened", answer: Answer, asking: Asking) -> AsyncIterator[bytes]:
        """Yield the events of one server as the client gets them. Raises LostError, EndedError."""
        lines = _lines(opened.response)
        while True:
            line = await opened.unless_lost(_next(lines))
            if line is None:
                raise LostError  # the stream has no end
            if line == DONE:
                yield DONE + b"\n\n"
                return
            if line.startswith(b":"):
                yield line + b"\n\n"
            if line.startswith(NAMED):  # the server, started again, knows the request by its id
                asking.name = opened.response.headers.get(REQUEST_ID, "")
            if not line.startswith(MARK):
                continue
            try:
                event = json.loads(line[len(MARK) :])
            except ValueError as error:
                raise LostError from error
            if says_it_ends(event):
                raise LostError
            if (told := answer.heard(event)) is not None:
                yield event_bytes(told)


class Opened:
    """A request that a server is asked, and its answer."""

    response: httpx.Response

    def __init__(self, servers: Servers, server: Server) -> None:
        self.server = server
        self._servers, self._life = servers, server.num_lives
        self._is_open = True
        server.num_running += 1

    @property
    def status_code(self) -> int:
        """Return the HTTP status of the answer."""
        return self.response.status_code

    async def ask(self, client: httpx.AsyncClient, asking: Asking, client_name: str) -> None:
        """Send the request; returns when the answer begins. Raises LostError, EndedError."""
        try:
            made = _made(client, self.server.url, asking, client_name)
            self.response = await self.unless_lost(client.send(made, stream=True))
        except BaseException:
            await self.close()
            raise

    async def unless_lost(self, doing: Awaitable[T]) -> T:
        """Return what this returns. Raises LostError if the connection or the server is lost."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
                if self.server.num_lives != self._life:
                    raise LostError
                if self._servers.ended:
                    raise EndedError
            return task.result()
        except httpx.ConnectError as error:
            if self.server.num_lives == self._life:
                self._servers.broke(self.server)
            raise LostError from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            self.server.is_doubted = True
            raise LostError from error
        finally:
            task.cancel()

    async def close(self) -> None:
        """Close the connection, and count the request out."""
        if not self._is_open:
            return
        self._is_open = False
        self.server.num_running -= 1
        if hasattr(self, "response"):
            with suppress(httpx.HTTPError):
                await self.response.aclose()


def _made(client: httpx.AsyncClient, url: str, asking: Asking, client_name: str) -> httpx.Request:
    """Return the request as a server gets it."""
    request = asking.request
    path = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope.get("query_string", b"")
    target = path + (b"?" + query if query else b"")
    kept = [
        (name, value)
        for name, value in request.headers.raw
        if name.decode("latin-1") not in OF_CONNECTION
    ]
    if asking.name:
        kept = [(name, value) for name, value in kept if name != REQUEST_ID.encode()]
        kept.append((REQUEST_ID.encode(), asking.name.encode()))
    return client.build_request(
        request.method,
        httpx.URL(url).copy_with(raw_path=target),
        headers=[*kept, (FORWARDED.encode(), client_name.encode())],
        content=asking.body(),
    )


def _passed(headers: httpx.Headers) -> dict[str, str]:
    """Return the headers of an answer that the client gets."""
    return {name: value for name, value in headers.items() if name not in OF_CONNECTION}


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. Only a line feed ends one: texts have other ends of lines."""
    left = b""
    async for part in response.aiter_bytes():
        *lines, left = (left + part).split(b"\n")
        if len(left) > MAX_EVENT:
            raise httpx.StreamError("an event without an end")
        for line in lines:
            yield line.rstrip(b"\r")


async def _next(lines: AsyncIterator[bytes]) -> bytes | None:
    return await anext(lines, None)


async def _read_json(raw: bytes) -> Any:
    """Return a body that a client has sent; None if it is no JSON."""
    try:
        return await asyncio.to_thread(json.loads, raw) if len(raw) > LARGE else json.loads(raw)
    except (ValueError, RecursionError):
        return None


async def _written(body: Json) -> bytes:
    """Return a body as bytes; it is written in a thread, because it may be large."""
    return await asyncio.to_thread(json_bytes, body)


def _beginning(body: Json) -> Hashable:
    """Return how a request begins, for those that may share what a server has read."""
    found = body.get("messages") or body.get("prompt")
    if isinstance(found, list):
        found = found[:BEGINNING]
    return json.dumps(found)[:BEGINNING] if found else None


def _ended(servers: Servers) -> Refusal:
    return Refusal(503, servers.ended, headers=again_after())


def _no_server() -> Refusal:
    return Refusal(503, "no server is ready; ask again later", headers=again_after())


def _told_of(response: Response) -> Json:
    """Return the last event of a stream that could not go on: what the last server answered."""
    status = response.status_code
    try:
        told: Json = json.loads(bytes(response.body))
        told["error"]["status"] = status
    except (ValueError, KeyError, TypeError):
        return Refusal(502, f"another server answered with status {status}").as_event()
    if seconds := response.headers.get("retry-after", ""):
        told["error"]["retry_after"] = int(seconds) if seconds.isdigit() else 1
    return told


def _may_pass(status: int, *, is_patient: bool) -> bool:
    """True if another server may take what one has refused with this status, or the same later.

    is_patient  the client has got a part: a server that knows the model not, or fails, is no reason
                to end
    """
    return status in (429, 503) or (is_patient and (status == 404 or status >= 500))


async def _mistake(_: Request, error: Exception) -> Response:
    return error_response(mistake_of(error))


async def _gone(_: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
