"""A server that has the page and streams given tokens at a given speed, without any model."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.http.pages import FILES, page_file

READ, NUM_PROMPT = (3072, 6144), 8000  # what it tells of the prompt before the first pass
DRAFTED = 3  # drafts of each pass; every other pass rejects the last of them

Token = dict[str, Any]  # as the field `speculation` of a chunk has it


def chunk_of(number: int, tokens: Sequence[Token], pass_ms: float) -> dict[str, Any]:
    """The chunk of a pass with these tokens, which the drafter was at work beside."""
    end_ms = (number + 1) * pass_ms
    accepted = DRAFTED - number % 2
    draft = {
        "device": "drafter",
        "source": "model",
        "number": number + 1,
        "begin_ms": end_ms - 1.4 * pass_ms,
        "end_ms": end_ms - 0.5 * pass_ms,
        "steps": DRAFTED,
        "tokens": DRAFTED,
        "depth": DRAFTED,
        "position": number * len(tokens),
    }
    verified = {
        "device": "target",
        "begin_ms": end_ms - 0.9 * pass_ms,
        "end_ms": end_ms,
        "model_ms": 0.8 * pass_ms,
        "wait_ms": 0.0,
        "cause": "ready",
        "drafted": DRAFTED,
        "accepted": accepted,
        "tokens": len(tokens),
        "rolled_back": number % 2,
        "roll_back": bool(number % 2),
        "decided": [[number + 1, accepted]],
    }
    text = "".join(token["text"] for token in tokens)
    return {
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
        "speculation": {"tokens": list(tokens), "spans": [draft, verified]},
    }


def pairs(number: int) -> list[list[Token]]:
    """Return passes of two tokens each, for an answer."""
    word = {"text": "word ", "origin": "bonus"}
    return [[{"id": 2 * at, **word}, {"id": 2 * at + 1, **word}] for at in range(number)]


def resting(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk of a pass beside a drafter that rests."""
    speculation = chunk["speculation"]
    verified = speculation["spans"][-1]
    none = {"drafted": 0, "accepted": 0, "rolled_back": 0, "roll_back": False, "decided": []}
    spans = [verified | none | {"cause": "resting"}]
    return {**chunk, "speculation": {**speculation, "spans": spans}}


async def events(
    passes: Sequence[Sequence[Token]], pass_ms: float, *, breaks_off: bool, rests: bool
) -> AsyncIterator[bytes]:
    """The stream of an answer, each pass at its time."""
    begun = time.monotonic()
    for read in READ:
        told = {"choices": [], "prompt_progress": {"total": NUM_PROMPT, "processed": read}}
        yield f"data: {json.dumps(told)}\n\n".encode()
    for number, tokens in enumerate(passes):
        wait_s = begun + (number + 1) * pass_ms / 1e3 - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        chunk = chunk_of(number, tokens, pass_ms)
        yield f"data: {json.dumps(resting(chunk) if rests else chunk)}\n\n".encode()
    if breaks_off:
        raise ConnectionError
    yield b"data: [DONE]\n\n"


@contextmanager
def faking(
    passes: Sequence[Sequence[Token]],
    pass_ms: float = 1.0,
    *,
    plain: Sequence[Sequence[Token]] = (),
    nodes: Sequence[dict[str, Any]] | None = None,
    breaks_off: bool = False,
    rests: bool = False,
    has_chat_template: bool = False,
) -> Iterator[str]:
    """Serve the page, with these tokens for an answer; yields the URL.

    plain       the answer by plain decoding
    nodes       what it tells of its nodes
    breaks_off  its connection breaks where the answer should end
    rests       the drafter rests, but for requests with the policy tree
    """

    async def page(request: Request) -> Response:
        return page_file(request.url.path)

    async def answer(request: Request) -> Response:
        asked = (await request.json())["speculative"]
        stream = events(
            passes if asked["enabled"] else plain,
            pass_ms,
            breaks_off=breaks_off,
            rests=not asked["enabled"] or (rests and asked.get("policy") != "tree"),
        )
        return StreamingResponse(stream, media_type="text/event-stream")

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "has_chat_template": has_chat_template}]})

    async def status(_: Request) -> Response:
        counts = dict.fromkeys(("open", "queued", "complete", "cancelled", "failed"), 0)
        return JSONResponse({"hung": False, "nodes": nodes, **counts})

    app = Starlette(
        routes=[
            *(Route(path, page) for path in FILES),
            Route("/v1/completions", answer, methods=["POST"]),
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/models", models),
            Route("/status", status),
        ]
    )
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True
        )
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
