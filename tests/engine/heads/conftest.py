"""Heads of a small llama that several tests share, and the same computed plainly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.cpu_library import library, why_not_here
from engine.heads.head_loading import LoadedHead, load_head
from tests.engine.conftest import Folder
from tests.engine.heads.checkpoints import checkpoint
from tests.engine.heads.plain import PlainHead

LoadHead = Callable[[str], tuple[LoadedHead, PlainHead]]


@pytest.fixture(scope="session")
def target(folder: Folder) -> Path:
    """The folder of the heads' target."""
    return folder("llama")


@pytest.fixture(scope="session", params=["as it is", "our own"])
def eagle(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoadHead:
    """eagle(layout): a head in float32, and the same plainly.

    Once as this process computes it, and once for sure by our own C++.
    """
    if request.param == "our own":
        if (why := why_not_here()) is not None:
            pytest.skip(why)
        assert library() is not None
    made: dict[str, tuple[LoadedHead, PlainHead]] = {}

    def get(layout: str) -> tuple[LoadedHead, PlainHead]:
        if layout not in made:
            saved = checkpoint(layout)
            folder = saved.save(tmp_path_factory.mktemp("head"))
            loaded = load_head(str(folder), target=str(target), dtype="float32")
            tensors = load_file(target / "model.safetensors")
            plain = PlainHead(
                saved.weights,
                tensors["model.embed_tokens.weight"],
                tensors["lm_head.weight"],
                bool(saved.config.get("norm_before_residual")),
                bool(saved.config.get("norm_output")),
            )
            made[layout] = loaded, plain
        return made[layout]

    return get


def feature(seed: int, size: int) -> torch.Tensor:
    """What the target might have computed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
