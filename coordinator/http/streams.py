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

EVENT_ID = "event id"  # field of a chunk that becomes the `id` of its event
MANY_TOKENS = 256  # with their log-probabilities in one chunk


class Counts:
    """Counts the tokens of one streamed answer so far, and what its client was told."""

    def __init__(self, job: Job) -> None:
        self._num_prompt = sum(len(request.prompt_ids) for request in job.requests)
        self._told = job.told
        self._names_events = job.is_kept

    def is_begun(self, place: int) -> bool:
        """True if the client has had a chunk of this choice, here or elsewhere."""
        return place in self._told.begun

    def is_complete(self, place: int) -> bool:
        """True if the client was told that this choice has ended."""
        return place in self._told.complete

    def begin(self, place: int) -> None:
        """Note that a choice has begun, of which no token was told."""
        self._told.add(place, 0, is_last=False)

    def add(self, made: CompletionOutput, place: int) -> None:
        """Add a part of a text, which is the choice at this place."""
        is_last = made.finish_reason is not None
        self._told.add(place, len(made.token_ids), is_last=is_last)

    def named(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the id of the event that this chunk becomes, where answers are kept."""
        return {**chunk, EVENT_ID: self._told.event_id} if self._names_events else chunk

    def last(self, head: dict[str, Any], body: Common) -> dict[str, Any] | None:
        """Return the chunk with the usage of the answer; None: it is not wanted, or was told."""
        is_wanted = body.stream_options is not None and body.stream_options.include_usage
        if not is_wanted or self._told.has_usage:
            return None
        self._told.has_usage = True
        return self.named({**head, "choices": [], "usage": self.usage()})

    def usage(self) -> dict[str, int]:
        """Return the field `usage` of OpenAI's API for the tokens so far."""
        return usage(self._num_prompt, sum(self._told.tokens))


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
    return counts.named(chunk)


def progress(head: dict[str, Any], read: EmitRead, job: Job) -> dict[str, Any]:
    """Return the chunk that says how far a prompt was read, as llama.cpp's server has it."""
    told = {"total": read.num_prompt, "processed": read.num_read}
    told["time_ms"] = round((time.monotonic() - job.begun) * 1e3)
    return {**head, "choices": [], "prompt_progress": told}


async def event_stream(
    first: dict[str, Any] | None, events: AsyncGenerator[dict[str, Any], None]
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
        if first is not None:
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
    event_id = event.pop(EVENT_ID, "")
    name = f"id: {event_id}\n".encode() if event_id else b""
    found = [choice.get("logprobs") for choice in event.get("choices", ())]
    if any(one and len(one.get("tokens", ())) > MANY_TOKENS for one in found):
        return name + b"data: " + await asyncio.to_thread(json_bytes, event) + b"\n\n"
    return name + event_bytes(event)


def event_bytes(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
