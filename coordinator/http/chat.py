"""The answer of /v1/chat/completions, whole or as a stream."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.http.answers import chat_logprobs, speculation_of, usage_of
from coordinator.http.bodies import ChatBody
from coordinator.http.jobs import Job
from coordinator.http.streams import Counts, with_counts


class Chat:
    """Makes the answer of /v1/chat/completions to one job, whole or as a stream."""

    def __init__(self, job: Job, body: ChatBody, model: str) -> None:
        self.job = job
        self._body = body
        self._head = {"id": job.name, "created": int(time.time()), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the JSON body of the answer with all texts."""
        (output,) = outputs
        choices = [
            {
                "index": made.index,
                "message": {"role": "assistant", "content": made.text, "refusal": None},
                "logprobs": self._logprobs(made),
                "finish_reason": made.finish_reason,
                "stop_reason": made.stop_reason,
            }
            for made in output.outputs
        ]
        metrics = speculation_of(made.metrics for made in output.outputs)
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage_of(outputs), "metrics": metrics}

    def _logprobs(self, made: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(made, self._body.top_logprobs or 0)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of the streamed answer: for each text its role, then one for each output."""
        counts = Counts(self.job)
        head = {**self._head, "object": "chat.completion.chunk"}
        spoken: set[int] = set()
        async with aclosing(self.job.parts()) as parts:
            async for _, output in parts:
                for made in output.outputs:
                    if made.index not in spoken:
                        spoken.add(made.index)
                        delta: dict[str, Any] = {"role": "assistant", "content": ""}
                        choice = {"index": made.index, "delta": delta, "finish_reason": None}
                        yield {**head, "choices": [choice | {"logprobs": None}]}
                    counts.add(made)
                    choice = {
                        "index": made.index,
                        "delta": {"content": made.text} if made.text or made.token_ids else {},
                        "logprobs": self._logprobs(made) if made.logprobs else None,
                        "finish_reason": made.finish_reason,
                        "stop_reason": made.stop_reason,
                    }
                    yield with_counts({**head, "choices": [choice]}, counts, self._body, made)
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": counts.usage()}
