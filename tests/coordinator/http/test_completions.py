"""What /v1/completions answers with logprobs, for any tokens, whole and as a stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.outputs import Assembly, RequestOutput
from coordinator.api.token_names import TokenNames
from coordinator.http.bodies import CompletionBody
from coordinator.http.completions import Completions
from coordinator.http.told import Told
from coordinator.text.detokenization import Ending
from coordinator.text.session_events import Emit
from proto.sampling import Logprobs
from tests.coordinator.api.test_token_names import MADE, ids_of, in_bytes
from tests.coordinator.text.test_stops import METRICS


def row_of(token: int, others: Sequence[int], values: Sequence[float]) -> Logprobs:
    """The token, which is less likely than all others, and these."""
    ids = (token, *others)
    return Logprobs(ids, (-9.0, *values), (len(ids),))


def outputs_of(
    kind: str, prompt: Sequence[int], passes: Sequence[Sequence[int]], stop: str
) -> tuple[RequestOutput, list[RequestOutput]]:
    """A text that comes in passes: whole, and in parts."""
    ending = Ending((stop,) if stop else ())
    assembly = Assembly(None, prompt, 0, MADE[kind].stream(prompt), ending=ending)
    others = in_bytes(kind, b"\n\xf0")
    parts = []
    if len(prompt) > 1:
        rows = [row_of(token, others, (-1.0, -2.0)) for token in prompt[1:]]
        assembly.scored(sum(rows, Logprobs()))
    for tokens in passes:
        rows = [row_of(token, others, (-1.0, -2.0)) for token in tokens]
        emit = Emit(tuple(tokens), 0, 0, (), logprobs=sum(rows, Logprobs()))
        parts.append(assembly.push(emit))
        if assembly.is_stopped:
            break
    parts.append(assembly.finish("length", METRICS))
    return assembly.whole(), parts


def answered(
    kind: str, whole: RequestOutput, parts: Sequence[RequestOutput], body: CompletionBody
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of the whole answer, and that of the stream, its chunks put together."""

    async def come() -> AsyncIterator[tuple[int, RequestOutput]]:
        for part in parts:
            yield 0, part

    names = TokenNames(MADE[kind])
    request = SimpleNamespace(prompt_ids=whole.prompt_token_ids)
    told = Told.nothing(1)
    job: Any = SimpleNamespace(name="job", requests=[request], parts=come, told=told, is_kept=False)
    echoes = [names.echo(None, whole.prompt_token_ids)] if body.echo else []
    answer = Completions(job, body, "model", names, echoes)

    async def streamed() -> list[dict[str, Any]]:
        return [choice async for chunk in answer.events() for choice in chunk["choices"]]

    (choice,) = answer.whole([whole])["choices"]
    chunks = asyncio.run(streamed())
    joined: dict[str, Any] = {"text": "", "logprobs": {}}
    for chunk in chunks:
        joined["text"] += chunk["text"]
        for name, values in (chunk["logprobs"] or {}).items():
            joined["logprobs"].setdefault(name, []).extend(values)
    return choice, joined


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma", "wordpiece"])
@given(data=st.data())
def test_any_tokens_have_their_places_and_numbers_whole_and_as_a_stream(
    kind: str, data: st.DataObject, *, echo: bool
) -> None:
    prompt = data.draw(ids_of(kind).filter(bool))
    passes = data.draw(st.lists(ids_of(kind).filter(bool), max_size=4))
    stop = data.draw(st.sampled_from(["", "", "the", "🚲", "\n"]))
    num_top = data.draw(st.integers(0, 2))
    body = CompletionBody(prompt=prompt, echo=echo, logprobs=num_top)
    whole, parts = outputs_of(kind, prompt, passes, stop)
    choice, streamed = answered(kind, whole, parts, body)
    text, scored = choice["text"], choice["logprobs"] or {}
    assert streamed == {"text": text, "logprobs": scored}
    if not scored:
        return
    assert len({len(values) for values in scored.values()}) == 1
    offsets = scored["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    cut = [text[begin:end] for begin, end in pairwise([*offsets, max(len(text), offsets[-1])])]
    assert "".join(cut) == text
    rows = zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True)
    for token, value, top in rows:
        assert top is None or (top[token] == value and len(top) <= num_top + 1)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_without_a_word_written_the_echo_alone_has_logprobs(kind: str) -> None:
    prompt = in_bytes(kind, "a\n🚲".encode()) or [1]
    whole, parts = outputs_of(kind, prompt, [in_bytes(kind, b"\n")], "")
    body = CompletionBody(prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    choice, streamed = answered(kind, whole, parts, body)
    assert streamed == {"text": choice["text"], "logprobs": choice["logprobs"]}
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert choice["text"].endswith("\n🚲")
