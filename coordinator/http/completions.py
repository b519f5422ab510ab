"""The answer of /v1/completions, whole or as a stream."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.http.answers import LegacyLogprobs, speculation_of, usage, usage_of
from coordinator.http.bodies import CompletionBody
from coordinator.http.jobs import Job
from coordinator.http.streams import Counts, with_counts


class Completions:
    """The answer of /v1/completions."""

    def __init__(
        self,
        job: Job,
        body: CompletionBody,
        model: str,
        names: Callable[[Sequence[int]], list[str]],
    ) -> None:
        self.job = job
        self._body = body
        self._names = names
        self._head = {"id": job.name, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._n = body.n or 1

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All texts."""
        choices = [
            self._choice(index, output, made)
            for index, output in enumerate(outputs)
            for made in output.outputs
        ]
        metrics = speculation_of(made.metrics for output in outputs for made in output.outputs)
        counts = usage_of(outputs)
        if self._body.max_tokens == 0:
            counts = usage(counts["prompt_tokens"], 0)
        return {**self._head, "choices": choices, "usage": counts, "metrics": metrics}

    def _choice(self, index: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        text, reason, stopped_by = made.text, made.finish_reason, made.stop_reason
        rows: list[Any] = list(made.logprobs or ())
        tokens, names = list(made.token_ids), []
        if self._body.max_tokens == 0:  # one was written, because a text has at least one
            text, reason, stopped_by, rows, tokens = "", "length", None, [], []
        if self._body.logprobs is not None:
            names = [row[token].decoded_token for row, token in zip(rows, tokens, strict=True)]
        if self._body.echo:
            prompt = output.prompt
            ids = output.prompt_token_ids
            prompt_names = (
                self._names(ids) if prompt is None or rows or output.prompt_logprobs else []
            )
            text = ("".join(prompt_names) if prompt is None else prompt) + text
            if self._body.logprobs is not None:
                rows = [*(output.prompt_logprobs or [None]), *rows]
                tokens, names = [*ids, *tokens], [*prompt_names, *names]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = LegacyLogprobs(self._body.logprobs).of(rows, tokens, names)
        return {
            "index": index * self._n + made.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stopped_by,
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk for each pass that adds something, and one for the end of each text."""
        counts = Counts(self.job)
        logprobs: dict[int, LegacyLogprobs] = {}
        async with aclosing(self.job.parts()) as parts:
            async for index, output in parts:
                for made in output.outputs:
                    counts.add(made)
                    place = index * self._n + made.index
                    is_first = place not in logprobs
                    legacy = logprobs.setdefault(place, LegacyLogprobs(self._body.logprobs or 0))
                    choice = self._delta(place, output, made, legacy, is_first=is_first)
                    chunk = {**self._head, "choices": [choice]}
                    yield with_counts(chunk, counts, self._body, made)
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": counts.usage()}

    def _delta(
        self,
        place: int,
        output: RequestOutput,
        made: CompletionOutput,
        legacy: LegacyLogprobs,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        text, rows, tokens = made.text, list(made.logprobs or ()), made.token_ids
        if self._body.max_tokens == 0:
            text, rows, tokens = "", [], []
        all_rows: list[Any] = list(rows)
        ids = list(tokens)
        names = [row[token].decoded_token for row, token in zip(rows, tokens, strict=False)]
        if is_first and self._body.echo:
            prompt_names = self._names(output.prompt_token_ids)
            text = ("".join(prompt_names) if output.prompt is None else output.prompt) + text
            all_rows = [*(output.prompt_logprobs or [None]), *rows]
            ids, names = [*output.prompt_token_ids, *ids], [*prompt_names, *names]
        logprobs = None
        if self._body.logprobs is not None and ids:
            logprobs = legacy.of(all_rows, ids, names)
        return {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": made.finish_reason,
            "stop_reason": made.stop_reason,
        }
