"""A target's layer for multi-token prediction, against rows that are computed one by one."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.heads.head_loading import LoadedHead, load_head, load_head_engine
from engine.heads.mtp_executor import MtpExecutor
from engine.heads.waves import Slots
from engine.layout.slots import Feed, Move, SlotMap
from engine.loading import Engine, make_executor
from proto.head_kinds import MTP, HeadKind
from tests.engine.heads.paths import (
    CAPACITY,
    Paths,
    as_bytes,
    assert_close,
    compare,
    features_of,
    run,
)
from tests.engine.heads.plain import Given
from tests.engine.random_session import Drawn, RandomSession
from tests.mtp import COPIES, FAMILIES, NUM_LAYERS, PLAINLY, QWEN, SIZE, VOCAB, Plain, wrap
from tests.packed_models import RECIPES, save_packed
from tests.tiny_models import MAX_POSITIONS

Loaded = tuple[LoadedHead, Plain, Folder]
# Families whose checkpoints may have several layers in a row, and how many here.
IN_A_ROW = {"deepseek_v3": 3, "glm4_moe": 2, "glm4_moe_lite": 2, "hy_v3": 3, "mimo_v2_flash": 3}


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """mtp(family, layers): the layers in float32, the same plainly, and the target's folder."""
    made: dict[tuple[str, int], Loaded] = {}

    def get(family: str, num_layers: int = 1) -> Loaded:
        key = family, num_layers
        if key not in made:
            plain = Plain(family, num_layers)
            folder = plain.save(tmp_path_factory.mktemp(family))
            made[key] = load_head(MTP, target=str(folder), dtype="float32"), plain, folder
        return made[key]

    return get


def engine_of(folder: Folder, **options: Any) -> Engine:
    """The engine of the layer in a target's folder."""
    return load_head_engine(
        MTP,
        revision=None,
        target=str(folder),
        target_revision=None,
        dtype="auto",
        device="cpu",
        max_len=64,
        warm_rows=(1, 2),
        say=lambda _: None,
        **options,
    )


@pytest.mark.parametrize(
    ("family", "num_layers"), [*((family, 1) for family in FAMILIES), *IN_A_ROW.items()]
)
def test_trees_and_roll_backs_with_what_is_known_of_each_row(
    family: str, num_layers: int, mtp: Callable[..., Loaded]
) -> None:
    loaded, plain, _ = mtp(family, num_layers)
    executor = MtpExecutor(loaded, CAPACITY)
    session = RandomSession(1, SlotMap(CAPACITY), vocab=VOCAB, prompt_len=70, max_rows=6)
    num_moves, num_there, num_absent = compare(executor, session.steps(16), Paths(plain), seed=1)
    assert num_moves > 1
    assert num_there > 60
    assert num_absent > 3


def test_a_row_that_starts_from_another_layers_state_is_found(
    mtp: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain, _ = mtp("glm4_moe", 2)
    monkeypatch.setattr(Slots, "_source", lambda slots, _: slots._last)
    session = RandomSession(1, SlotMap(CAPACITY), vocab=VOCAB, prompt_len=9, max_rows=6)
    with pytest.raises(AssertionError):
        compare(MtpExecutor(loaded, CAPACITY), session.steps(16), Paths(plain), seed=1)


def test_a_last_layer_that_is_not_run_again_is_found(
    mtp: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain, _ = mtp("glm4_moe", 2)
    right = Slots._runs

    def without_the_last(slots: Slots, before: int, *, is_given: bool) -> int:
        return right(slots, before & 1, is_given=is_given)

    monkeypatch.setattr(Slots, "_runs", without_the_last)
    session = RandomSession(1, SlotMap(CAPACITY), vocab=VOCAB, prompt_len=9, max_rows=6)
    with pytest.raises(AssertionError):
        compare(MtpExecutor(loaded, CAPACITY), session.steps(16), Paths(plain), seed=1)


def test_more_layers_than_are_covered_are_refused(
    mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    path = mtp("glm4_moe")[1].save(tmp_path) / "config.json"
    many = {"num_nextn_predict_layers": 9}
    path.write_text(json.dumps(json.loads(path.read_text()) | many))
    with pytest.raises(ModelError, match="9 layers for multi-token prediction, and 1 to 8"):
        load_head(MTP, target=str(tmp_path), dtype="float32")


@pytest.mark.parametrize(
    ("family", "num_layers"),
    [("deepseek_v3", 1), ("mellum", 1), ("qwen3_5_text", 1), ("deepseek_v3", 3)],
)
def test_texts_in_several_lanes_do_not_see_each_other(
    family: str, num_layers: int, mtp: Callable[..., Loaded]
) -> None:
    loaded, plain, _ = mtp(family, num_layers)
    executor = MtpExecutor(loaded, CAPACITY, num_lanes=2)
    slots = [SlotMap[tuple[int, ...]](CAPACITY, lane=lane) for lane in range(2)]
    sessions = [
        RandomSession(lane, slots[lane], vocab=VOCAB, prompt_len=9 + lane, max_rows=1 + lane)
        for lane in range(2)
    ]
    paths = [Paths(plain) for _ in sessions]
    for steps in zip(*(one.steps(8, shorten=False) for one in sessions), strict=False):
        if moves := [step for step in steps if isinstance(step, Move)]:
            executor.move(*moves)
        feeds, wanted = [], []
        for step in (step for step in steps if isinstance(step, Drawn)):
            given = [features_of(loaded, path) if len(path) % 3 else b"" for path in step.paths]
            feeds.append(replace(step.feed, features=tuple(map(as_bytes, given))))
            wanted += [
                paths[step.feed.lane].feed(*one) for one in zip(step.paths, given, strict=True)
            ]
        if not feeds:
            continue
        asks = [range(len(feed.tokens)) for feed in feeds]
        for got, want in zip(executor.run_together(feeds, asks), wanted, strict=True):
            if want is not None:
                assert_close(got, want)


@pytest.mark.parametrize(
    ("family", "num_layers"), [("deepseek_v3", 1), ("qwen3_next", 1), ("glm4_moe", 2)]
)
def test_a_prefix_is_copied_and_a_lane_is_wiped(
    family: str, num_layers: int, mtp: Callable[..., Loaded]
) -> None:
    loaded, plain, _ = mtp(family, num_layers)
    executor, paths = MtpExecutor(loaded, CAPACITY, num_lanes=2), Paths(plain)
    text = (1, 2, 3, 4)
    where, above = (0, 1, 2, 3), [text[: i + 1] for i in range(4)]
    given: list[Given] = [None, *(features_of(loaded, path) for path in above[1:])]
    run(executor, Drawn(Feed(text, where, where, 0, None), above), given, paths)
    executor.copy_prefix(0, 1, 4)
    row = Feed((9,), (4,), (4,), 4, (1,), lane=1)
    assert run(executor, Drawn(row, [(*text, 9)]), [b""], paths) == 1
    for buffer in executor._keys.buffers.values():
        with torch.inference_mode():
            buffer.fill_(float("nan"))
    executor.wipe(1, 0)
    first = Feed((9,), (1,), (1,), 0, (2,), 1, before=(0,), features=(bytes(4 * SIZE),))
    assert executor.run(first, (0,)).isfinite().all()


def test_an_engine_of_it_has_the_targets_sizes(mtp: Callable[..., Loaded]) -> None:
    _, _, folder = mtp("glm4_moe")
    engine = engine_of(folder, num_lanes=2, quantization="int8")
    loaded = engine.loaded
    assert isinstance(loaded, LoadedHead)
    assert (loaded.kind, loaded.layers, loaded.vocab_size) == (HeadKind.MTP, (-1,), VOCAB)
    assert (loaded.feature_size, loaded.max_model_len) == (SIZE, MAX_POSITIONS)
    assert loaded.dtype is torch.float32
    assert set(engine.pass_s) == {1, 2}
    engine.executor.free()


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_runs_in_the_types_that_the_target_has(
    family: str, mtp: Callable[..., Loaded]
) -> None:
    loaded = load_head(MTP, target=str(mtp(family)[2]), dtype="bfloat16")
    assert loaded.dtype is torch.bfloat16
    row = Feed((7,), (1,), (1,), 1, (1,), before=(0,), features=(bytes(4 * SIZE),))
    assert MtpExecutor(loaded, 96).run(row, (0,)).isfinite().all()


def test_the_target_itself_does_not_read_it(mtp: Callable[..., Loaded]) -> None:
    for family in ("deepseek_v3", "mellum", *QWEN):
        target = load_model(str(mtp(family)[2]), dtype="float32")
        assert target.num_layers == NUM_LAYERS


@pytest.mark.parametrize("family", QWEN)
def test_its_feature_is_what_the_targets_output_matrix_reads(
    family: str, mtp: Callable[..., Loaded]
) -> None:
    loaded, plain, folder = mtp(family)
    target = make_executor(load_model(str(folder), dtype="float32"), CAPACITY, layers=loaded.layers)
    feed = Feed((7, 3, 9), (0, 1, 2), (0, 1, 2), 0, None)
    features = target.forward(target.lay_out([feed], [()]), loaded.layers).features
    assert features is not None
    with torch.inference_mode():
        inner = copy.deepcopy(plain.whole.model)
        del inner.layers[NUM_LAYERS]  # the one for drafting
        inner.config.num_hidden_layers = NUM_LAYERS
        want = inner(torch.tensor([[7, 3, 9]]), use_cache=False).last_hidden_state[0]
    assert (features - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_text"])
def test_in_a_model_of_several_modalities_it_is_the_same_layer(
    family: str, mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    loaded, plain, _ = mtp(family)
    wrapped = load_head(MTP, target=str(wrap(plain.save(tmp_path))), dtype="float32")
    assert_same(loaded, wrapped)


@pytest.mark.parametrize(
    ("family", "recipe", "plainly"),
    [
        ("deepseek_v3", "fp8-block", PLAINLY),
        ("deepseek_v3", "fp8-block", (*PLAINLY, "eh_proj")),
        ("glm4_moe", "compressed-channel", PLAINLY),
        ("glm4_moe", "pack", PLAINLY),
        ("glm4_moe", "nvfp4", PLAINLY),
        ("deepseek_v3", "gptq", (*PLAINLY, f"layers.{NUM_LAYERS}.")),
        ("qwen3_5_text", "awq", (*PLAINLY, "mtp.", "conv1d", "in_proj_a", "in_proj_b")),
        ("qwen3_5_text", "fp8-block", (*PLAINLY, "mtp.fc", "conv1d", "in_proj_a", "in_proj_b")),
    ],
)
def test_of_a_quantised_target_it_is_read_in_its_format(
    family: str,
    recipe: str,
    plainly: tuple[str, ...],
    mtp: Callable[..., Loaded],
    tmp_path: Folder,
) -> None:
    _, _, folder = mtp(family)
    packed, plain = save_packed(folder, tmp_path, RECIPES[recipe], plainly=plainly, num_files=2)
    assert_same(*(load_head(MTP, target=str(one), dtype="float32") for one in (plain, packed)))
    assert load_model(str(packed), dtype="float32").num_layers == NUM_LAYERS


def test_in_a_quantised_model_of_several_modalities_too(
    mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    source = wrap(mtp("qwen3_5_text")[1].save(tmp_path / "source"))
    plainly = (*PLAINLY, "mtp.fc", "conv1d", "in_proj_a", "in_proj_b", "visual")
    packed, plain = save_packed(source, tmp_path, RECIPES["fp8-block"], plainly=plainly)
    assert_same(*(load_head(MTP, target=str(one), dtype="float32") for one in (plain, packed)))


def test_experts_that_the_files_have_in_one_tensor_are_read_too(
    mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    loaded, plain, _ = mtp("qwen3_5_moe_text")
    file = plain.save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    prefix, num_experts = "mtp.layers.0.mlp.experts.", 8

    def taken(matrix: str) -> torch.Tensor:
        names = [f"{prefix}{expert}.{matrix}.weight" for expert in range(num_experts)]
        return torch.stack([tensors.pop(name) for name in names])

    entering = torch.cat((taken("gate_proj"), taken("up_proj")), dim=1)
    packed = {f"{prefix}gate_up_proj": entering, f"{prefix}down_proj": taken("down_proj")}
    assert not any(name.startswith(prefix) for name in tensors)
    save_file(tensors | packed, file)
    assert_same(loaded, load_head(MTP, target=str(tmp_path), dtype="float32"))


def test_of_several_layers_that_share_a_first_matrix_the_first_one_is_read(
    mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    loaded, plain, _ = mtp("qwen3_5_text")
    file = plain.save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    first = "mtp.layers.0."
    second = {
        name.replace(first, "mtp.layers.1."): torch.randn(one.shape)
        for name, one in tensors.items()
        if name.startswith(first)
    }
    save_file(tensors | second, file)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_num_hidden_layers": 2}))
    assert_same(loaded, load_head(MTP, target=str(tmp_path), dtype="float32"))


def assert_same(one: LoadedHead, other: LoadedHead) -> None:
    """Two layers have equally many weights and make the same logits of a row."""
    assert one.num_parameters == other.num_parameters
    value = features_of(one, (1, 2)).numpy().tobytes()
    row = Feed((7,), (1,), (1,), 1, (1,), before=(0,), features=(value,))
    assert_close(*(MtpExecutor(loaded, CAPACITY).run(row, (0,))[0] for loaded in (one, other)))


def test_a_target_whose_config_leaves_out_its_last_layer_is_no_such_target(
    tmp_path: Folder,
) -> None:
    plain = Plain("glm4_moe")
    plain.extra = [{}]
    folder = plain.save(tmp_path)
    path = folder / "config.json"
    assert json.loads(path.read_text())["num_nextn_predict_layers"] == 1
    file = folder / "model.safetensors"
    copies = [f"model.layers.{NUM_LAYERS}.{name}" for name in COPIES["glm4_moe"]]
    save_file({n: one for n, one in load_file(file).items() if n not in copies}, file)
    with pytest.raises(ModelError, match="leaves out"):
        load_model(str(folder), dtype="float32")


def test_a_target_without_one_says_so(mtp: Callable[..., Loaded], tmp_path: Folder) -> None:
    plain = mtp("glm4_moe")[1]
    plain.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        load_head(MTP, target=str(tmp_path))


@pytest.mark.parametrize("missing", ["eh_proj.weight", "self_attn.o_proj.weight"])
def test_a_tensor_that_is_missing_is_named(
    missing: str, mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    mtp("glm4_moe")[1].save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.{NUM_LAYERS}.{missing}"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")) as told:
        load_head(MTP, target=str(tmp_path), dtype="float32")
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    "missing", ["fc", "pre_fc_norm_hidden", "norm", "layers.0.self_attn.o_proj"]
)
def test_a_tensor_that_is_missing_is_named_as_in_the_files(
    missing: str, mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    file = mtp("qwen3_next")[1].save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"mtp.{missing}.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError) as told:
        load_head(MTP, target=str(tmp_path), dtype="float32")
    line = f"its layer for multi-token prediction lacks mtp.{missing}.weight; get it again"
    assert str(told.value) == f"{tmp_path}: {line}"


def test_one_with_embeddings_of_its_own_is_refused(
    mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    path = mtp("qwen3_5_text")[1].save(tmp_path) / "config.json"
    own = {"mtp_use_dedicated_embeddings": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(ModelError, match="its own embeddings"):
        load_head(MTP, target=str(tmp_path), dtype="float32")


@pytest.mark.parametrize("odd", ["eh_proj.weight", "hnorm.weight", "self_attn.o_proj.weight"])
def test_a_tensor_of_another_shape_is_refused(
    odd: str, mtp: Callable[..., Loaded], tmp_path: Folder
) -> None:
    mtp("glm4_moe")[1].save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.{NUM_LAYERS}.{odd}"
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, file)
    with pytest.raises(ModelError) as told:
        load_head(MTP, target=str(tmp_path), dtype="float32")
    assert len(str(told.value).splitlines()) == 1
    assert "other shapes than config.json states" in str(told.value)


def test_one_that_is_not_finite_is_refused(mtp: Callable[..., Loaded], tmp_path: Folder) -> None:
    mtp("glm4_moe")[1].save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.{NUM_LAYERS}.eh_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match="not finite"):
        engine_of(tmp_path)
