"""Medusa heads against sums and products, in the layouts that they come in."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.heads.head_loading import load_head
from engine.heads.medusa import Medusa
from proto.head_kinds import HeadKind
from tests.engine.heads.checkpoints import HIDDEN, VOCAB, Tensors, medusa


def plain(files: Tensors, head: int, x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of one head with two layers."""
    for layer in range(2):
        inner = x @ files[f"{head}.{layer}.linear.weight"].T + files[f"{head}.{layer}.linear.bias"]
        x = x + inner * torch.sigmoid(inner)
    return x @ files.get(f"{head}.2.weight", lm_head).T


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_each_head_is_what_the_paper_says(
    prefix: str, file: str, target: Path, tmp_path: Path
) -> None:
    saved = replace(medusa(prefix=prefix), file=file)
    loaded = load_head(str(saved.save(tmp_path)), target=str(target), dtype="float32")
    assert (loaded.kind, loaded.layers, loaded.feature_size) == (HeadKind.MEDUSA, (-1,), HIDDEN)
    assert loaded.eos_token_ids == (2,)
    assert loaded.num_parameters == sum(tensor.numel() for tensor in saved.files.values())
    heads = loaded.module
    assert isinstance(heads, Medusa)
    assert heads.num_heads == 3
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    for num_rows in (1, 5):
        x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))
        got = heads.logits(x)
        assert got.shape == (3, num_rows, VOCAB)
        assert got.dtype == torch.float32
        for head in range(3):
            want = plain(medusa().files, head, x, lm_head)
            assert torch.allclose(got[head], want, atol=1e-4)
            assert torch.equal(got[head].argmax(-1), want.argmax(-1))
    assert heads.logits(torch.empty(0, HIDDEN)).shape == (3, 0, VOCAB)


def test_heads_that_config_does_not_count_are_used_too(target: Path, tmp_path: Path) -> None:
    saved = medusa(num_heads=4, num_layers=1)
    fewer = replace(saved, config={"medusa_num_heads": 2, "medusa_num_layers": 1})
    loaded = load_head(str(fewer.save(tmp_path)), target=str(target))
    assert isinstance(loaded.module, Medusa)
    assert loaded.module.num_heads == 4
