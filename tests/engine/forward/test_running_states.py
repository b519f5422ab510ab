"""Layers with a running state: what summarises slots is dropped when the slots are others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import memory
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.forward.cache_tensors import STATE_STEP, slot_bytes
from engine.forward.more_layers import state_bytes
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.room import SPARE_SLOTS
from tests.families import load
from tests.small_families import make_small

VOCAB, TOLERANCE = 199, 1e-3
KINDS = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid"),  # the delta rule
    *("kimi_linear", "bailing_hybrid"),  # with a decay for each channel
    "minimax",
    *("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
    *("falcon_mamba", "jamba", "zamba"),  # Mamba 1
    "recurrent_gemma",
)
# One of each mechanism: these are tested where there is little time.
USUAL = ("qwen3_next", "kimi_linear", "minimax", "bamba", "jamba", "recurrent_gemma")
LENGTHS = (1, STATE_STEP - 1, STATE_STEP, STATE_STEP + 1, 2 * STATE_STEP, 150)


def one_of_each() -> list[object]:
    """Return the kinds as parameters; all but one of each mechanism are slow together."""
    return [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="module", params=one_of_each())
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    return make_small(request.param, tmp_path_factory.mktemp("model"))


def test_memory_is_counted_for_the_states_that_are_kept(small: Path) -> None:
    loaded = load_model(str(small), dtype="float32")
    executor = ModelExecutor(loaded, 320, num_lanes=2)
    cache = executor._backend.cache  # type: ignore[union-attr]
    for lane in (0, 1):
        read(executor, text(1, STATE_STEP + 1), 0, lane)
        read(executor, [5], STATE_STEP + 1, lane)
    held = sum(_num_bytes(state) for _, state in cache.states.values())
    assert held == 2 * state_bytes(loaded.model) > 0
    # A text of no tokens has these bytes too, so one lane less fits.
    slots = 300
    room = 3 * (slots * slot_bytes(loaded.model, loaded.device) + state_bytes(loaded.model))
    spare = SPARE_SLOTS["cpu"]
    assert memory.num_lanes_that_fit(loaded, slots - spare, 8, room=room) == 3
    assert memory.num_lanes_that_fit(loaded, slots - spare, 8, room=room - 1) == 2


def _num_bytes(state: Any) -> int:
    return int(state.nbytes)


@pytest.fixture
def executor(small: Path) -> ModelExecutor:
    return ModelExecutor(load_model(str(small), dtype="float32"), 320, num_lanes=2)


@pytest.fixture
def reference(small: Path) -> Any:
    """Transformers' own model."""
    return load(small)


def text(seed: int, length: int = 150) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(executor: ModelExecutor, tokens: list[int], start: int, lane: int = 0) -> torch.Tensor:
    """Read tokens as a prompt from position `start` on; the logits of the last one."""
    where = tuple(range(start, start + len(tokens)))
    feed = Feed(tuple(tokens), where, where, start, None, lane)
    return executor.run(feed, (len(tokens) - 1,))[0]


def check(reference: Any, got: torch.Tensor, tokens: list[int]) -> None:
    with torch.inference_mode():
        want = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert (got - want).abs().max() < TOLERANCE * want.abs().max()


def test_the_beginning_of_a_text_still_counts_behind_two_borders(reference: Any) -> None:
    """So that the other tests can see a state that is wrong."""
    said = []
    for first in (text(1, 20), text(2, 20)):
        with torch.inference_mode():
            ids = torch.tensor([first + text(3, 140)])
            said.append(reference(ids, use_cache=False).logits[0, -1])
    assert (said[0] - said[1]).abs().max() > 5 * TOLERANCE * said[0].abs().max()


@pytest.mark.parametrize("end", LENGTHS)
def test_chunks_may_end_anywhere(executor: ModelExecutor, reference: Any, end: int) -> None:
    tokens = text(1)
    read(executor, tokens[:end], 0)
    check(reference, read(executor, [*tokens[end:], 7], end), [*tokens, 7])


def test_tokens_one_by_one_are_as_those_of_a_prompt(
    executor: ModelExecutor, reference: Any
) -> None:
    tokens = text(1)
    read(executor, tokens[:60], 0)
    for at in range(60, 140):
        feed = Feed((tokens[at],), (at,), (at,), at, (1,))
        logits = executor.run(feed, (0,))[0]
    check(reference, logits, tokens[:140])


@pytest.mark.parametrize("length", [1, 63, 100, 130])
def test_prompts_that_are_padded_as_on_a_gpu(
    executor: ModelExecutor, reference: Any, length: int
) -> None:
    executor.pads_prompts = True
    tokens = text(1, length)
    check(reference, read(executor, tokens, 0), tokens)
    check(reference, read(executor, [5, 6], length), [*tokens, 5, 6])
    executor.warm_up_prompts()


def test_a_copied_beginning_takes_no_state_of_another_text(
    executor: ModelExecutor, reference: Any
) -> None:
    one, other = text(1), text(2)
    read(executor, one, 0)
    read(executor, other, 0, lane=1)
    read(executor, [5], 150, lane=1)  # its state at the second border is made
    executor.copy_prefix(0, 1, 140)
    check(reference, read(executor, [5, 6], 140, lane=1), [*one[:140], 5, 6])


@pytest.mark.parametrize("back_to", [0, 10, STATE_STEP, 100, 2 * STATE_STEP + 1])
def test_a_text_that_is_shortened_and_goes_on_otherwise(
    executor: ModelExecutor, reference: Any, back_to: int
) -> None:
    one, other = text(1), text(2)
    read(executor, one, 0)
    read(executor, [5], 150)
    again = [*one[:back_to], *other[back_to:]]
    check(reference, read(executor, again[back_to:], back_to), again)


def test_a_wiped_lane_keeps_no_state(executor: ModelExecutor, reference: Any) -> None:
    read(executor, text(1), 0)
    read(executor, [5], 150)
    executor.wipe(0, 0)
    other = text(2)
    check(reference, read(executor, other, 0), other)
    assert all(at == 2 * STATE_STEP for at, _ in _states(executor).values())


def test_reproducible_mode_is_refused_in_a_line(small: Path) -> None:
    with pytest.raises(
        ModelError, match="reproducible mode is not for layers with a running state"
    ):
        make_executor(load_model(str(small), dtype="float32"), 320, fixed_rows=16)


def _states(executor: ModelExecutor) -> dict[tuple[int, int], tuple[int, torch.Tensor]]:
    backend: Any = executor._backend
    found: dict[tuple[int, int], tuple[int, torch.Tensor]] = backend.cache.states
    return found
