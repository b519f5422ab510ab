"""Families that the fused forward does not cover, recorded: transformers' modules as CUDA graphs.

The GPU is played (`stand_in.py`): a recording runs the operators that it has seen, on the same
memory, and whatever would make the host wait raises. What only a GPU can show is in tests/gpu.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.checkpoint.model import load_model
from engine.choice.coupling import usual_chains, usual_choices
from engine.errors import ModelError
from engine.forward.experts import compute
from engine.forward.graphs import GraphBackend, refusing_to_wait
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.conftest import Folder
from tests.engine.forward.test_fused import session_differences
from tests.engine.stand_in import CAPTURE, StandIn, device
from tests.engine.test_slot_cache import TOLERANCE, difference

__all__ = ["device"]  # a fixture
CAPACITY = 200
ROW_COUNTS = (1, 4)
FAMILIES = ("qwen3_moe", "gpt2", "phi3", "olmo", "granite", "cohere", "falcon", "stablelm")


def ready(
    folder: Path,
    backend: str = "graphs",
    *,
    num_lanes: int = 1,
    layers: tuple[int, ...] = (),
    row_counts: Sequence[int] = ROW_COUNTS,
) -> ModelExecutor:
    made = make_executor(
        load_model(str(folder), dtype="float32"),
        CAPACITY,
        num_lanes=num_lanes,
        backend=backend,
        row_counts=row_counts if backend == "graphs" else (),
        layers=layers,
    )
    made.warm_up((1,), choices=usual_choices(()), chains=(2,), chained=usual_chains()[:1])
    return made


def texts(executor: ModelExecutor, lanes: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Greedy texts of as many lanes at once, each with a prompt of its own."""
    made = []
    for lane in lanes:
        prompt = tuple((7 * lane + 3 * i) % 190 for i in range(12 + 5 * lane))
        where = tuple(range(len(prompt) - 1))
        executor.run(Feed(prompt[:-1], where, where, 0, None, lane), ())
        made.append(list(prompt))
    for _ in range(num_tokens):
        at = [len(text) - 1 for text in made]
        feeds = [
            Feed((text[-1],), (start,), (start,), start, (1,), lane)
            for text, start, lane in zip(made, at, lanes, strict=True)
        ]
        logits = executor.run_together(feeds, [(0,)] * len(feeds))
        for text, token in zip(made, logits.argmax(1).tolist(), strict=True):
            text.append(token)
    return made


def inner_of(executor: ModelExecutor) -> Any:
    assert isinstance(executor._backend, GraphBackend)
    return executor._backend._inner


@pytest.mark.parametrize("architecture", FAMILIES)
def test_recorded_texts_are_those_of_the_reference(
    architecture: str, folder: Folder, device: StandIn
) -> None:
    reference = ready(folder(architecture), "reference", num_lanes=4)
    graphs = ready(folder(architecture), num_lanes=4)
    assert graphs.backend == "graphs"
    assert inner_of(graphs).name == "reference"
    num_captures = device.num_captures
    with device.watch() as noted:
        got = texts(graphs, (3, 0, 2), 40)
    assert got == texts(reference, (3, 0, 2), 40)
    assert texts(graphs, (1,), 40) == texts(reference, (1,), 40)
    assert texts(graphs, (0, 1, 2, 3), 20) == texts(reference, (0, 1, 2, 3), 20)
    assert device.num_captures == num_captures
    assert CAPTURE not in noted
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt2", "phi3"])
def test_trees_moves_and_roll_backs_have_the_logits_of_the_reference(
    architecture: str, folder: Folder, device: StandIn
) -> None:
    reference, graphs = (ready(folder(architecture), name) for name in ("reference", "graphs"))
    for seed in range(2):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCE
    assert graphs.num_late == 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt2"])
@pytest.mark.parametrize("lanes", [(3,), (2, 0), (3, 1, 0), (0, 1, 2, 3)])
def test_a_recording_serves_any_lanes_and_reads_no_other(
    lanes: tuple[int, ...], architecture: str, folder: Folder, device: StandIn
) -> None:
    graphs = ready(folder(architecture), num_lanes=4)
    alone = ready(folder(architecture), "reference")
    feeds, wants = [], []
    for buffer in inner_of(graphs).cache.buffers.values():
        buffer.fill_(float("nan"))  # whoever reads of a lane that the pass has not has no numbers
    for lane in range(4):
        graphs.wipe(lane, 0)
    for lane in lanes:
        length, num_rows = 20 + 30 * lane, 1 + lane
        where = tuple(range(length))
        for executor, into in ((graphs, lane), (alone, 0)):
            prompt = tuple((lane + 3 * i) % 190 for i in where)
            executor.run(Feed(prompt, where, where, 0, None, into), ())
        rows = tuple(range(length, length + num_rows))
        masks = tuple((2 << i) - 1 for i in range(num_rows))
        feeds.append(Feed((5,) * num_rows, rows, rows, length, masks, lane))
        wants.append(alone.run(replace(feeds[-1], lane=0), range(num_rows)))
    got = graphs.run_together(feeds, [range(len(feed.tokens)) for feed in feeds])
    assert difference(got, torch.cat(wants)) < TOLERANCE
    assert graphs.num_late == 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmo"])
def test_recordings_hand_out_the_hidden_states_of_the_reference(
    architecture: str, folder: Folder, device: StandIn
) -> None:
    layers = (2, -1, 0)
    reference, graphs = (
        ready(folder(architecture), name, num_lanes=2, layers=layers)
        for name in ("reference", "graphs")
    )
    where = tuple(range(30))
    feeds = [Feed((lane + 1,) * 30, where, where, 0, None, lane) for lane in range(2)]
    steps = [Feed((4, 9), (30, 31), (30, 31), 30, (1, 3), lane) for lane in range(2)]
    for feed in feeds:
        for executor in (reference, graphs):
            executor.run(feed, ())
    for rows in (steps, steps[1:]):
        got, want = (
            each.forward(each.lay_out(rows, [(0, 1)] * len(rows)), layers).features
            for each in (graphs, reference)
        )
        assert got is not None
        assert want is not None
        assert got.shape == want.shape
        assert difference(got, want) < TOLERANCE
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)


def test_a_model_that_waits_for_a_number_is_not_recorded_and_says_why(
    folder: Folder,
    device: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = load_model(str(folder("granite")), dtype="float32")
    layer = loaded.model.model.layers[1]
    layer.register_forward_hook(lambda _module, _inputs, out: out[0].sum().item() and None)
    with pytest.raises(ModelError, match=r"cannot be recorded as CUDA graphs \(called a sync"):
        make_executor(loaded, CAPACITY, backend="graphs", row_counts=ROW_COUNTS)
    assert device.num_captures == 0
    assert device.refusing is None
    assert device.current is device.usual
    monkeypatch.setattr("engine.loading._candidates", lambda *_: ("graphs", "fused"))
    with caplog.at_level("WARNING"):
        executor = make_executor(loaded, CAPACITY, row_counts=ROW_COUNTS)
    assert executor.backend == "reference"
    assert "the backend graphs is not used: " in caplog.text
    assert len(caplog.records) == 1


def test_prompts_do_not_make_the_host_wait_where_recordings_must_not(
    folder: Folder, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, asked = ready(folder("qwen3_moe")), []

    def noted(*inputs: Any) -> torch.Tensor:
        asked.append(len(inputs[1]))
        return compute(*inputs)

    monkeypatch.setattr("engine.forward.experts.compute", noted)
    where = tuple(range(30))
    graphs.run(Feed((7,) * 30, where, where, 0, None), (29,))
    assert inner_of(graphs).experts.is_used
    assert asked == [30] * 3  # of each layer
    assert graphs.loaded.model.config._experts_implementation == "grouped_mm"  # for other passes


@pytest.mark.parametrize("num_rows", [1, 5, 700], ids=["copied", "all", "blocks"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_for_recordings_compute_what_each_expert_does(
    kind: str, num_rows: int, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.forward.experts._COPIED_BYTES", 10_000)  # a few blocks at once
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24}
    if kind == "gpt_oss":  # with biases, and matrices that lie the other way
        config: Any = GptOssConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
        experts: Any = GptOssExperts(config)
    else:
        config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2)
        experts = Qwen3MoeExperts(config)
    config._experts_implementation = "eager"
    random = torch.Generator().manual_seed(3)
    for weight in experts.parameters():
        weight.data = torch.randn(weight.shape, generator=random)
    hidden = torch.randn(num_rows, 16, generator=random)
    chosen = torch.rand(num_rows, 8, generator=random).topk(2, 1).indices
    weights = torch.rand(num_rows, 2, generator=random)
    with torch.inference_mode():
        want = experts(hidden, chosen, weights)
        with refusing_to_wait():
            got = compute(experts, hidden, chosen, weights)
    assert difference(got, want) < 1e-5
