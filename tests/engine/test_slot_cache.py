"""The slot cache under unmodified transformers models, against plain forwards of every path."""

import os
from pathlib import Path

import pytest
import torch

from engine.checkpoint.model import LoadedModel
from engine.errors import lacks_memory
from engine.forward.cache_tensors import zeros
from engine.layout.slots import Feed, Move, SlotMap
from engine.model_executor import ModelExecutor
from engine.selfcheck import check_slot_attention
from tests.engine.conftest import Load
from tests.engine.random_session import Drawn, RandomSession
from tests.engine.random_session import Path as Tokens
from tests.tiny_models import SUPPORTED

# Relative to the largest logit of a row. Two float32 computations in another order differ by 1e-6.
TOLERANCE = 1e-4


def test_a_cache_takes_memory_only_where_it_was_written_to() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, cpu = resident(), torch.device("cpu")
    cache = zeros((4, 8, 1 << 16, 64), torch.float32, cpu)
    assert cache.shape == (4, 8, 1 << 16, 64)
    assert cache.nbytes == 1 << 29
    assert resident() - before < cache.nbytes // 16
    assert not cache[1, 2].any()
    cache[:, :, :100] = 1.0
    assert float(cache[:, :, :200].sum()) == 4 * 8 * 100 * 64
    assert resident() - before < cache.nbytes // 8
    assert not cache[:, :, 200:300].any()


def test_a_cache_that_no_memory_holds_is_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError) as caught:
        zeros((1 << 30, 1 << 30, 1 << 10), torch.float32, torch.device("cpu"))
    assert lacks_memory(caught.value)


def plain(loaded: LoadedModel, path: Tokens) -> torch.Tensor:
    """Logits [len(path), V] of the model's own forward over a text."""
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(torch.tensor([path]), use_cache=False).logits
    return logits[0]


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())


def assert_like_plain(executor: ModelExecutor, step: Drawn) -> None:
    """Run a pass and compare its rows; of a prefill the last one."""
    num_rows = len(step.paths)
    ask = range(num_rows) if step.feed.masks else [num_rows - 1]
    got = executor.run(step.feed, ask)
    want = torch.stack([plain(executor.loaded, step.paths[row])[-1] for row in ask])
    assert difference(got, want) < TOLERANCE


@pytest.mark.parametrize("architecture", [*SUPPORTED, "gptj"])
def test_trees_and_roll_backs_and_moves_equal_plain_forwards(architecture: str, load: Load) -> None:
    executor = ModelExecutor(load(architecture), 320)
    slots: SlotMap[Tokens] = SlotMap(executor.capacity)
    session = RandomSession(7, slots, vocab=199, prompt_len=150, max_rows=6)
    num_moves = longest = 0
    for step in session.steps(36, shorten=False):
        if isinstance(step, Move):
            executor.move(step)
            num_moves += 1
        else:
            assert_like_plain(executor, step)
            longest = max(longest, step.feed.total)
    assert num_moves >= 3
    assert longest > 3 * 64


@pytest.mark.parametrize("architecture", [*SUPPORTED, "gptj"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_passes_what_is_exact(architecture: str, dtype: str, load: Load) -> None:
    check_slot_attention(ModelExecutor(load(architecture, dtype), 64))


def test_a_shorter_text_can_follow_a_longer_one(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 200)
    session = RandomSession(3, SlotMap[Tokens](200), vocab=199, prompt_len=40)
    for step in session.steps(40):
        if isinstance(step, Move):
            executor.move(step)
        else:
            assert_like_plain(executor, step)


def test_only_asked_rows_come_back_and_in_the_order_asked(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 128)
    text = tuple(range(10, 90))
    where = tuple(range(80))
    want = plain(executor.loaded, text)
    chunk = Feed(text, where, where, 0, None)
    assert executor.run(chunk, ()).shape == (0, 199)
    assert difference(executor.run(chunk, (79, 3)), want[[79, 3]]) < TOLERANCE
    again = Feed(text[-3:], (77, 78, 79), (77, 78, 79), 77, (1, 3, 7))
    assert difference(executor.run(again, (2, 0, 1)), want[[79, 77, 78]]) < TOLERANCE


def test_a_prefill_computes_logits_for_the_asked_rows_alone(load: Load) -> None:
    loaded = load("llama")
    executor = ModelExecutor(loaded, 128)
    seen: list[int] = []
    head = loaded.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    where = tuple(range(100))
    executor.run(Feed((5,) * 100, where, where, 0, None), (99,))
    hook.remove()
    assert seen == [1]


def test_the_cache_is_one_tensor_where_shapes_agree(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 128)
    (buffer,) = executor._backend.cache.buffers.values()  # type: ignore[union-attr]
    assert buffer.shape == (2 * 3, 1, 2, 128, 16)
    assert not buffer.any()


def test_a_fixed_total_changes_no_logits(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 320)
    where = tuple(range(20))
    chunk = Feed(tuple(range(20)), where, where, 0, None)
    short = executor.run(chunk, (19,))
    executor.set_total(300)
    assert difference(executor.run(chunk, (19,)), short) < TOLERANCE


def test_warming_up_leaves_the_executor_as_new(load: Load) -> None:
    executor = ModelExecutor(load("gpt2"), 100)
    executor.warm_up((1, 2, 5))
    session = RandomSession(1, SlotMap[Tokens](100), vocab=199, prompt_len=30)
    for step in session.steps(5):
        if isinstance(step, Move):
            executor.move(step)
        else:
            assert_like_plain(executor, step)


def test_nothing_runs_after_the_memory_is_given_back(load: Load) -> None:
    executor = ModelExecutor(load("gpt2"), 100)
    executor.free()
    with pytest.raises(AssertionError, match="freed"):
        executor.run(Feed((1,), (0,), (0,), 0, (1,)), (0,))


def test_more_slots_than_the_cache_has_are_refused(load: Load) -> None:
    executor = ModelExecutor(load("gpt2"), 100)
    with pytest.raises(AssertionError, match="100"):
        executor.run(Feed((1,), (100,), (100,), 100, (1,)), (0,))


def test_a_pass_that_is_filled_up_copies_no_logits_that_lie_in_front(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 128, fixed_rows=4)
    executor.set_total(64)
    feed = Feed((5, 6), (0, 1), (0, 1), 0, (1, 3))
    laid_out = executor.lay_out((feed,), (range(2),))
    assert (laid_out.rows.shape[1], laid_out.keep) == (4, None)
    both = executor.run(feed, range(2))
    assert both.shape[0] == 2
    assert torch.equal(executor.run(feed, (1,)), both[1:])


def test_timed_passes_have_different_tokens(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token would all choose the same experts, and a mixture would look too fast."""
    executor = ModelExecutor(load("llama"), 128)
    timed: list[tuple[int, ...]] = []
    plain = executor.seconds_of

    def noted(feed: Feed) -> float:
        timed.append(feed.tokens)
        return plain(feed)

    monkeypatch.setattr(executor, "seconds_of", noted)
    executor.warm_up((1, 4))
    assert timed == [(0,), (0, 1, 2, 3)]
