"""The answer of /v1/completions, whole or as a stream; its way until then is in `routes.py`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from coordinator.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from coordinator.api.token_names import TokenNames
from coordinator.http.answers import legacy_logprobs, speculation_of, usage, usage_of
from coordinator.http.bodies import CompletionBody
from coordinator.http.jobs import Job
from coordinator.http.streams import Counts, progress, with_counts
from coordinator.text.session_events import EmitRead


class Completions:
    """Makes the answer of /v1/completions to one job, whole or as a stream.

    names   what tokens are called
    echoes  of each prompt that is echoed, its text and where its tokens begin in it; else empty
    """

    def __init__(
        self,
        job: Job,
        body: CompletionBody,
        model: str,
        names: TokenNames,
        echoes: Sequence[tuple[str, list[int]]],
    ) -> None:
        self.job = job
        self._body = body
        self._names = names
        self._echoes = echoes
        self._head = {"id": job.name, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._n = body.n or 1
        self._of_prompts: dict[int, dict[str, Any]] = {}  # by the place of the prompt

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the JSON body of the answer with all texts."""
        choices = [
            self._choice(index, output, made, is_first=True)
            for index, output in enumerate(outputs)
            for made in output.outputs
        ]
        metrics = speculation_of(made.metrics for output in outputs for made in output.outputs)
        counts = usage_of(outputs)
        if self._body.max_tokens == 0:
            counts = usage(counts["prompt_tokens"], 0)
        return {**self._head, "choices": choices, "usage": counts, "metrics": metrics}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of the streamed answer, one for each output; then the usage, if wanted."""
        counts = Counts(self.job)
        async with aclosing(self.job.parts()) as parts:
            async for index, output in parts:
                if isinstance(output, EmitRead):
                    yield progress(self._head, output, self.job)
                    continue
                for made in output.outputs:
                    place = index * self._n + made.index
                    if counts.is_complete(place):
                        continue
                    is_first = not counts.is_begun(place)
                    counts.add(made, place)
                    make = partial(self._choice, index, output, made, is_first=is_first)
                    # A prompt may have a hundred thousand tokens, each with its likeliest ones.
                    has_prompt = is_first and self._body.echo and self._body.logprobs is not None
                    choice = await asyncio.to_thread(make) if has_prompt else make()
                    chunk = {**self._head, "choices": [choice]}
                    yield with_counts(chunk, counts, self._body, made)
        if (last := counts.last(self._head, self._body)) is not None:
            yield last

    def _choice(
        self, index: int, output: RequestOutput, made: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """Return the `choice` of a text or a part; an echoed prompt precedes the first part."""
        text, ids, begins = made.text, list(made.token_ids), list(made.text_offsets or ())
        rows: list[TokenLogprobs | None] = list(made.logprobs or ())
        reason, stopped_by = made.finish_reason, made.stop_reason
        if self._body.max_tokens == 0:  # one was written, because a text has at least one
            text, ids, rows, begins, stopped_by = "", [], [], [], None
            reason = "length" if reason == "stop" else reason
        echoed = None
        if self._body.echo:
            echo, _ = self._echoes[index]
            begins = [len(echo) + begin for begin in begins]
            if is_first:
                text, echoed = echo + text, self._echoed(index, output)
        logprobs = None
        if self._body.logprobs is not None and (ids or echoed):
            logprobs = legacy_logprobs(rows, ids, begins, self._names, self._body.logprobs)
            if echoed:
                logprobs = {name: echoed[name] + part for name, part in logprobs.items()}
        choice: dict[str, Any] = {
            "index": index * self._n + made.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stopped_by,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return choice

    def _echoed(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """Return the `logprobs` of an echoed prompt; the texts that continue it share them."""
        if self._body.logprobs is None:
            return None
        if index not in self._of_prompts:
            ids, (_, begins) = output.prompt_token_ids, self._echoes[index]
            rows = output.prompt_logprobs or [None] * len(ids)
            made = legacy_logprobs(rows, ids, begins, self._names, self._body.logprobs)
            self._of_prompts[index] = made
        return self._of_prompts[index]
