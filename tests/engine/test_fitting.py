"""What does not fit is refused before memory is taken, and the longest text is what is left."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.accelerate

import engine.checkpoint.model
import engine.memory
import engine.room
from engine.checkpoint.model import (
    AutoModelForCausalLM,
    LoadedModel,
    load_model,
    without_accelerate,
)
from engine.errors import ModelError, OutOfMemory
from engine.forward.cache_tensors import slot_bytes
from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import BLOCK
from engine.memory import (
    _weight_bytes,
    limits,
    longest_text,
    num_lanes_that_fit,
)
from engine.room import PROMPT_ROWS, RANKING_BYTES, Utilization, scored_rows
from node.rows import PREFILL_CHUNKS
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_model("llama", tmp_path_factory.mktemp("model"))), dtype="float32")


def with_room_for(loaded: LoadedModel, slots: int, patch: pytest.MonkeyPatch) -> None:
    """Half of the memory of a CPU, without the weights, is for the cache of a text."""
    room = 2 * slots * slot_bytes(loaded.model, loaded.device)
    in_all(_weight_bytes(loaded) + room, patch)


def in_all(total: int, patch: pytest.MonkeyPatch) -> None:
    """So much memory, of which nobody has taken any."""
    patch.setattr(engine.memory, "total_bytes", lambda _: total)
    patch.setattr(engine.memory, "free_bytes", lambda _: total)


def test_the_longest_text_is_what_the_model_takes_or_the_memory_holds(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = loaded.max_model_len
    assert limit > 300
    with_room_for(loaded, 10 * limit, monkeypatch)
    assert longest_text(loaded, 0) == limit
    assert longest_text(loaded, 100) == 100
    assert longest_text(loaded, 10 * limit) == limit
    with_room_for(loaded, 300 + 128, monkeypatch)
    assert longest_text(loaded, 0) == 300
    assert longest_text(loaded, 200) == 200


def test_the_line_on_memory_says_what_lies_before_windows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_room_for(loaded, 300 + 128, monkeypatch)
    assert longest_text(loaded, 0) == 300
    assert caplog.messages[-1].endswith("memory for texts of 300 tokens, not of 1024")
    kinds = LayerKinds.of([None, AttentionWindow(75), AttentionWindow(75), AttentionWindow(400)])
    longest_text(replace(loaded, kinds=kinds), 0)
    assert "; 38 % of it is for tokens before attention windows" in caplog.messages[-1]


def test_a_length_that_nobody_asked_for_leaves_room_for_others(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = loaded.max_model_len
    monkeypatch.setattr(engine.room, "USUAL_LEN", 300)
    # A quarter of the memory is for 400 tokens of a text and what goes with them.
    with_room_for(loaded, 2 * (400 + 128), monkeypatch)
    assert limit > 500
    assert longest_text(loaded, 0) == 400
    assert longest_text(loaded, 500) == 500, "who asks takes more"
    assert longest_text(loaded, 0, part=0.9) == 300 + 475 - 428
    assert longest_text(loaded, 0, part=0.5) == 300, "fewer are not for care's sake"


def test_the_length_comes_first_and_then_as_many_texts_as_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = loaded.max_model_len
    with_room_for(loaded, 2 * 3 * (limit + 128), monkeypatch)  # a quarter of it is for the cache
    assert limits(loaded, 0, 8) == (limit, 3)
    assert limits(loaded, 0, 2) == (limit, 2)
    assert limits(loaded, limit, 8) == (limit, 6), "half of it, for who asks"
    with_room_for(loaded, 2 * (limit + 128), monkeypatch)
    assert limits(loaded, 0, 8) == (limit, 1)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_limits_are_the_same_whatever_is_free(
    kind: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = slot_bytes(loaded.model, loaded.device)
    monkeypatch.setattr(engine.memory, "slot_bytes", lambda *_: each)
    device = replace(loaded, device=torch.device(kind, 0))
    in_all(16 << 30, monkeypatch)
    found = limits(device, 0, 8)
    for free in (12 << 30, 9 << 30, 8 << 30):
        monkeypatch.setattr(engine.memory, "free_bytes", lambda _, free=free: free)
        assert limits(device, 0, 8) == found
    monkeypatch.setattr(engine.memory, "free_bytes", lambda _: 1 << 10)
    with pytest.raises(OutOfMemory, match=r"and .* has 0.0 GB free; .*end what else") as caught:
        limits(device, 0, 8)
    assert "\n" not in str(caught.value)


def test_what_others_have_taken_is_said_with_what_would_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = slot_bytes(loaded.model, loaded.device)
    monkeypatch.setattr(engine.memory, "slot_bytes", lambda *_: each)
    monkeypatch.setattr(engine.memory, "_mask_bytes", lambda _: 0)
    monkeypatch.setattr(engine.memory, "_scored_bytes", lambda _: 0)
    gpu = replace(loaded, device=torch.device("cuda:0"))
    spare = 192 + BLOCK
    in_all(16 << 30, monkeypatch)
    free = 3 * (1000 + spare) * each
    monkeypatch.setattr(engine.memory, "free_bytes", lambda _: free)
    assert limits(gpu, 1000, 3) == (1000, 3)
    with pytest.raises(OutOfMemory, match=r"for 4 texts of 1000 tokens .*; 3 at once fit"):
        limits(gpu, 1000, 4)
    free = (700 + spare) * each
    with pytest.raises(OutOfMemory, match="; a maximum length of 700 fits"):
        limits(gpu, 1000, 4)
    # The cache of a CPU takes memory only where texts were.
    free = (1000 + 128) * each
    assert limits(loaded, 1000, 4) == (1000, 4)


def test_a_drafter_leaves_room_for_its_target_whatever_length_is_asked_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room_for(loaded, 1000, monkeypatch)
    assert longest_text(loaded, 800) == 800
    with pytest.raises(OutOfMemory, match="a maximum length of 272 fits"):
        longest_text(loaded, 800, part=0.4)
    assert longest_text(loaded, 272, part=0.4) == 272
    assert longest_text(loaded, 0, part=0.4) == 272
    with_room_for(loaded, 8 * (100 + 128), monkeypatch)
    assert limits(loaded, 100, 8) == (100, 8)
    assert limits(loaded, 100, 8, part=0.5) == (100, 4)


def test_what_the_user_says_is_the_share_of_the_device_for_weights_and_cache(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, weights = slot_bytes(loaded.model, loaded.device), _weight_bytes(loaded)
    cache = 8 * (200 + 128) * each
    in_all(4 * (weights + cache), monkeypatch)
    quarter = Utilization(0.25)
    assert longest_text(loaded, 0, utilization=quarter) == loaded.max_model_len
    assert limits(loaded, 200, 99, utilization=quarter) == (200, 8), "all of it, not the half"
    assert limits(loaded, 200, 99)[1] > 8, "half of the device, if nobody says"
    in_all(4 * (weights + (300 + 128) * each), monkeypatch)
    assert longest_text(loaded, 0, utilization=quarter) == 300, "as long as there is room for"
    assert longest_text(loaded, 300, utilization=quarter) == 300
    line = "; a maximum length of 300 fits, or raise --gpu-memory-utilization, which is 0.25$"
    with pytest.raises(OutOfMemory, match=line):
        longest_text(loaded, 301, utilization=quarter)
    in_all(2 * weights, monkeypatch)
    with pytest.raises(
        OutOfMemory, match=r"has 0\.0 GB for it; raise --gpu-memory-utilization, which is 0\.4$"
    ):
        longest_text(loaded, 0, utilization=Utilization(0.4))


def test_two_models_on_one_device_keep_to_the_share_together(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, weights = slot_bytes(loaded.model, loaded.device), _weight_bytes(loaded)
    caches = 10 * (200 + 128) * each
    total = 2 * (2 * weights + caches)
    in_all(total, monkeypatch)
    half = Utilization(0.5, peer_bytes=weights)
    lanes = [limits(loaded, 200, 99, part=part, utilization=half)[1] for part in (0.6, 0.4)]
    assert lanes == [6, 4]
    assert 2 * weights + sum(lanes) * (200 + 128) * each <= total // 2


def test_the_weights_of_the_other_model_are_reserved_before_a_cache_is_made(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room_for(loaded, 1000, monkeypatch)
    assert longest_text(loaded, 0, part=0.4) == 272
    peer = 500 * slot_bytes(loaded.model, loaded.device)  # a quarter of what is beside the weights
    shared = Utilization(peer_bytes=peer)
    with pytest.raises(OutOfMemory):
        longest_text(loaded, 0, part=0.4, utilization=shared)
    assert longest_text(loaded, 0, utilization=shared) == 750 - 128


def test_ranks_on_a_cpu_divide_what_the_user_says(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, weights = slot_bytes(loaded.model, loaded.device), _weight_bytes(loaded)
    in_all(2 * 2 * (weights + (300 + 128) * each), monkeypatch)
    one_of_two = replace(loaded, rank=SimpleNamespace(count=2, followers=None))
    assert longest_text(one_of_two, 0, utilization=Utilization(0.5)) == 300


def test_the_mask_of_a_prompt_is_in_the_budget_of_a_gpu(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PREFILL_CHUNKS["cuda"] == PROMPT_ROWS
    cpu, gpu = loaded, replace(loaded, device=torch.device("cuda:0"))
    each = slot_bytes(cpu.model, cpu.device)
    monkeypatch.setattr(engine.memory, "slot_bytes", lambda *_: each)
    masks = 2048 * 4 * 3  # float32, once, and once for each of two query heads
    spare = 192 + BLOCK
    scored = (
        2048 * loaded.vocab_size * 8 + RANKING_BYTES
    )  # logits in two types, and what ranks them
    monkeypatch.setattr(engine.room, "SHARES", {"cuda": 1.0})
    free = (400 + spare) * (each + masks) + scored + _weight_bytes(gpu)
    in_all(free, monkeypatch)
    assert longest_text(gpu, 400) == 400
    with pytest.raises(OutOfMemory, match="a maximum length of 400 fits"):
        longest_text(gpu, 401)
    beside = 2 * ((100 + spare) * (3 * each + masks) + scored)
    in_all(beside + _weight_bytes(gpu), monkeypatch)
    assert num_lanes_that_fit(gpu, 100, 8, room=beside // 2) == 3
    assert num_lanes_that_fit(cpu, 100, 8, room=beside // 2) == 8
    windowed = replace(gpu, kinds=LayerKinds.of([None, AttentionWindow(75)]))
    in_all(free + (400 + spare) * masks, monkeypatch)
    assert longest_text(windowed, 400) == 400, "with masks for both kinds of layers"
    with pytest.raises(OutOfMemory, match="a maximum length of 400 fits"):
        longest_text(windowed, 401)


def test_logits_of_a_prompt_that_is_scored_have_a_limit_whatever_the_vocabulary() -> None:
    assert [scored_rows(size) for size in (200, 32_000, 151_936, 262_144)] == [2048, 2048, 256, 256]
    assert 4 * 2048 * 32_000 <= 256 << 20
    assert scored_rows(10_000_000) == 64, "fewer are filled up to as many"


def test_a_text_that_was_asked_for_and_does_not_fit_is_refused_with_one_that_does(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room_for(loaded, 300 + 128, monkeypatch)
    with pytest.raises(OutOfMemory, match="a maximum length of 300 fits") as caught:
        longest_text(loaded, 301)
    assert "\n" not in str(caught.value)
    with_room_for(loaded, 140, monkeypatch)
    with pytest.raises(OutOfMemory, match="use a smaller model"):
        longest_text(loaded, 0)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_model("llama", tmp_path))
    needed = 4 * load_model(folder, dtype="float32").num_parameters
    monkeypatch.setattr(
        engine.checkpoint.model, "read_weights", lambda *_, **__: pytest.fail("they were read")
    )
    monkeypatch.setattr(engine.checkpoint.model, "free_bytes", lambda _: needed - 1)
    with pytest.raises(OutOfMemory, match=r"take .* GB in float32, and cpu has .* GB free"):
        load_model(folder, dtype="float32")
    monkeypatch.setattr(engine.checkpoint.model, "free_bytes", lambda _: needed // 2)
    with pytest.raises(pytest.fail.Exception, match="they were read"):
        load_model(folder, dtype="bfloat16")


def test_weights_are_read_straight_onto_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    class Loader(AutoModelForCausalLM):
        @staticmethod
        def from_pretrained(*_: object, **options: object) -> None:
            asked.update(options)
            raise ValueError("far enough")

    monkeypatch.setattr(engine.checkpoint.model, "AutoModelForCausalLM", Loader)
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(engine.checkpoint.model, "claim", lambda _: gpu)
    monkeypatch.setattr(engine.checkpoint.model, "free_bytes", lambda _: 1 << 40)
    with pytest.raises(ModelError, match="far enough"):
        load_model(str(make_model("llama", tmp_path)), device="cuda:0")
    assert asked["device_map"] == {"": gpu}


def test_one_device_needs_no_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks: Any = transformers.integrations.accelerate
    monkeypatch.setattr(asks, "is_accelerate_available", lambda: False)
    folder = str(make_model("llama", tmp_path))
    want = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    cpu = {"": torch.device("cpu")}
    with pytest.raises(ValueError, match="requires `accelerate`"):
        AutoModelForCausalLM.from_pretrained(folder, device_map=cpu)
    with without_accelerate():
        got = AutoModelForCausalLM.from_pretrained(folder, device_map=cpu).state_dict()
    assert not asks.is_accelerate_available()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
