"""What a node says of itself when it has loaded its model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.loading import Engine
from node import loading
from node.loading import load
from proto.errors import ModelError
from proto.messages import Role
from proto.node_config import NodeConfig

CONFIG = NodeConfig(Role.TARGET, "ipc:///tmp/none", "target-1", "", "model")


@pytest.mark.parametrize(
    ("fixed_rows", "device", "is_started", "state"),
    [
        (0, "cpu", True, "ready, but C++ for this processor is being compiled"),
        (0, "cpu", False, "ready"),
        (16, "cpu", True, "ready"),
        (0, "meta", True, "ready"),  # stands for a GPU
    ],
)
def test_a_node_says_that_the_next_start_is_faster_if_cpp_is_being_compiled(
    fixed_rows: int,
    device: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_started: bool,
) -> None:
    executor: Any = SimpleNamespace(backend="fused")
    loaded: Any = SimpleNamespace(device=torch.device(device), rank=object())
    engine = Engine(executor, loaded, 90, 10, ("", ""), 0.0, {}, device)
    monkeypatch.setattr(loading, "load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(loading, "compile_in_background", lambda: is_started)
    heart = SimpleNamespace(state="starting")
    load(replace(CONFIG, fixed_rows=fixed_rows), heart)
    assert heart.state.partition(", once")[0] == state


@pytest.mark.parametrize("digest", ["a", "b"])
def test_a_draft_model_at_home_is_loaded_before_its_target_and_must_have_its_tokenizer(
    digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, float]] = []

    def load_engine(model: str, *, part: float, **_: Any) -> Engine:
        loads.append((model, part))
        loaded: Any = SimpleNamespace(
            device=torch.device("cpu"), rank=object(), eos_token_ids=(), name=model
        )
        executor: Any = SimpleNamespace(backend="fused")
        digests = ("a" if model == "model" else digest, "")
        return Engine(executor, loaded, 90, 10, digests, 0.0, {}, "cpu")

    monkeypatch.setattr(loading, "load_engine", load_engine)
    monkeypatch.setattr(loading, "head_kind_of", lambda *_: None)
    monkeypatch.setattr(loading, "compile_in_background", lambda: False)
    config = replace(CONFIG, home_drafter="small", device="cpu")
    heart = SimpleNamespace(state="starting")
    if digest == "b":
        with pytest.raises(ModelError, match=r"small has another tokenizer .*--drafter-home own"):
            load(config, heart)
    else:
        home = load(config, heart).home_drafter
        assert home is not None
        assert home.num_threads == torch.get_num_threads()
    assert loads == [("small", 0.4), ("model", 1.0)]
