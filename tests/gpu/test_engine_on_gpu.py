"""Recordings that are CUDA graphs, and choices made on the device: the same as elsewhere."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.checkpoint.families import FUSED as FAMILIES
from engine.checkpoint.model import load_model
from engine.choice.coupling import choose, rank_scored, rare_choices, usual_choices
from engine.choice.sampling import Sampling
from engine.device import fetch, free_bytes
from engine.forward.forward import Output
from engine.forward.graphs import GraphBackend
from engine.layout.slots import Feed, SlotMap
from engine.loading import load_engine, make_executor
from engine.model_executor import ModelExecutor
from engine.selfcheck import check_reproducible
from engine.tensor_parallel.group import Rank
from node.forwards import Forwards, SimulatedDevice
from proto.stopwatch import Stopwatch
from tests.engine.choice.test_device_choice import SETTINGS, some_logits
from tests.engine.forward.test_fused import save, session_differences
from tests.engine.test_slot_cache import difference
from tests.families import make_family
from tests.packed_models import RECIPES, save_packed
from tests.target_node.real import RealTarget
from tests.target_node.test_not_finite import PROMPT, asked, faults_of, text_of
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = "cuda:0"
ROW_COUNTS = (1, 2, 4)
# Looser than on a CPU: its matrix products sum in other orders from one number of rows to the next.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}


def executor(folder: Path, dtype: str, backend: str) -> ModelExecutor:
    loaded = load_model(str(folder), dtype=dtype, device=GPU)
    return make_executor(loaded, 400, backend=backend, row_counts=ROW_COUNTS)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_graphs_give_the_logits_of_the_reference(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    if dtype == "float32":
        folder = save(architecture, tmp_path, {})
    else:
        folder = make_model(architecture, tmp_path, scale=0.5)
    reference = executor(folder, dtype, "reference")
    graphs = executor(folder, dtype, "auto")
    assert graphs.backend == "graphs"
    graphs.warm_up((1,))
    assert isinstance(graphs._backend, GraphBackend)
    recorded = len(graphs._backend._recorded)
    assert recorded >= len(ROW_COUNTS)  # one for all lengths, where attention is split
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES[dtype]
    assert len(graphs._backend._recorded) == recorded
    assert graphs.num_uncaptured > 0  # sessions have passes of up to 6 rows


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-window", "gemma3_text", "gpt_oss"])
def test_windows_give_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path)
    reference, graphs = (executor(folder, "float32", backend) for backend in ("reference", "auto"))
    assert graphs.backend == "graphs"
    assert graphs.windows
    graphs.warm_up((1,))
    for error in session_differences(reference, graphs, seed=2, max_rows=20):
        assert error < TOLERANCES["float32"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt2", "phi3", "olmo", "granite"])
def test_families_that_are_not_fused_are_recorded(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    folder = make_model(architecture, tmp_path, scale=1.0 if dtype == "float32" else 0.5)
    reference = executor(folder, dtype, "reference")
    graphs = executor(folder, dtype, "auto")
    assert graphs.backend == "graphs"
    graphs.warm_up((1,))
    for seed in range(2):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES[dtype]
    assert graphs.num_late == 0


def test_a_model_that_waits_for_a_number_leaves_the_gpu_usable(tmp_path: Path) -> None:
    folder = make_model("granite", tmp_path)
    loaded = load_model(str(folder), dtype="float32", device=GPU)
    layer = loaded.model.model.layers[1]
    layer.register_forward_hook(lambda _module, _inputs, out: out[0].sum().item() and None)
    unrecorded = make_executor(loaded, 400, row_counts=ROW_COUNTS)
    assert unrecorded.backend == "reference"
    assert torch.cuda.get_sync_debug_mode() == 0
    for error in session_differences(executor(folder, "float32", "auto"), unrecorded, seed=0):
        assert error < TOLERANCES["float32"]


def test_a_recording_that_fails_leaves_the_others_right(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    reference, graphs = (executor(folder, "float32", name) for name in ("reference", "graphs"))
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    compute = backend._compute

    def waits(rows: torch.Tensor, shape: tuple[int, int], *about: Any) -> Output:
        out = compute(rows, shape, *about)
        if shape[1] == 2:
            out.logits.sum().item()
        return out

    backend._compute = waits  # type: ignore[method-assign]
    backend.forget()
    graphs.warm_up(())  # those of two rows are between others
    assert {shape for shape, _ in backend._recorded} == {(1, 1), (1, 4)}
    assert {shape for shape, _ in backend._refused} == {(1, 2)}
    for seed in range(2):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES["float32"]
    assert graphs.num_uncaptured > 0


def test_a_row_of_a_reproducible_graph_has_the_same_bits_anywhere(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="bfloat16", device=GPU)
    check_reproducible(make_executor(loaded, 192, backend="graphs", fixed_rows=4))


def test_recordings_hand_out_the_hidden_states_of_the_reference(tmp_path: Path) -> None:
    folder, layers = save("llama", tmp_path, {}), (2, -1, 0)
    loaded = load_model(str(folder), dtype="float32", device=GPU)
    reference = make_executor(loaded, 400, backend="reference")
    loaded = load_model(str(folder), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, backend="graphs", row_counts=ROW_COUNTS, layers=layers)
    graphs.warm_up((1,))
    slots: SlotMap[int] = SlotMap(400)
    for feed in (slots.feed_prefix(range(30)), slots.feed([30, 31, 32]), slots.feed([33])):
        got, want = (
            each.forward(each.lay_out([feed], [(0,)]), layers).features
            for each in (graphs, reference)
        )
        assert got is not None
        assert want is not None
        assert difference(got, want) < TOLERANCES["float32"]
    assert graphs.num_uncaptured == 0


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=100, min_p=0.01)],
    ids=str,
)
def test_a_loaded_model_records_nothing_and_nothing_blocks_in_any_lane(
    sampling: Sampling, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    reference = executor(folder, "float32", "reference")
    loaded = load_model(str(folder), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, num_lanes=8, backend="graphs", row_counts=ROW_COUNTS)
    graphs.warm_up((1,), choices=usual_choices(()), rare=rare_choices(()))
    num_recorded = len(graphs._backend._recorded)  # type: ignore[union-attr]
    for lanes in ((0,), (5,), (7, 2), (1, 4, 6), range(8)):
        feeds, wants = [], []
        for lane in lanes:
            length, num_rows = 30 + 40 * lane, 1 + lane % 4
            prompt, where = tuple((lane + 3 * i) % 190 for i in range(length)), range(length)
            step = SlotMap[int](400, lane=lane)
            step.adopt(length)
            feeds.append(step.feed(range(5, 5 + num_rows)))
            for each, into in ((graphs, lane), (reference, 0)):
                each.run(Feed(prompt, tuple(where), tuple(where), 0, None, into), ())
            wants.append(reference.run(replace(feeds[-1], lane=0), range(num_rows)))
        asks = [range(len(feed.tokens)) for feed in feeds]
        if len(lanes) == 1:  # whatever would make the host wait raises; an event is no such call
            laid_out = graphs.lay_out(feeds, asks)
            torch.cuda.set_sync_debug_mode("error")
            try:
                logits = graphs.forward(laid_out).logits
                chosen = choose(logits, sampling, 5, 0, asks[0])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert chosen == choose(wants[0].cpu(), sampling, 5, 0, asks[0])
        got = graphs.run_together(feeds, asks)
        assert difference(got, torch.cat(wants)) < TOLERANCES["float32"]
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)
    assert len(graphs._backend._recorded) == num_recorded  # type: ignore[union-attr]


def test_memory_for_features_is_pinned_at_load(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, backend="graphs", row_counts=ROW_COUNTS, layers=(1, 0))
    graphs.warm_up((1,))
    num_pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    for length in (400, 1, 3, 70, 300):
        where = tuple(range(length))
        feed = Feed((5,) * length, where, where, 0, None)
        features = graphs.forward(graphs.lay_out([feed], [()]), (1, 0)).features
        assert features is not None
        assert len(fetch(features)) == length
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == num_pinned


def test_memory_that_torch_keeps_for_later_is_free() -> None:
    before = free_bytes(torch.device(GPU))
    large = torch.zeros(1 << 28, dtype=torch.uint8, device=GPU)
    assert free_bytes(large.device) <= before - large.nbytes
    del large
    assert free_bytes(torch.device(GPU)) > before - (1 << 27)


@pytest.mark.parametrize("is_given_back", [False, True])
def test_prompts_find_memory_and_choices_recordings_that_are_there(
    *, is_given_back: bool, tmp_path: Path
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, backend="graphs", row_counts=ROW_COUNTS)
    graphs.warm_up((1,), choices=usual_choices(()))
    if is_given_back:  # as when heads are loaded beside a target
        free_bytes(torch.device(GPU))
        graphs.warm_up_prompts()
    num_taken = torch.cuda.memory_stats(GPU)["num_device_alloc"]
    for length in (3, 64, 70, 200, 300):
        where, tokens = tuple(range(length)), tuple(i % loaded.vocab_size for i in range(length))
        logits = graphs.run(Feed(tokens, where, where, 0, None), (length - 1,))
        choose(logits, Sampling(0.8), 7, 0, (length,))
    assert torch.cuda.memory_stats(GPU)["num_device_alloc"] == num_taken
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)


def test_passes_larger_than_recordings_find_memory_that_is_there(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, backend="graphs", row_counts=ROW_COUNTS)
    graphs.warm_up((1,))
    num_taken = torch.cuda.memory_stats(GPU)["num_device_alloc"]
    for number, length in enumerate((5, 19, 31, 33, 63), 1):
        where = tuple(range(length))
        graphs.run(Feed(where, where, where, 0, tuple((2 << i) - 1 for i in where)), where)
        assert graphs.num_uncaptured == number
    assert torch.cuda.memory_stats(GPU)["num_device_alloc"] == num_taken


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_recordings_of_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, {})
    reference = executor(folder, "float32", "reference")
    engine = load_engine(
        str(folder),
        revision=None,
        dtype="float32",
        device="cuda:0-1",
        max_len=300,
        fixed_rows=None,
        warm_rows=(1,),
        say=print,
        row_counts=ROW_COUNTS,
    )
    assert engine.executor.backend == "graphs"
    for error in session_differences(reference, engine.executor, seed=0):
        assert error < TOLERANCES["float32"]
    assert engine.loaded.rank is not None
    assert engine.loaded.rank.followers is not None
    engine.loaded.rank.followers.close()


@pytest.mark.parametrize("kind", ["gptq-act-order", "awq", "fp8-block", "nf4-double", ""])
@pytest.mark.parametrize("rank", [None, Rank(0, 2, print), Rank(1, 2, print)])
def test_weights_on_the_device_are_those_on_the_host(
    kind: str, rank: Rank | None, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path / "plain")
    if kind:
        folder, _ = save_packed(folder, tmp_path / "packed", RECIPES[kind])
    host, there = (
        dict(load_model(str(folder), dtype="bfloat16", device=device, rank=rank).model.state_dict())
        for device in ("cpu", GPU)
    )
    assert host.keys() == there.keys()
    for name, weight in there.items():
        assert weight.device.type == "cuda"
        assert torch.equal(weight.cpu(), host[name]), name


def test_a_text_that_finds_no_memory_ends_and_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32", device=GPU)
    target = RealTarget(make_executor(loaded, 256))
    with monkeypatch.context() as patch:
        too_much = partial(torch.empty, 1 << 46, dtype=torch.uint8, device=GPU)
        patch.setattr(target.executor, "forward", lambda *_: too_much())
        target.hear(asked(PROMPT))
        target.run()
    (fault,) = faults_of(target)
    assert "memory was missing" in fault.detail
    target.hear(asked(PROMPT, session=2))
    target.run()
    assert len(text_of(target, 2)) > 0


@pytest.mark.parametrize("vocab", [4096, 151_936])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_choices_on_the_device_are_those_of_the_host(sampling: Sampling, vocab: int) -> None:
    logits = some_logits(8, vocab)
    there, positions = logits.to(GPU), range(8)
    assert choose(there, sampling, 5, 0, positions) == choose(logits, sampling, 5, 0, positions)
    for num_ranked in (1, 4):
        tokens, scores = rank_scored(there, sampling, 5, 0, positions, num_ranked)
        wanted, values = rank_scored(logits, sampling, 5, 0, positions, num_ranked)
        assert tokens == wanted
        for got, there in zip(scores, values, strict=True):
            assert got == pytest.approx(there, abs=1e-3)


def test_weights_come_straight_onto_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_model("llama", tmp_path))
    where: list[torch.device] = []

    def put(_name: str, model: torch.nn.Module, _device: torch.device) -> torch.nn.Module:
        where.extend(parameter.device for parameter in model.parameters())
        return model

    monkeypatch.setattr("engine.checkpoint.model.put", put)
    load_model(folder, device=GPU)
    assert set(where) == {torch.device(GPU)}


def test_a_pass_that_is_asked_for_nothing_has_ended_when_it_is_done() -> None:
    def forward(*_: object) -> Output:
        torch.cuda._sleep(1 << 28)
        return Output(torch.zeros(0, 4, device=GPU))

    executor: Any = SimpleNamespace(lay_out=lambda *_: None, forward=forward, num_uncaptured=0)
    heart: Any = SimpleNamespace(
        watch=Stopwatch(time.monotonic_ns), progress=0, begins=lambda rows, s: None
    )
    forwards = Forwards(executor, heart, SimulatedDevice(0.0, 0.0))
    forwards.run([Feed((1,), (5,), (5,), 5, (1,))], [()])
    forwards.done()
    assert torch.cuda.current_stream(GPU).query()
