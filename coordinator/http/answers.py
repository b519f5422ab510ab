"""What OpenAI's API answers, made of what `AsyncLLM` gives (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

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


class Names(Protocol):
    """What tokens are called, and which bytes they are (`TokenNames`)."""

    def name(self, token: int) -> str:
        """Return the token's text; `bytes:` and its bytes where these are no whole characters."""

    def said(self, token: int) -> bytes:
        """Return the bytes of a token."""


def legacy_logprobs(
    rows: Sequence[TokenLogprobs | None],
    tokens: Sequence[int],
    begins: Sequence[int],
    names: Names,
    num_top: int,
) -> dict[str, Any]:
    """Return the `logprobs` of /v1/completions for some tokens of a text.

    rows     log-probabilities of each token; None if unknown, as for the first token of a prompt
    begins   where each token begins in the text, in characters
    num_top  likeliest tokens of each place that are named
    """
    return {
        "tokens": [names.name(token) for token in tokens],
        "token_logprobs": [
            None if row is None else _finite(row[token].logprob)
            for row, token in zip(rows, tokens, strict=True)
        ],
        "top_logprobs": [
            None if row is None else _top(row, token, names, num_top)
            for row, token in zip(rows, tokens, strict=True)
        ],
        "text_offset": list(begins),
    }


def _top(row: TokenLogprobs, token: int, names: Names, num_top: int) -> dict[str, float]:
    """Return the likeliest tokens by name, and the token itself.

    Of several with one name the likeliest has it, but the token of the text before all others.
    """
    found: dict[str, float] = {}
    for id_, one in _likeliest(row, num_top):
        found.setdefault(names.name(id_), _finite(one.logprob))
    return found | {names.name(token): _finite(row[token].logprob)}


def _likeliest(row: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda item: item[1].rank)[:num_top]


def chat_logprobs(made: CompletionOutput, names: Names, num_top: int) -> dict[str, Any]:
    """Return the `logprobs` of /v1/chat/completions, with `num_top` alternatives for each token."""
    content = []
    for row, token in zip(made.logprobs or (), made.token_ids, strict=True):
        top = [_named(id_, one, names) for id_, one in _likeliest(row, num_top)]
        content.append(_named(token, row[token], names) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _named(token: int, one: Logprob, names: Names) -> dict[str, Any]:
    return {
        "token": names.name(token),
        "logprob": _finite(one.logprob),
        "bytes": list(names.said(token)),
    }


def _finite(value: float) -> float:
    """Return the value, at least -9999: JSON has no infinity, and OpenAI writes this number."""
    return max(value, -9999.0)
