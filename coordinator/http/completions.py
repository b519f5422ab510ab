"""The answer of /v1/completions, whole or as a stream."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from coordinator.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from coordinator.api.token_names import TokenNames
from coordinator.http.answers import legacy_logprobs, speculation_of, usage, usage_of
from coordinator.http.bodies import CompletionBody
from coordinator.http.jobs import Job
from coordinator.http.streams import Counts, progress, with_counts
from coordinator.text.session import EmitRead


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
        begun: set[int] = set()  # places of the choices that have had a chunk
        async with aclosing(self.job.parts()) as parts:
            async for index, output in parts:
                if isinstance(output, EmitRead):
                    yield progress(self._head, output, self.job)
                    continue
                for made in output.outputs:
                    counts.add(made)
                    place = index * self._n + made.index
                    choice = self._choice(index, output, made, is_first=place not in begun)
                    begun.add(place)
                    chunk = {**self._head, "choices": [choice]}
                    yield with_counts(chunk, counts, self._body, made)
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": counts.usage()}

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
        if self._body.echo:
            echo, begins_in_echo = self._echoes[index]
            begins = [len(echo) + begin for begin in begins]
            if is_first:
                text, prompt_ids = echo + text, output.prompt_token_ids
                rows = [*(output.prompt_logprobs or [None] * len(prompt_ids)), *rows]
                ids, begins = [*prompt_ids, *ids], [*begins_in_echo, *begins]
        has_logprobs = self._body.logprobs is not None and bool(ids)
        num_top = self._body.logprobs or 0
        return {
            "index": index * self._n + made.index,
            "text": text,
            "logprobs": legacy_logprobs(rows, ids, begins, self._names, num_top)
            if has_logprobs
            else None,
            "finish_reason": reason,
            "stop_reason": stopped_by,
        }
