"""Models that several tests share are made once for the whole run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.checkpoint.model import LoadedModel, load_model
from engine.choice.coupling_on_gpu import capture_on
from tests.tiny_models import make_model

Folder = Callable[..., Path]
Load = Callable[..., LoadedModel]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Small models run many times faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_recordings_of_other_tests() -> Iterator[None]:
    """Who plays a GPU on the CPU leaves no recordings of choices behind."""
    yield
    capture_on(torch.device("cpu"), None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, _one_thread: None) -> Folder:
    """folder(architecture, seed=0): a saved small model."""
    made: dict[tuple[str, int], Path] = {}

    def get(architecture: str, seed: int = 0) -> Path:
        key = architecture, seed
        if key not in made:
            made[key] = make_model(architecture, tmp_path_factory.mktemp(architecture), seed)
        return made[key]

    return get


@pytest.fixture(scope="session")
def load(folder: Folder) -> Load:
    """load(architecture, dtype="float32"): that model, loaded."""
    made: dict[tuple[str, str], LoadedModel] = {}

    def get(architecture: str, dtype: str = "float32") -> LoadedModel:
        key = architecture, dtype
        if key not in made:
            made[key] = load_model(str(folder(architecture)), dtype=dtype)
        return made[key]

    return get
