"""What OpenAI's API answers, made of what `AsyncLLM` gives (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from coordinator.api.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from coordinator.api.speculation import ShownToken, SpeculationPart
from coordinator.text.metrics import Metrics, source_name
from coordinator.text.watching import DeviceSpan, DraftSpan


def usage(num_prompt: int, num_written: int) -> dict[str, int]:
    """Return the field `usage` of an answer: the numbers of prompt tokens and written tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Return `usage` for whole requests; a prompt counts once, however many texts continue it."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(made.token_ids) for output in outputs for made in output.outputs),
    )


def speculation_of(texts: Iterable[Metrics | None]) -> dict[str, Any] | None:
    """Return the field `metrics` (vLLM's name) of the first text that has it; None: no text."""
    for metrics in texts:
        if metrics is not None and metrics.speculative_decoding is not None:
            return {"speculative_decoding": asdict(metrics.speculative_decoding)}
    return None


def events_of(part: SpeculationPart) -> dict[str, Any]:
    """Return the field `speculation` of a chunk: its tokens, and the spans of both devices."""
    return {
        "tokens": [_token(token) for token in part.tokens],
        "spans": [_span(span) for span in part.spans],
    }


def _token(token: ShownToken) -> dict[str, Any]:
    made = {"id": token.token_id, "text": token.text, "origin": token.origin}
    return made | {"rejected": token.rejected} if token.rejected else made


def _span(span: DeviceSpan) -> dict[str, Any]:
    """Return a span as JSON. Times in milliseconds since the text began, to the microsecond."""
    times = {"begin_ms": _ms(span.begin_s), "end_ms": _ms(span.end_s)}
    if isinstance(span, DraftSpan):
        return {
            "device": "drafter",
            **times,
            "source": source_name(span.source),
            "number": span.number,
            "steps": span.num_steps,
            "tokens": span.num_tokens,
            "depth": span.depth,
            "position": span.position,
        }
    return {
        "device": "target",
        **times,
        "model_ms": _ms(span.model_s),
        "wait_ms": _ms(span.wait_s),
        "cause": span.cause,
        "drafted": span.num_drafted,
        "accepted": span.num_accepted,
        "tokens": span.num_tokens,
        "rolled_back": span.num_rolled_back,
        "roll_back": span.is_roll_back,
        "decided": [list(one) for one in span.decided],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class LegacyLogprobs:
    """Makes the `logprobs` of /v1/completions for a text that comes in parts.

    A part has its tokens, their log-probabilities, and where each begins in the text (characters).

    num_top  likeliest tokens of each place that are named
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def of(
        self, rows: Sequence[TokenLogprobs | None], tokens: Sequence[int], names: Sequence[str]
    ) -> dict[str, Any]:
        """Return `logprobs` for the next tokens of the text, and count their characters.

        rows    log-probabilities of each token; None if unknown, as for the first token of a prompt
        names   the tokens as text
        """
        made: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for row, token, name in zip(rows, tokens, names, strict=True):
            made["tokens"].append(name)
            made["text_offset"].append(self._offset)
            self._offset += len(name)
            made["token_logprobs"].append(None if row is None else _finite(row[token].logprob))
            made["top_logprobs"].append(None if row is None else self._top(row, token))
        return made

    def _top(self, row: TokenLogprobs, token: int) -> dict[str, float]:
        likely = sorted(row.values(), key=lambda one: one.rank)[: self._num_top]
        found = {one.decoded_token: _finite(one.logprob) for one in likely}
        found.setdefault(row[token].decoded_token, _finite(row[token].logprob))
        return found


def chat_logprobs(made: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Return the `logprobs` of /v1/chat/completions, with `num_top` alternatives for each token."""
    content = []
    for row, token in zip(made.logprobs or (), made.token_ids, strict=True):
        likely = sorted(row.values(), key=lambda one: one.rank)[:num_top]
        content.append(_named(row[token]) | {"top_logprobs": [_named(one) for one in likely]})
    return {"content": content, "refusal": None}


def _named(one: Logprob) -> dict[str, Any]:
    return {
        "token": one.decoded_token,
        "logprob": _finite(one.logprob),
        "bytes": list(one.decoded_token.encode()),
    }


def _finite(value: float) -> float:
    """Return the value, at least -9999: JSON has no infinity, and OpenAI writes this number."""
    return max(value, -9999.0)
