"""Prompts of 8,000 tokens in models with running states or short convolutions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import memory
from engine.checkpoint.model import load_model
from engine.forward.cache_tensors import SlotCache, slot_bytes
from engine.forward.more_layers import state_bytes
from engine.layout.slots import Feed
from engine.model_executor import ModelExecutor
from tests.families import load
from tests.small_families import make_small

LENGTH, TOLERANCE = 8000, 1e-3
# Tokens of the chunks, in turn: of a usual length, and such that few end at a border.
CUTS = ((512,), (1000, 37, 1, 413))
# One family of each mechanism.
KINDS = ("qwen3_5_text", "kimi_linear", "minimax", "bamba", "jamba", "recurrent_gemma", "lfm2")


def read(executor: ModelExecutor, tokens: list[int], cut: tuple[int, ...]) -> torch.Tensor:
    """Read a prompt in chunks of these lengths; return the logits behind it."""
    start = number = 0
    logits = torch.empty(0)
    while start < len(tokens):
        chunk = tokens[start : start + cut[number % len(cut)]]
        where = tuple(range(start, start + len(chunk)))
        logits = executor.run(Feed(tuple(chunk), where, where, start, None), (len(chunk) - 1,))[0]
        start, number = start + len(chunk), number + 1
    return logits


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind == "bamba" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_the_end_of_a_long_prompt_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    make_small(kind, tmp_path)
    tokens = torch.randint(199, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        want = load(tmp_path)(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    loaded = replace(load_model(str(tmp_path), dtype="float32"), max_model_len=LENGTH)
    for cut in CUTS:
        executor = ModelExecutor(loaded, LENGTH + 192, num_lanes=1)
        got = read(executor, tokens, cut)
        assert (got - want).abs().max() < TOLERANCE * want.abs().max(), cut
        check_memory(executor)


def check_memory(executor: ModelExecutor) -> None:
    """The cache has the bytes of the account: of each slot, and of the states of a text."""
    loaded, backend = executor.loaded, executor._backend
    cache: Any = backend.cache  # type: ignore[union-attr]
    assert isinstance(cache, SlotCache)
    allocated = sum(buffer.nbytes for buffer in cache.buffers.values())
    assert allocated == cache.capacity * slot_bytes(loaded.model, loaded.device)
    held = sum(int(state.nbytes) for _, state in cache.states.values())
    most = state_bytes(loaded.model)
    assert most / 2 <= held <= most  # some layers keep a second state where a chunk ends
    sizes = memory._sizes(loaded)
    assert sizes.slot * cache.capacity + sizes.state == allocated + most
