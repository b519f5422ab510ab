"""Reads large requests apart from all others, so that no text waits for them.

What the prompts of a large body need is done by two threads, and the tokenizer's part by a process
of its own (`coordinator/api/long_texts.py`). A body that may hold many values is looked at by
another such process first: Python would hold its interpreter for seconds to read millions of lists.
Small requests use none of these. How many large ones may wait is limited, for each client and in
all.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from coordinator.api.long_texts import LongTexts, give_memory_back
from coordinator.http.jobs import client_of, unless_gone
from proto.errors import BusyError, ConfigurationError

LARGE = 1 << 16  # bytes of a body
NUM_WAITING = 16  # threads of requests that wait for a process, which compiles their grammars
NUM_THREADS = 2  # for what large requests need before their texts begin
MOST_OF_A_CLIENT, MOST = 12, 32  # large requests that are being read
KEEP_S = 1.0  # after a large request, until its memory is given back
PIECE = 1 << 9  # items of a list that are written as JSON at once
DEPTH = 4  # of the lists of log-probabilities: an answer's choices, one of them, its `logprobs`
# A body may hold so many values in all, and so many lists, objects and fields of objects, which
# take longer to read. One with fewer signs before values than MANY_SIGNS is read without a look.
MOST_VALUES, MOST_PARTS = 1 << 20, 1 << 16
SIGNS, MANY_SIGNS = (b",", b"[", b"{"), 1 << 15

P = ParamSpec("P")
T = TypeVar("T")


class LargeRoute(APIRoute):
    """A route whose large bodies are looked at before they are read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            read = Request(request.scope, request.receive)
            await request.app.state.apart.look_at(read)
            return await handler(read)

        return handle


class Apart:
    """Does the work of requests in threads: of large ones in threads of their own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "large")
        self._waiting = ThreadPoolExecutor(NUM_WAITING, "grammars")
        self._looking = ThreadPoolExecutor(1, "large-json")
        self._bodies = LongTexts(bytes)  # without a tokenizer
        self._in_hand: Counter[str] = Counter()  # large requests by client; no zeros
        self._is_returning = False  # memory is to be given back soon

    async def look_at(self, request: Request) -> None:
        """Raise ConfigurationError if a body holds too many values, BusyError, ClientGoneError."""
        body = await request.body()
        if len(body) > LARGE and sum(map(body.count, SIGNS)) > MANY_SIGNS:
            await self._in_line(request, self._looking, self._check, body)

    def _check(self, body: bytes) -> None:
        num_values, num_parts = self._bodies.count(body, MOST_VALUES)
        if num_values > MOST_VALUES:
            raise ConfigurationError(f"the body holds more than {MOST_VALUES} values")
        if num_parts > MOST_PARTS:
            raise ConfigurationError(
                f"the body holds more than {MOST_PARTS} lists, objects and fields of objects"
            )

    async def run(
        self, request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of `work`. Raises what it raises, BusyError, ClientGoneError."""
        if len(await request.body()) <= LARGE:
            return await asyncio.to_thread(work, *args, **kwargs)
        return await self._in_line(request, self._pool, work, *args, **kwargs)

    async def run_waiting(
        self, request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `run` returns, of a request that may wait long without computing."""
        if len(await request.body()) > LARGE:
            return await self._in_line(request, self._pool, work, *args, **kwargs)
        loop = asyncio.get_running_loop()
        made = loop.run_in_executor(self._waiting, lambda: work(*args, **kwargs))
        return await unless_gone(request, made)

    async def _in_line(
        self,
        request: Request,
        pool: Executor,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return the result of the work for a large request. Raises BusyError if many wait."""
        client = client_of(request)
        if self._in_hand[client] >= MOST_OF_A_CLIENT or self._in_hand.total() >= MOST:
            raise BusyError("too many long prompts are being read; try again later")
        self._in_hand[client] += 1
        loop = asyncio.get_running_loop()
        try:
            made = loop.run_in_executor(pool, lambda: work(*args, **kwargs))
            return await unless_gone(request, made)
        finally:
            self._in_hand[client] -= 1
            self._in_hand += Counter()  # leaves out the zeros
            self._give_back_soon(loop)

    def _give_back_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the memory of large requests back to the system once they have been answered."""

        def give_back() -> None:
            self._is_returning = False
            loop.run_in_executor(None, give_memory_back)

        if not self._is_returning:
            self._is_returning = True
            loop.call_later(KEEP_S, give_back)


def json_response(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Return an answer of JSON; made in a thread, no long list of it stops the others."""
    return Response(json_bytes(content), media_type="application/json", headers=headers)


def json_bytes(content: dict[str, Any]) -> bytes:
    """Return JSON as starlette writes it, made piece by piece."""
    return b"".join(_pieces(content, 0))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yield a value in pieces: its fields, the objects in a list of it, and many numbers at once.

    depth  of the value in the answer; what lies deeper than DEPTH is no piece of its own
    """
    if isinstance(value, dict) and depth < DEPTH:
        for number, (name, one) in enumerate(value.items()):
            yield (b"," if number else b"{") + _compact({name: 0})[1:-2]  # a key of any kind
            yield from _pieces(one, depth + 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and depth == 1 and value and isinstance(value[0], dict):
        for number, one in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(one, depth + 1)
        yield b"]"
    elif isinstance(value, list) and len(value) > PIECE:
        for begin in range(0, len(value), PIECE):
            yield (b"," if begin else b"[") + _compact(value[begin : begin + PIECE])[1:-1]
        yield b"]"
    else:
        yield _compact(value)


def _compact(value: Any) -> bytes:
    """Return a value as starlette's answers write it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")
