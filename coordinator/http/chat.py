"""The answer of /v1/chat/completions, whole or as a stream."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.api.token_names import TokenNames
from coordinator.http.answers import chat_logprobs, speculation_of, usage_of
from coordinator.http.bodies import ChatBody
from coordinator.http.call_stream import AnswerStream
from coordinator.http.jobs import Job
from coordinator.http.streams import Counts, progress, with_counts
from coordinator.text.session_events import EmitRead


class Chat:
    """Makes the answer of /v1/chat/completions to one job, whole or as a stream."""

    def __init__(self, job: Job, body: ChatBody, model: str, names: TokenNames) -> None:
        (request,) = job.requests
        self._thoughts = request.thoughts
        self._hidden = () if body.skip_special_tokens is False else request.shown
        self.job = job
        self._body = body
        self._names = names
        self._tools = body.asked_tools()
        self._head = {"id": job.name, "created": int(time.time()), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the JSON body of the answer with all texts."""
        (output,) = outputs
        choices = [self._choice(made) for made in output.outputs]
        metrics = speculation_of(made.metrics for made in output.outputs)
        head = {**self._head, "object": "chat.completion", **self._prompt_ids(output)}
        return {**head, "choices": choices, "usage": usage_of(outputs), "metrics": metrics}

    def _prompt_ids(self, output: RequestOutput) -> dict[str, Any]:
        """Return the field with the prompt's token ids, if they are wanted."""
        wanted = self._body.return_token_ids
        return {"prompt_token_ids": output.prompt_token_ids} if wanted else {}

    def _ids(self, made: CompletionOutput) -> dict[str, Any]:
        """Return the field with the token ids of a text or a part, if they are wanted."""
        return {"token_ids": list(made.token_ids)} if self._body.return_token_ids else {}

    def _choice(self, made: CompletionOutput) -> dict[str, Any]:
        """Return the `choice` of one whole text, with the calls that it makes."""
        stream = self._stream()
        return {
            "index": made.index,
            "message": stream.message(made.text),
            "logprobs": self._logprobs(made),
            "finish_reason": _reason(made, has_calls=stream.has_calls),
            "stop_reason": made.stop_reason,
            **self._ids(made),
        }

    def _stream(self, told: str = "") -> AnswerStream:
        """Return what makes deltas of an answer, behind text that was told elsewhere."""
        stream = AnswerStream(
            self._tools,
            self._thoughts,
            hidden=self._hidden,
            tells_thoughts=self._body.include_reasoning is not False,
        )
        if told:
            stream.delta(told, is_last=False)
        return stream

    def _logprobs(self, made: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(made, self._names, self._body.top_logprobs or 0)

    def _begun(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a text, which says whose it is."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice]}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of the streamed answer: for each text its role, then one for each output."""
        counts = Counts(self.job)
        head = {**self._head, "object": "chat.completion.chunk"}
        streams: dict[int, AnswerStream] = {}
        async with aclosing(self.job.parts()) as parts:
            async for _, output in parts:
                if isinstance(output, EmitRead):
                    yield progress(head, output, self.job)
                    continue
                for made in output.outputs:
                    if counts.is_complete(made.index):
                        continue
                    if made.index not in streams:
                        (request,) = self.job.requests
                        streams[made.index] = self._stream(request.resumed_text(made.index))
                        if not counts.is_begun(made.index):
                            counts.begin(made.index)
                            begun = self._begun(made.index)
                            yield counts.named({**head, **begun, **self._prompt_ids(output)})
                    counts.add(made, made.index)
                    stream, is_last = streams[made.index], made.finish_reason is not None
                    is_empty = not (made.text or made.token_ids or is_last)
                    choice = {
                        "index": made.index,
                        "delta": {} if is_empty else stream.delta(made.text, is_last=is_last),
                        "logprobs": self._logprobs(made) if made.logprobs else None,
                        "finish_reason": _reason(made, has_calls=stream.has_calls),
                        "stop_reason": made.stop_reason,
                        **self._ids(made),
                    }
                    yield with_counts({**head, "choices": [choice]}, counts, self._body, made)
        if (last := counts.last(head, self._body)) is not None:
            yield last


def _reason(made: CompletionOutput, *, has_calls: bool) -> str | None:
    """Return the finish reason of a text; one that ended by itself with calls has its own."""
    is_call = has_calls and made.finish_reason == "stop"
    return "tool_calls" if is_call else made.finish_reason
