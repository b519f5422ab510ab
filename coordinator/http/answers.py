"""What OpenAI's API answers, made of what `AsyncLLM` gives (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from coordinator.api.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from coordinator.text.metrics import Metrics

REASONS = {"error": "error", "abort": "abort"}  # besides OpenAI's own "stop" and "length"


def usage(num_prompt: int, num_written: int) -> dict[str, int]:
    """How many tokens were read and written."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """The same for whole requests: a prompt counts once, however many texts continue it."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(made.token_ids) for output in outputs for made in output.outputs),
    )


def speculation_of(texts: Iterable[Metrics | None]) -> dict[str, Any] | None:
    """The field `metrics` as benchmark clients of vLLM read it; of the first text that has it."""
    for metrics in texts:
        if metrics is not None and metrics.speculative_decoding is not None:
            return {"speculative_decoding": asdict(metrics.speculative_decoding)}
    return None


class LegacyLogprobs:
    """The `logprobs` of /v1/completions, piece by piece: tokens, their chances, where they start.

    num_top  likeliest tokens of each place that are named
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def of(
        self, rows: Sequence[TokenLogprobs | None], tokens: Sequence[int], names: Sequence[str]
    ) -> dict[str, Any]:
        """Of the next tokens. A row is None where nothing is known: the first token of a prompt."""
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
    """The `logprobs` of /v1/chat/completions."""
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
    """JSON has no infinity; this is what OpenAI writes for a token that cannot come."""
    return max(value, -9999.0)
