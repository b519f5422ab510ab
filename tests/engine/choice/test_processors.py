"""Logits processors against a version that looks at the whole text every time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.choice.processors import MAX_TEXTS, Path, Processors, ProcessorsByText
from engine.choice.sampling import Floats

VOCAB = 12
tokens = st.integers(0, VOCAB + 2)  # some are not in the vocabulary: a longer padded tail


@dataclass(frozen=True)
class Shape:
    """Settings."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    late_ids: tuple[int, ...] = ()
    grammar: str = ""
    end_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] = ()


def dumb(shape: Shape, prompt: Sequence[int], made: Sequence[int], row: Floats) -> list[float]:
    """The row after `prompt` and `made`, one token after another."""
    changed = []
    known = [token for token in shape.allowed_ids if token < len(row)]
    row = np.where(np.isin(np.arange(len(row)), known) | (not known), row, -np.inf)
    for token, logit in enumerate(row.tolist()):
        for ids in shape.banned:
            before = tuple(made[len(made) - len(ids) + 1 :]) if len(ids) > 1 else ()
            if ids[-1] == token and ids[:-1] == before:
                logit = -math.inf
        if token in shape.late_ids and len(made) < shape.min_tokens:
            logit = -math.inf
        for i, value in zip(shape.bias_ids, shape.bias_values, strict=True):
            logit += value * (i == token)
        if token in (*prompt, *made):
            factor = shape.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        count = made.count(token)
        logit -= shape.frequency_penalty * count + shape.presence_penalty * (count > 0)
        changed.append(logit)
    return row.tolist() if all(math.isinf(logit) for logit in changed) else changed


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    bias = draw(st.dictionaries(tokens, st.floats(-5, 5), max_size=3))
    ids = st.lists(tokens, min_size=1, max_size=3).map(tuple)
    return Shape(
        draw(st.sampled_from([1.0, 0.5, 1.3])),
        draw(st.sampled_from([0.0, 0.7, -1.0])),
        draw(st.sampled_from([0.0, 0.3, -0.5])),
        tuple(bias),
        tuple(bias.values()),
        tuple(draw(st.lists(ids, max_size=4))),
        draw(st.integers(0, 4)),
        tuple(draw(st.lists(tokens, max_size=3))),
        allowed_ids=tuple(draw(st.one_of(st.just([]), st.lists(tokens, max_size=6)))),
    )


@given(
    shapes(),
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(st.tuples(st.lists(tokens, max_size=4), st.integers(0, 4)), max_size=5),
)
def test_every_row_is_that_of_the_dumb_version_however_it_was_drafted(
    shape: Shape, prompt: list[int], passes: list[tuple[list[int], int]]
) -> None:
    """Each pass drafts some tokens, asks at every row, and commits some of them."""
    text = list(prompt)
    processors = Processors(shape, text, len(prompt), VOCAB)
    generator = torch.Generator().manual_seed(len(passes))
    for drafts, num_committed in passes:
        logits = torch.randn(len(drafts) + 1, VOCAB, generator=generator)
        before = logits.clone()
        paths = [tuple(drafts[:i]) for i in range(len(drafts) + 1)]
        got = processors.apply(logits, paths).numpy()
        assert torch.equal(logits, before)
        for path, row, changed in zip(paths, logits.numpy(), got, strict=True):
            want = dumb(shape, prompt, [*text[len(prompt) :], *path], row)
            np.testing.assert_allclose(changed, want, rtol=1e-5, atol=1e-6)
        there = processors.apply_there(logits, [Path(text, len(prompt), path) for path in paths])
        assert torch.equal(logits, before)
        assert np.array_equal(there.numpy(), got)
        text += drafts[:num_committed]


@given(shapes(), st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6))
def test_a_row_has_the_same_bits_whether_its_text_was_committed_or_drafted(
    shape: Shape, prompt: list[int], made: list[int]
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(len(made)))
    rows = [
        Processors(shape, [*prompt, *made[:split]], len(prompt), VOCAB)
        .apply(logits, [tuple(made[split:])])
        .numpy()
        for split in range(len(made) + 1)
    ]
    assert all(np.array_equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, ()), (1, (9,)), (2, (8, 9)), (3, (7, 8, 9)), (9, (6, 7, 8, 9))]
)
def test_the_last_generated_tokens_end_at_the_prompt(count: int, expected: tuple[int, ...]) -> None:
    path = Path([1, 2, 3, 6, 7], 3, (8, 9))
    assert path.last_generated(count) == expected
    assert path.num_generated == 4


def test_a_ban_that_leaves_nothing_is_not_obeyed() -> None:
    banned = tuple((token,) for token in range(VOCAB))
    logits = torch.randn(1, VOCAB)
    assert torch.equal(Processors(Shape(banned=banned), [1], 1, VOCAB).apply(logits, [()]), logits)


@dataclass(frozen=True)
class Opened:
    """One life of a text."""

    session: int
    num_prompt: int = 1
    sampling: Shape = Shape(presence_penalty=1.0)


def test_a_text_keeps_its_processors_for_one_life_beside_those_of_others() -> None:
    by_text = ProcessorsByText()
    first, second = Opened(1), Opened(2)
    made = by_text.of(first, [1], VOCAB)
    other = by_text.of(second, [2], VOCAB)
    assert made is not other
    assert by_text.of(first, [1], VOCAB) is made
    assert by_text.of(second, [2], VOCAB) is other
    again = Opened(1)  # the same text, opened anew: its committed tokens may be others
    assert by_text.of(again, [1, 5], VOCAB) is not made
    assert by_text.of(second, [2], VOCAB) is other


def test_each_text_counts_its_own_tokens() -> None:
    by_text = ProcessorsByText()
    logits = torch.zeros(1, VOCAB)
    for session, token in ((1, 5), (2, 7), (1, 5)):
        processors = by_text.of(Opened(session), [0, token], VOCAB)
        row = processors.apply(logits, [()])[0]
        assert row.nonzero().flatten().tolist() == [token]


def test_of_so_many_texts_those_that_were_computed_last_are_kept() -> None:
    by_text = ProcessorsByText()
    texts = [Opened(session) for session in range(MAX_TEXTS + 1)]
    made = [by_text.of(opened, [1], VOCAB) for opened in texts[:-1]]
    assert by_text.of(texts[0], [1], VOCAB) is made[0]
    by_text.of(texts[-1], [1], VOCAB)
    assert by_text.of(texts[0], [1], VOCAB) is made[0]
    assert by_text.of(texts[1], [1], VOCAB) is not made[1]
