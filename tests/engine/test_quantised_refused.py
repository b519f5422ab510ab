"""Quantised checkpoints that are not covered, or not whole: each is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.model import load_model
from engine.errors import ModelError
from tests.engine.conftest import Folder
from tests.engine.test_quantised import Q_PROJ, change
from tests.packed_models import RECIPES, save_packed

Tensors = dict[str, torch.Tensor]
STATE = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"
COVERED = "are covered: use one of these"


@pytest.fixture(scope="module")
def made(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A packed model of every kind that is spoilt here."""
    out = tmp_path_factory.mktemp("packed")
    kinds = "gptq", "awq", "fp8-block", "compressed-channel", "nf4", "nf4-double"
    kinds += "pack-zeros", "pack-act-order", "nvfp4", "nvfp4-compressed"
    return {kind: save_packed(folder("llama"), out / kind, RECIPES[kind])[0] for kind in kinds}


@pytest.fixture
def spoilt(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """spoilt(kind): a copy of that model."""

    def copy(kind: str) -> Path:
        out = tmp_path / "model"
        out.mkdir()
        for path in made[kind].iterdir():
            (out / path.name).write_bytes(path.read_bytes())
        return out

    return copy


def refusal(folder: Path) -> str:
    """The one line, without the name of the folder."""
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(folder))
    return text.removeprefix(f"{folder}/")


def state(folder: Path, fields: dict[str, Any], *inside: str) -> None:
    """Change quantization_config in config.json, or an object in it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    part = config["quantization_config"]
    for name in inside:
        part = part[name]
    part |= fields
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "fields", "line"),
    [
        ("gptq", {"quant_method": "hqq"}, f'quant_method is "hqq"; fp8, .*{COVERED}'),
        ("gptq", {"quant_method": None}, "quant_method is null; fp8,"),
        ("gptq", {"quant_method": ["gptq"]}, 'quant_method is \\["gptq"\\]; fp8,'),
        ("gptq", {"bits": 3}, "bits is 3; only 4 or 8 is covered"),
        ("gptq", {"bits": 4.0}, "bits is 4.0; only 4 or 8 is covered"),
        ("gptq", {"bits": None}, "bits is null; only 4 or 8 is covered"),
        ("gptq", {"group_size": 0}, "group_size is 0; it must be a whole number from 1 on, or -1"),
        ("gptq", {"group_size": "x"}, 'group_size is "x"; it must be'),
        ("gptq", {"group_size": 10**30}, "group_size is 1000.*; it must be"),
        ("gptq", {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; only "gptq" or'),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format is true; use the checkpoint in"),
        ("gptq", {"dynamic": {"q_proj": {"bits": 8}}}, "dynamic is .*; layers of other bits"),
        ("awq", {"version": "gemv"}, 'version is "gemv"; only "gemm" or'),
        ("awq", {"bits": 8}, "bits is 8; only 4 is covered"),
        ("awq", {"zero_point": False}, "zero_point is false; only true is covered"),
        ("awq", {"group_size": -2}, "group_size is -2; it must be"),
        ("fp8-block", {"weight_block_size": [0, 32]}, "weight_block_size is \\[0, 32\\]; it must"),
        ("fp8-block", {"weight_block_size": 32}, "weight_block_size is 32; it must be two whole"),
        ("fp8-block", {"scale_fmt": "x"}, 'scale_fmt is "x"; only "float" or "ue8m0" is'),
        ("compressed-channel", {"format": "marlin-24"}, 'format is "marlin-24"; only'),
        ("compressed-channel", {"format": "pack-quantized"}, 'type is "float"; only "int" is'),
        ("compressed-channel", {"config_groups": None}, "config_groups is null; it must be an"),
        ("compressed-channel", {"config_groups": {"a": 3}}, "config_groups.a is 3; it must be an"),
        ("compressed-channel", {"sparsity_config": {"format": "2:4"}}, 'format is "2:4"; only'),
        ("pack-zeros", {"format": "int-quantized"}, 'format is "int-quantized"; only "float-qua'),
        ("pack-zeros", {"format": "float-quantized"}, "num_bits is 4; only 8 is covered"),
        ("pack-zeros", {"config_groups": {}}, "config_groups is {}; it must name a group"),
        ("nvfp4", {"quant_algo": "INT4_AWQ"}, 'quant_algo is "INT4_AWQ"; only FP8, .* and NVFP4'),
        ("nvfp4", {"quant_algo": None}, "quant_algo is null; only FP8, .* and NVFP4 are covered"),
        ("nvfp4", {"quant_algo": 4}, "quant_algo is 4; only FP8, .* and NVFP4 are covered"),
        ("nvfp4", {"group_size": 32}, "group_size is 32; only 16 is covered"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, 'bnb_4bit_quant_type is "fp4"; only "nf4" is'),
        ("nf4", {"load_in_8bit": True}, f"load_in_8bit is true; fp8, .*{COVERED}"),
        ("nf4", {"load_in_4bit": None}, "load_in_4bit is null; fp8,"),
    ],
)
def test_a_packing_that_is_not_covered_is_refused(
    kind: str, fields: dict[str, Any], line: str, spoilt: Callable[[str], Path]
) -> None:
    folder = spoilt(kind)
    state(folder, fields)
    text = refusal(folder)
    assert text.startswith("config.json: quantization_config.")
    with pytest.raises(ModelError, match=line):
        load_model(str(folder))


def test_compressed_weights_of_another_type_are_refused(spoilt: Callable[[str], Path]) -> None:
    folder = spoilt("compressed-channel")
    state(folder, {"type": "int"}, "config_groups", "group_0", "weights")
    want = 'config.json: quantization_config.config_groups.group_0.weights.type is "int"; only'
    assert refusal(folder).startswith(want)


def test_packed_groups_of_other_bits_or_formats_are_refused(
    spoilt: Callable[[str], Path],
) -> None:
    folder = spoilt("pack-zeros")
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    for group, line in (
        ({"weights": eight}, "b.weights.num_bits is 8; only 4 is covered"),
        ({"weights": eight | {"num_bits": 3}}, "b.weights.num_bits is 3; only 4 or 8 is covered"),
        ({"weights": eight, "format": "float-quantized"}, 'b.format is "float-quantized"; the oth'),
        ({"weights": {"num_bits": 4}}, "b.weights.group_size is null; it must be"),
        ({"weights": {"num_bits": 4, "strategy": "token"}}, 'strategy is "token"; only "channel"'),
    ):
        state(folder, {"b": group}, "config_groups")
        assert line in refusal(folder)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"quant_algo": "W4A8_AWQ"}, 'it.quantization.quant_algo is "W4A8_AWQ"; only FP8, FP8_P'),
        (None, "it.quantization is null; it must be an object"),
    ],
)
def test_what_modelopt_says_in_a_file_of_its_own_is_refused_there(
    content: object, line: str, spoilt: Callable[[str], Path]
) -> None:
    folder = spoilt("nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": content}))
    assert refusal(folder).startswith(f"hf_quant_config.json: {line}")


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    """Another tensor in the place of one, or a new one."""
    return lambda tensors: tensors.update({f"{Q_PROJ}.{name}": value})


def without(*names: str) -> Callable[[Tensors], None]:
    """Without tensors of a layer."""
    return lambda tensors: [tensors.pop(f"{Q_PROJ}.{name}") for name in names] and None


def at(name: str, value: float) -> Callable[[Tensors], None]:
    """A number in the first place of a tensor."""
    return lambda tensors: tensors[f"{Q_PROJ}.{name}"].view(-1)[:1].fill_(value) and None


def said(**fields: object) -> Callable[[Tensors], None]:
    """Other fields in what a weight says of itself."""

    def edit(tensors: Tensors) -> None:
        content = json.loads(bytes(tensors[STATE].tolist())) | fields
        tensors[STATE] = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)

    return edit


BYTES = torch.zeros(3, dtype=torch.uint8)
AGAIN = "; get the checkpoint again"


WRONG_LAYERS: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("gptq", without("scales"), f"scales is missing{AGAIN}"),
    ("gptq", without("qzeros"), f"qzeros is missing{AGAIN}"),
    ("gptq", without("qweight"), f"qweight is missing{AGAIN}"),
    ("gptq", replaced("scales", torch.ones(1, 64)), "scales is [1, 64], it must be [2, 64]"),
    ("gptq", replaced("qzeros", torch.ones(2, 9).int()), "qzeros is [2, 9], it must be [2, 8]"),
    ("gptq", replaced("g_idx", torch.ones(8).int()), "g_idx is [8], it must be [64]"),
    ("gptq", replaced("qweight", torch.ones(8).int()), "qweight is [8], it must be a matrix"),
    ("gptq", replaced("qweight", torch.ones(8, 9).int()), "qweight has 9 columns of 4 bits"),
    ("gptq", at("scales", float("nan")), "scales holds NaN or infinity"),
    ("gptq", at("scales", float("inf")), "scales holds NaN or infinity"),
    ("gptq", at("g_idx", 2), "g_idx names group 2, there are 2"),
    ("gptq", at("g_idx", -1), "g_idx names group -1, there are 2"),
    ("awq", without("scales"), f"scales is missing{AGAIN}"),
    ("awq", replaced("qzeros", torch.ones(1, 8).int()), "qzeros is [1, 8], it must be [2, 8]"),
    ("awq", replaced("qweight", torch.ones(65, 8).int()), "qweight has 65 rows, no whole"),
    ("awq", at("scales", float("nan")), "scales holds NaN or infinity"),
    (
        "fp8-block",
        replaced("weight_scale_inv", torch.ones(3, 2)),
        "weight_scale_inv is [3, 2], which is no scale for the tensor, a row, or a block of 32x32",
    ),
    (
        "compressed-channel",
        replaced("weight_scale", torch.ones(3, 2)),
        "weight_scale is [3, 2], which is no scale for the tensor or a row of its weight",
    ),
    ("fp8-block", replaced("weight_scale", torch.ones(2, 2)), "it has 2 of weight_scale_inv"),
    ("fp8-block", at("weight_scale_inv", float("nan")), "weight_scale_inv holds NaN"),
    ("pack-zeros", without("weight_scale"), f"weight_scale is missing{AGAIN}"),
    ("pack-zeros", without("weight_packed"), f"weight_packed is missing{AGAIN}"),
    ("pack-zeros", without("weight_zero_point"), f"weight_zero_point is missing{AGAIN}"),
    (
        "pack-zeros",
        replaced("weight_scale", torch.ones(64, 3)),
        "weight_scale is [64, 3], it must be [64, 2]",
    ),
    (
        "pack-zeros",
        replaced("weight_zero_point", torch.ones(64, 2).int()),
        "weight_zero_point is [64, 2], it must be [8, 2]",
    ),
    ("pack-act-order", at("weight_g_idx", 2), "weight_g_idx names group 2, there are 2"),
    ("pack-zeros", at("weight_scale", float("nan")), "weight_scale holds NaN or infinity"),
    ("nvfp4", without("weight_scale"), f"weight_scale is missing{AGAIN}"),
    ("nvfp4", without("weight_scale_2"), f"weight_scale_2 is missing{AGAIN}"),
    ("nvfp4", without("weight"), f"weight is missing{AGAIN}"),
    ("nvfp4", replaced("weight_scale_2", torch.ones(2)), "weight_scale_2 is [2], it must be"),
    ("nvfp4", at("weight_scale_2", float("inf")), "weight_scale_2 holds NaN or infinity"),
    ("nvfp4", at("weight_scale_2", 1e38), "weight_scale and weight_scale_2 together are inf"),
    (
        "nvfp4",
        replaced("weight_scale", torch.ones(64, 2).to(torch.float8_e4m3fn)),
        "weight_scale is [64, 2], it must be [64, 4]",
    ),
    (
        "nvfp4",
        replaced("weight", torch.ones(64, 33).to(torch.uint8)),
        "weight has 33 columns of two numbers, no groups of 16",
    ),
    ("nvfp4-compressed", at("weight_global_scale", 0.0), "weight_global_scale is 0"),
    ("nf4", without("weight.absmax"), f"weight.absmax is missing{AGAIN}"),
    ("nf4", without("weight.quant_map"), "weight.quant_map is missing"),
    ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "bitsandbytes__nf4 is missing"),
    ("nf4", without("weight"), "weight is missing"),
    ("nf4", replaced("weight.absmax", torch.ones(7)), "absmax is [7], it must be [64]"),
    ("nf4", replaced("weight", BYTES[:, None]), "weight has 3 bytes, it must have half of"),
    ("nf4", at("weight.absmax", float("nan")), "weight.absmax holds NaN"),
    ("nf4", said(shape=[64, 10**12]), "shape must be two whole numbers from 1 on"),
    ("nf4", said(shape=[64, 65]), "weight has 2048 bytes, it must have half of [64, 65]"),
    ("nf4", said(blocksize=0), "blocksize must be a whole number from 1 on"),
    ("nf4", replaced("weight.quant_state.bitsandbytes__nf4", BYTES), "is no JSON"),
    ("nf4-double", without("weight.nested_absmax"), "weight.nested_absmax is missing"),
    (
        "nf4-double",
        without("weight.nested_absmax", "weight.nested_quant_map"),
        "weight.absmax is of bytes, and has no weight.nested_absmax",
    ),
    ("nf4-double", said(nested_offset=None), "nested_offset must be a finite number"),
    (
        "nf4-double",
        replaced("weight.absmax", torch.ones(64)),
        "weight.absmax is of no bytes, and has weight.nested_absmax",
    ),
]


@pytest.mark.parametrize(("kind", "edit", "line"), WRONG_LAYERS)
def test_tensors_of_a_layer_that_do_not_belong_together_are_refused(
    kind: str, edit: Callable[[Tensors], None], line: str, spoilt: Callable[[str], Path]
) -> None:
    folder = spoilt(kind)
    change(folder, edit)
    text = refusal(folder)
    assert text.startswith(f"model.safetensors: {Q_PROJ}: "), text
    assert line in text


@pytest.mark.parametrize(
    ("kind", "edit", "line"),
    [
        ("gptq", replaced("qweight", torch.ones(8, 64)), "q_proj.qweight is F32, it must be I32"),
        ("nvfp4", replaced("weight_scale", torch.ones(64, 4)), "is F32, it must be F8_E4M3"),
        ("nvfp4", without("weight_scale", "weight_scale_2"), "q_proj.weight is U8 and has no sca"),
        ("nvfp4", replaced("pre_quant_scale", torch.ones(64)), "it leaves out 1 tensors of the"),
        ("pack-zeros", replaced("weight_packed", torch.ones(64, 8)), "is F32, it must be I32"),
        ("nf4", without("weight.absmax", STATE.removeprefix(f"{Q_PROJ}.")), "is U8 and has no sca"),
        ("fp8-block", without("weight_scale_inv"), "q_proj.weight is F8_E4M3 and has no scales"),
        ("gptq", replaced("bias", torch.ones(64)), "it leaves out 1 tensors of the checkpoint"),
        ("gptq", replaced("more.weight", torch.ones(2)), "it leaves out 1 tensors"),
        (
            "gptq",
            without("qweight", "qzeros", "scales", "g_idx"),
            f"lacks 1 tensors of this model, {Q_PROJ}.weight first",
        ),
    ],
)
def test_tensors_that_do_not_belong_to_the_model_are_refused(
    kind: str, edit: Callable[[Tensors], None], line: str, spoilt: Callable[[str], Path]
) -> None:
    folder = spoilt(kind)
    change(folder, edit)
    assert line in refusal(folder)


@pytest.mark.parametrize(
    "kind", ["gptq", "awq", "fp8-block", "compressed-channel", "nf4", "pack-zeros", "nvfp4"]
)
def test_sizes_are_checked_before_memory_is_taken(kind: str, spoilt: Callable[[str], Path]) -> None:
    folder = spoilt(kind)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 1 << 30}))
    line = refusal(folder)
    assert line.startswith("config.json: by its sizes (intermediate_size) model.layers.0.mlp.")


def test_bits_that_are_not_those_of_the_tensors_are_refused(spoilt: Callable[[str], Path]) -> None:
    folder = spoilt("gptq")
    state(folder, {"bits": 8})
    assert refusal(folder).endswith(f": scales is [4, 64], it must be [2, 64]{AGAIN}")


@pytest.mark.parametrize("kind", ["gptq", "nf4"])
def test_a_torn_file_is_refused(kind: str, spoilt: Callable[[str], Path]) -> None:
    folder = spoilt(kind)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    line = refusal(folder)
    assert line.startswith("model.safetensors: cannot be read: ")
    assert line.endswith("; get it again")


def test_packed_layers_that_are_not_linear_are_refused(folder: Folder, tmp_path: Path) -> None:
    left = ("lm_head", "wte", "wpe")
    packed, _ = save_packed(folder("gpt2"), tmp_path, RECIPES["gptq"], plainly=left)
    line = refusal(packed)
    assert "is packed, and belongs to a Conv1D; only linear layers and embeddings are" in line
