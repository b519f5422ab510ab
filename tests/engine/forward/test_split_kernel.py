"""Our own kernel for split attention against attention under a mask, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest tests/engine/forward/test_split_kernel.py

Triton comes with torch for GPUs only. With a GPU the kernel runs there, compiled.
"""

import os

import pytest
import torch

from engine.forward.split_kernel import SplitKernel, _shares
from engine.layout.attention_windows import FULL, AttentionWindow, LayerKinds

IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if IS_ON_GPU else "cpu"
NUM_SLOTS, NUM_LANES = 256, 3

runs = pytest.mark.skipif(
    not IS_ON_GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton with TRITON_INTERPRET=1",
)


def error(shape: tuple[int, int], group: int, dim: int, kinds: LayerKinds = FULL) -> float:
    random = torch.Generator().manual_seed(dim)
    size = 2, 1, 2, NUM_SLOTS * NUM_LANES, dim
    keys, values = torch.randn(size, generator=random).to(DEVICE)
    kernel = SplitKernel(NUM_SLOTS, group, num_lanes=NUM_LANES, kinds=kinds)
    return kernel._error(shape, keys, values, dim**-0.5)


@runs
@pytest.mark.parametrize(
    ("shape", "group", "dim"),
    [((1, 1), 1, 64), ((1, 5), 4, 32), ((2, 17), 4, 64), ((3, 2), 3, 80), ((1, 3), 32, 16)],
)
def test_it_agrees_with_attention_under_a_mask(
    shape: tuple[int, int], group: int, dim: int
) -> None:
    pytest.importorskip("triton")
    assert error(shape, group, dim) < 1e-5


@runs
@pytest.mark.parametrize(
    "kinds",
    [
        LayerKinds((None, AttentionWindow(40)), of_layers=(0, 1)),
        LayerKinds((AttentionWindow(64, True),), of_layers=(0,)),
    ],
    ids=["sliding", "chunks"],
)
def test_it_keeps_to_attention_windows(kinds: LayerKinds) -> None:
    pytest.importorskip("triton")
    assert error((2, 5), 2, 32, kinds) < 1e-5


@runs
def test_a_row_that_sees_nothing_gets_zeros() -> None:
    pytest.importorskip("triton")
    kernel = SplitKernel(NUM_SLOTS, group=1)
    keys, values = torch.randn(2, 1, 2, NUM_SLOTS, 16).to(DEVICE)
    words = torch.tensor([[0, 7], [0, 1]], device=DEVICE)
    visible = kernel.see(words, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    out = kernel.attend(torch.randn(1, 2, 2, 16).to(DEVICE), keys, values, visible, 0.25)
    assert not out[:, :, 0].any()
    assert out[:, :, 1].all()


def test_the_keys_are_divided_among_about_two_thread_blocks_per_multiprocessor() -> None:
    assert [_shares(num_heads) for num_heads in (1, 2, 8, 64, 256, 1000)] == [32, 32, 32, 4, 1, 1]
