"""Passes requests to servers, and streams back to clients; a stream survives the loss of servers.

What is decided is in `answer.py` and `servers.py`; this file has the connections and the clock.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.http.errors import Refusal, again_after, error_response
from coordinator.ingress.answer import Answer, says_it_ends
from coordinator.ingress.servers import Server, Servers
from proto.errors import SlipstreamError

T = TypeVar("T")

TEXTS = ("/v1/completions", "/v1/chat/completions")
PASSED = ("authorization", "content-type", "accept")  # headers of a request that a server gets
RETURNED = ("content-type", "retry-after", "content-security-policy")  # and of its answer
FORWARDED = "x-forwarded-for"
PROBE_S = 1.0  # between two questions about a server's health, and the most that an answer takes
CONNECT_S = 5.0
KEEP_ALIVE_S = 5.0  # while no server is there a stream says that it is alive
LOOK_S = 0.1  # between two looks for a server that is ready
BEGINNING = 1024  # characters of a request that tell whether it begins like another one


SEVERAL = "a server is lost, and an answer to several prompts cannot go on elsewhere; ask again"


class LostError(Exception):
    """Raised where a server is lost while it is asked, or while it answers."""


class EndedError(Exception):
    """Raised in a request that is in work when this process ends."""


class Ingress:
    """An ASGI application in front of several servers of one model.

    wait_s  how long a request or a broken stream waits for a server that is ready
    draw    returns the seed of an answer that has none
    """

    def __init__(
        self,
        servers: Servers,
        *,
        wait_s: float,
        draw: Callable[[], int],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.servers = servers
        self._wait_s = wait_s
        self._draw = draw
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport)
        self._watching: list[asyncio.Task[None]] = []
        texts = [Route(path, self._text, methods=["POST"]) for path in TEXTS]
        self.app = Starlette(
            routes=[
                *texts,
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._other, methods=["GET", "POST"]),
            ]
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
            await self._probe(server)
            await asyncio.sleep(PROBE_S)

    async def _probe(self, server: Server) -> None:
        try:
            found = await self._client.get(f"{server.url}/health", timeout=PROBE_S)
        except httpx.TimeoutException:
            self.servers.probed(server, is_well=None)
        except httpx.HTTPError:
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
        body = await request.body()
        return await self._whole(request, lambda: body)

    async def _text(self, request: Request) -> Response:
        """Answer a request for a text."""
        raw = await request.body()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return await self._whole(request, lambda: raw)  # a server says what is wrong
        answer = Answer(body, self._draw())
        beginning = _beginning(body)
        if not answer.streams:
            asked = json.dumps(answer.asked()).encode()
            return await self._whole(request, lambda: asked, beginning)
        opened = await self._opened(request, lambda: json.dumps(answer.asked()).encode(), beginning)
        if isinstance(opened, Response):
            return opened
        if opened.status_code != 200:
            return await self._read(opened)
        events = self._events(request, answer, opened)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _whole(
        self, request: Request, asked: Callable[[], bytes], beginning: Hashable = None
    ) -> Response:
        """Return a whole answer; where a server is lost meanwhile, another one is asked."""
        while True:
            opened = await self._opened(request, asked, beginning)
            if isinstance(opened, Response):
                return opened
            with suppress(LostError):
                try:
                    return await self._read(opened)
                except EndedError:
                    return error_response(_ended(self.servers))

    async def _read(self, opened: "Opened") -> Response:
        """Return what a server answers, whole. Raises LostError."""
        try:
            content = await opened.unless_lost(opened.response.aread())
        finally:
            await opened.close()
        said = opened.response.headers
        headers = {key: said[key] for key in RETURNED if key in said}
        return Response(content, opened.status_code, headers)

    async def _opened(
        self, request: Request, asked: Callable[[], bytes], beginning: Hashable = None
    ) -> "Opened | Response":
        """Return the answer of the first server that takes the request, whose body is not read yet.

        If none does within the time, that of the last one, or a refusal.
        """
        until, tried, refused = time.monotonic() + self._wait_s, set[Server](), None
        while True:
            if self.servers.ended:
                return error_response(_ended(self.servers))
            server = self.servers.choose(tried, beginning)
            if server is None:
                if refused is not None:
                    return refused
                if time.monotonic() > until:
                    return error_response(_no_server())
                await asyncio.sleep(LOOK_S)
                continue
            opened = Opened(self.servers, server)
            try:
                await opened.ask(self._client, request, asked())
                if opened.status_code not in (429, 503):
                    return opened
                refused = await self._read(opened)
            except LostError:
                continue
            except EndedError:
                return error_response(_ended(self.servers))
            tried.add(server)

    # -- streams ----------------------------------------------------------------------------------

    async def _events(
        self, request: Request, answer: Answer, opened: "Opened"
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, from as many servers as it takes."""
        while True:
            try:
                async for event in self._of(opened, answer):
                    yield event
                return
            except LostError:
                answer.broke()
            except EndedError:
                yield _event(_ended(self.servers).as_event())
                return
            finally:
                await opened.close()
            if answer.has_begun and not answer.may_move:
                yield _event(Refusal(503, SEVERAL).as_event())
                return
            self.servers.num_moved += 1
            asking = asyncio.ensure_future(
                self._opened(request, lambda: json.dumps(answer.asked()).encode())
            )
            try:
                while not (await asyncio.wait((asking,), timeout=KEEP_ALIVE_S))[0]:
                    yield b": waiting for a server\n\n"
            finally:
                asking.cancel()
            found = asking.result()
            if isinstance(found, Response) or found.status_code != 200:
                response = found if isinstance(found, Response) else await self._read(found)
                yield _event(_told_of(response))
                return
            opened = found

    async def _of(self, opened: "Opened", answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events of one server as the client gets them. Raises LostError."""
        lines = opened.response.aiter_lines()
        while True:
            line = await opened.unless_lost(_next(lines))
            if line is None:
                raise LostError  # the stream has no end
            if not line.startswith("data: "):
                if line.startswith(":"):
                    yield f"{line}\n\n".encode()
                continue
            if line == "data: [DONE]":
                yield b"data: [DONE]\n\n"
                return
            event = json.loads(line.removeprefix("data: "))
            if says_it_ends(event):
                raise LostError
            if (told := answer.heard(event)) is not None:
                yield _event(told)


class Opened:
    """A request that a server answers."""

    response: httpx.Response

    def __init__(self, servers: Servers, server: Server) -> None:
        self._servers, self._server, self._life = servers, server, server.num_lives
        self._is_open = True
        server.num_running += 1

    @property
    def status_code(self) -> int:
        """Return the HTTP status of the answer."""
        return self.response.status_code

    async def ask(self, client: httpx.AsyncClient, request: Request, body: bytes) -> None:
        """Send the request; returns when the answer begins. Raises LostError."""
        headers = {key: request.headers[key] for key in PASSED if key in request.headers}
        hops = [
            *request.headers.getlist(FORWARDED),
            *([request.client.host] if request.client else ()),
        ]
        headers[FORWARDED] = ", ".join(hops)
        url = self._server.url + request.url.path
        if request.url.query:
            url = f"{url}?{request.url.query}"
        made = client.build_request(request.method, url, headers=headers, content=body)
        try:
            self.response = await self.unless_lost(client.send(made, stream=True))
        except BaseException:
            await self.close()
            raise

    async def unless_lost(self, doing: Awaitable[T]) -> T:
        """Return what this returns. Raises LostError if the server is lost before."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
                if self._server.num_lives != self._life:
                    raise LostError
                if self._servers.ended:
                    raise EndedError
            return task.result()
        except httpx.HTTPError as error:
            self._servers.broke(self._server)
            raise LostError from error
        finally:
            task.cancel()

    async def close(self) -> None:
        """Close the connection, and count the request out."""
        if not self._is_open:
            return
        self._is_open = False
        self._server.num_running -= 1
        if hasattr(self, "response"):
            with suppress(httpx.HTTPError):
                await self.response.aclose()


async def _next(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)


def _beginning(body: dict[str, Any]) -> Hashable:
    """Return how a request begins, for those that may share what a server has read."""
    found = body.get("messages") or body.get("prompt")
    first = found[0] if isinstance(found, list) and found else found
    said = json.dumps(first)[:BEGINNING] if first is not None else ""
    return said or None


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _ended(servers: Servers) -> Refusal:
    return Refusal(503, servers.ended, headers=again_after())


def _no_server() -> Refusal:
    return Refusal(503, "no server is ready; ask again later", headers=again_after())


def _told_of(response: Response) -> dict[str, Any]:
    """Return the last event of a stream that could not go on: what the other server answered."""
    try:
        told: dict[str, Any] = json.loads(bytes(response.body))
        told["error"]["status"] = response.status_code
    except (ValueError, KeyError, TypeError):
        status = response.status_code
        return Refusal(502, f"another server answered with status {status}").as_event()
    return told
