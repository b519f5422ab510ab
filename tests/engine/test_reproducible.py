"""Reproducible mode: a row's bits depend on its path alone."""

import random
from typing import Any

import pytest
import torch

from engine.device import cpu_is_fast_in
from engine.errors import ModelError
from engine.forward.forward import Output, Spans
from engine.layout.slots import Feed, SlotMap
from engine.model_executor import ModelExecutor
from engine.selfcheck import check_reproducible, check_slot_attention
from tests.engine.conftest import Load

NUM_ROWS = 8
DTYPES = ["float32", "bfloat16"]


def executor_for(load: Load, architecture: str, dtype: str) -> ModelExecutor:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic, so nothing is promised for it")
    return ModelExecutor(load(architecture, dtype), 200, fixed_rows=NUM_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "falcon"])
def test_the_self_checks_pass(architecture: str, dtype: str, load: Load) -> None:
    executor = executor_for(load, architecture, dtype)
    check_slot_attention(executor)
    check_reproducible(executor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_however_a_text_is_cut_into_passes_its_logits_have_the_same_bits(
    dtype: str, load: Load
) -> None:
    executor = executor_for(load, "llama", dtype)
    executor.set_total(200)
    draw = random.Random(5)
    text = [draw.randrange(199) for _ in range(60)]

    def logits(max_rows: int) -> torch.Tensor:
        slots: SlotMap[int] = SlotMap(200)
        executor.run(slots.feed_prefix(text[:20]), ())
        rows = []
        while slots.prefix_len < len(text):
            count = draw.randint(1, max_rows)
            feed = slots.feed(text[slots.prefix_len : slots.prefix_len + count])
            rows.append(executor.run(feed, range(len(feed.tokens))))
        return torch.cat(rows)

    one_by_one = logits(1)
    for _ in range(4):
        assert torch.equal(logits(NUM_ROWS), one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rejected_drafts_leave_behind_changes_no_bit(dtype: str, load: Load) -> None:
    executor = executor_for(load, "llama", dtype)
    executor.set_total(200)
    slots: SlotMap[str] = SlotMap(200)
    executor.run(slots.feed_prefix(list(range(30))), ())
    want = executor.run(slots.feed([3]), (0,))
    slots.truncate(30)
    wrong = [("a", None, 9, 30), ("b", "a", 8, 31), ("c", None, 7, 30)]
    executor.run(slots.feed((), wrong), (0, 1, 2))
    slots.advance((), ())
    assert torch.equal(executor.run(slots.feed([3]), (0,)), want)


def test_more_rows_than_were_fixed_are_refused(load: Load) -> None:
    executor = executor_for(load, "llama", "float32")
    executor.set_total(200)
    where = tuple(range(NUM_ROWS + 1))
    with pytest.raises(AssertionError, match="fixed at 8"):
        executor.run(Feed(where, where, where, 0, tuple((2 << i) - 1 for i in where)), (0,))


def test_a_session_must_say_how_long_it_may_become(load: Load) -> None:
    executor = executor_for(load, "llama", "float32")
    with pytest.raises(AssertionError, match="set_total"):
        executor.run(Feed((1,), (0,), (0,), 0, (1,)), (0,))


def test_a_row_that_depends_on_its_index_is_found_out(load: Load) -> None:
    executor = executor_for(load, "llama", "float32")
    mlp = executor.loaded.model.model.layers[1].mlp

    def drift(_module: object, _inputs: object, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 1e-6 * torch.arange(out.shape[1])[:, None])

    hook = mlp.register_forward_hook(drift)
    with pytest.raises(ModelError, match=r"passes of 8 rows in torch.float32 are not reproducible"):
        check_reproducible(executor)
    hook.remove()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_texts_in_other_lanes_change_no_bit(backend: str, dtype: str, load: Load) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic, so nothing is promised for it")
    executor = ModelExecutor(load("llama", dtype), 128, num_lanes=3, fixed_rows=4, backend=backend)
    check_reproducible(executor)
    assert executor.num_lanes_per_pass == 3
    executor.set_total(128)
    text = [i * i % 199 for i in range(40)]

    def logits(lane: int, *, others: bool) -> torch.Tensor:
        """Of the last 20 tokens, some at a time; beside them other texts come and go."""
        maps = [SlotMap[int](128, lane=each) for each in range(3)]
        for each in maps:
            start = text[:20] if each.lane == lane else text[each.lane : each.lane + 10]
            executor.run(each.feed_prefix(start), ())
        rows = []
        while missing := text[maps[lane].prefix_len :][: 1 + (lane + others) % 4]:
            feeds = [maps[lane].feed(missing)]
            asks: list[range] = [range(len(missing))]
            for each in maps:
                if others and each.lane != lane and len(rows) % 3 != each.lane:
                    feeds.append(each.feed([7, 8 + each.lane]))
                    asks.append(range(0))
            rows.append(executor.run_together(feeds, asks))
        return torch.cat(rows)

    want = logits(0, others=False)
    for lane in range(3):
        for others in (False, True):
            assert torch.equal(logits(lane, others=others), want)


def test_where_other_lanes_are_felt_one_text_is_run_at_a_time(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 128, num_lanes=3, fixed_rows=4, backend="fused")
    backend = executor._backend
    assert backend is not None
    right = backend.forward

    def drifting(rows: torch.Tensor, spans: Spans, **options: Any) -> Output:
        out = right(rows, spans, **options)
        drift = 1e-6 * (len(spans) - 1) * float(rows[0, -4:].sum())
        return Output(out.logits * (1 + drift))

    backend.forward = drifting  # type: ignore[method-assign]
    check_reproducible(executor)
    assert executor.num_lanes_per_pass == 1
