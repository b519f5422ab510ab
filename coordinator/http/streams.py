"""Server-sent events, and what a streamed answer reports besides its text."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from coordinator.api.outputs import CompletionOutput
from coordinator.http.answers import events_of, speculation_of, usage
from coordinator.http.bodies import Common
from coordinator.http.errors import Refusal, RefusedRequestError, refusal_of
from coordinator.http.jobs import Job
from coordinator.http.large import json_bytes
from coordinator.text.session_events import EmitRead
from proto.errors import SlipstreamError

MANY_TOKENS = 256  # with their log-probabilities in one chunk


class Counts:
    """Counts the tokens of one streamed answer so far."""

    def __init__(self, job: Job) -> None:
        self._num_prompt = sum(len(request.prompt_ids) for request in job.requests)
        self._num_written = sum(request.num_resumed for request in job.requests)

    def add(self, made: CompletionOutput) -> None:
        """Add the tokens of a part of a text."""
        self._num_written += len(made.token_ids)

    def usage(self) -> dict[str, int]:
        """Return the field `usage` of OpenAI's API for the tokens so far."""
        return usage(self._num_prompt, self._num_written)


def with_counts(
    chunk: dict[str, Any], counts: Counts, body: Common, made: CompletionOutput
) -> dict[str, Any]:
    """Add usage (if wanted), the text's metrics (at its end) and its error; return the chunk.

    It also gets what is told of the speculation, if the request asked for events.
    """
    if body.stream_options and body.stream_options.include_usage:
        continuous = body.stream_options.continuous_usage_stats
        chunk["usage"] = counts.usage() if continuous else None
    if made.finish_reason is not None and (found := speculation_of([made.metrics])):
        chunk["metrics"] = found
    if made.speculation is not None:
        chunk["speculation"] = events_of(made.speculation)
    if made.error is not None:
        chunk["error"] = Refusal(500, made.error).as_json()["error"]
    return chunk


def progress(head: dict[str, Any], read: EmitRead, job: Job) -> dict[str, Any]:
    """Return the chunk that says how far a prompt was read, as llama.cpp's server has it."""
    told = {"total": read.num_prompt, "processed": read.num_read}
    told["time_ms"] = round((time.monotonic() - job.begun) * 1e3)
    return {**head, "choices": [], "prompt_progress": told}


async def event_stream(
    first: dict[str, Any], events: AsyncGenerator[dict[str, Any], None]
) -> AsyncIterator[bytes]:
    """Yield server-sent events; texts are read as they come, however slowly the client reads.

    The last one is `[DONE]`, also after an error; but where the server or its pair ends (status
    503) it is the error: the answer is to be asked for again.
    """
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read() -> bool:
        """Read all events; return False if what came last was that the server ends."""
        try:
            async for event in events:
                waiting.put_nowait(await _written(event))
        except SlipstreamError as error:
            refusal = refusal_of(error)
            waiting.put_nowait(event_bytes(refusal.as_event()))
            return refusal.status != 503
        except RefusedRequestError as error:
            waiting.put_nowait(event_bytes(error.refusal.as_event()))
        finally:
            waiting.put_nowait(None)
        return True

    reading = asyncio.create_task(read())
    try:
        yield await _written(first)
        while (event := await waiting.get()) is not None:
            yield event
        # Raises what is no error of ours: such a stream breaks off, and is not done.
        if await reading:
            yield b"data: [DONE]\n\n"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()


async def _written(event: dict[str, Any]) -> bytes:
    """Return a chunk as it is sent; one with the log-probabilities of a prompt is made apart."""
    found = [choice.get("logprobs") for choice in event.get("choices", ())]
    if any(one and len(one.get("tokens", ())) > MANY_TOKENS for one in found):
        return b"data: " + await asyncio.to_thread(json_bytes, event) + b"\n\n"
    return event_bytes(event)


def event_bytes(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
