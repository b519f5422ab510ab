"""Heads that cannot be used: each is refused in one line that says what to do."""

import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.files import refuse_odd_types
from engine.errors import ModelError
from engine.heads.head_loading import LoadedHead, load_head, load_head_engine
from tests.engine.heads.checkpoints import EAGLE_LAYOUTS, LAYOUTS, VOCAB, checkpoint, medusa
from tests.tiny_models import make_model


def refusal(folder: Path, target: Path | str, **options: Any) -> str:
    """The one line, without the names of the folders."""
    with pytest.raises(ModelError) as caught:
        load_head(str(folder), target=str(target), **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return (
        text.replace(f"{folder}/", "").replace(str(folder), "HEAD").replace(str(target), "TARGET")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_missing_is_named(layout: str, target: Path, tmp_path: Path) -> None:
    saved = checkpoint(layout)
    # Those that the target cannot lend, and that a kind always has.
    taken = [n for n in saved.files if n not in ("norm.weight", "lm_head.weight", "t2d")]
    needed = [n for n in taken if not n.endswith(("bias", "input_norm.weight", ".2.weight"))]
    needed = [n for n in needed if not n.startswith(("fc.", "fusion_fc."))]
    assert len(needed) >= 6
    for name in needed:
        files = {key: tensor for key, tensor in saved.files.items() if key != name}
        folder = replace(saved, files=files).save(tmp_path / name)
        line = refusal(folder, target)
        assert line.startswith(f"{saved.file}: it lacks the tensor {name}; ")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_a_target_of_another_size_is_refused(
    layout: str, tmp_path: Path, target: Path
) -> None:
    folder = checkpoint(layout).save(tmp_path / "head")
    smaller = make_model("llama", tmp_path / "smaller", vocab=150, scale=1.1)
    line = refusal(folder, smaller)
    if layout == "medusa":
        assert "0.2.weight is [199, 64]" in line
        assert "for the target TARGET it must be [150, 64]" in line
    else:
        assert "vocab_size is 199, but that of TARGET is 150" in line
    assert line.endswith("use a head made for this target")


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_another_hidden_size_is_refused(layout: str, tmp_path: Path, target: Path) -> None:
    saved = checkpoint(layout)
    config = json.loads(json.dumps(saved.config))
    config.get("transformer_layer_config", config)["hidden_size"] = 32
    line = refusal(replace(saved, config=config).save(tmp_path), target)
    assert line == (
        "config.json: hidden_size is 32, but that of TARGET is 64; use a head made for this target"
    )


def test_a_medusa_head_of_another_width_is_refused(tmp_path: Path, target: Path) -> None:
    saved = medusa()
    files = {name: t[:32, :32] if t.dim() == 2 else t[:32] for name, t in saved.files.items()}
    line = refusal(replace(saved, files=files).save(tmp_path), target)
    assert line.startswith("medusa_lm_head.safetensors: 0.0.linear.weight is [32, 32], but for ")
    assert "must be [64, 64]" in line


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (-1, "d2t leads to the tokens -1 to "),
        (VOCAB, f"d2t leads to the tokens 1 to {VOCAB}"),
        (None, "d2t leads to a token twice"),
    ],
)
def test_a_vocabulary_map_that_leads_nowhere_is_refused(
    first: int | None, line: str, tmp_path: Path, target: Path
) -> None:
    saved = checkpoint("eagle3")
    targets = torch.arange(1, 41)
    targets[0] = 5 if first is None else first
    if first == VOCAB:
        targets[1] = 1
    files = {**saved.files, "d2t": targets - torch.arange(40)}
    got = refusal(replace(saved, files=files).save(tmp_path), target)
    assert got.startswith(f"model.safetensors: {line}")


class Code:
    """What would run if its pickle were trusted."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('code of a head was run')",)


@pytest.mark.parametrize("layout", ["medusa", "eagle"])
def test_code_in_a_pickle_is_never_run(layout: str, tmp_path: Path, target: Path) -> None:
    file = "medusa_lm_head.pt" if layout == "medusa" else "pytorch_model.bin"
    saved = replace(checkpoint(layout), file=file)
    folder = saved.save(tmp_path)
    torch.save({**saved.files, "fc.weight": Code()}, tmp_path / file)
    assert refusal(folder, target).startswith(f"{file}: it holds code or objects besides tensors")
    (tmp_path / file).write_bytes(pickle.dumps(Code()))
    assert refusal(folder, target).startswith(f"{file}: ")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, target: Path) -> None:
    folder = replace(checkpoint("eagle"), file="pytorch_model.bin").save(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    whole = path.read_bytes()
    for content in (b"", b"no tensors", whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert refusal(folder, target).startswith("pytorch_model.bin: ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something", "else")
    assert refusal(folder, target).startswith("pytorch_model.bin: ")
    torch.save([torch.zeros(1)], path)
    assert "must hold tensors by name" in refusal(folder, target)
    path.unlink()
    assert refusal(folder, target).startswith("HEAD: no weights of a head; name them ")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert refusal(folder, target).startswith("model.safetensors: cannot be read")


def test_numbers_that_are_none_are_refused(tmp_path: Path, target: Path) -> None:
    saved = checkpoint("eagle")
    files = {**saved.files, "fc.weight": saved.files["fc.weight"] / 0}
    line = refusal(replace(saved, files=files).save(tmp_path), target)
    assert line == "model.safetensors: fc.weight holds NaN or infinity; get it again"


@pytest.mark.parametrize(
    ("layout", "fields", "line"),
    [
        ("eagle", {"num_hidden_layers": 2}, "the head has 2 layers; use one with a single layer"),
        ("eagle", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; only heads with silu'),
        ("eagle", {"intermediate_size": None}, "intermediate_size is null; it must be"),
        ("eagle", {"head_dim": -3}, "head_dim is -3; it must be"),
        ("eagle", {"head_dim": 17}, "head_dim is 17; it must be even"),
        ("eagle", {"rope_theta": 0}, "rope_theta is 0; it must be a number from 1 to 1e+12"),
        ("eagle", {"rope_theta": -5.0}, "rope_theta is -5.0; it must be a number from 1 to"),
        ("eagle", {"rope_theta": "x"}, 'rope_theta is "x"; it must be a number from 1 to'),
        ("eagle", {"rope_scaling": {"rope_type": "x"}}, "its rotary embedding cannot be used"),
        (
            "eagle",
            {"rope_parameters": {"rope_type": "default", "rope_theta": []}},
            "rope_theta is []; it must be a number from 1 to 1e+12",
        ),
        ("eagle3", {"rms_norm_eps": "x"}, 'rms_norm_eps is "x"; it must be a number from '),
        ("eagle3", {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number from 1e-12 to 0.1"),
        ("eagle3", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; it must be a number"),
        ("eagle3", {"rms_norm_eps": 1e39}, "rms_norm_eps is 1e+39; it must be a number from"),
        ("eagle3", {"norm_before_residual": "no"}, 'norm_before_residual is "no"; it must be'),
        ("normed eagle3", {"norm_output": 1}, "norm_output is 1; it must be true or false"),
        ("normed eagle3", {"norm_before_fc": True}, "norm_before_fc and fc_norm are both true"),
        ("eagle3", {"parallel_drafting": True}, "heads that draft in parallel (P-EAGLE) are not"),
        (
            "speculators eagle3",
            {"speculators_model_type": "peagle"},
            "heads that draft in parallel",
        ),
        ("eagle3", {"kv_lora_rank": 64}, "heads with multi-head latent attention are not"),
        ("medusa", {"medusa_num_heads": 5000}, "medusa_num_heads is 5000; it must be a whole"),
        ("eagle", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not covered"),
        ("eagle", {"rope_scaling": {"rope_type": "yarn"}}, "its rotary embedding cannot be used"),
        ("eagle", {"rope_scaling": "x"}, "its rotary embedding cannot be used"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            "it reads features of layers that TARGET, which has ",
        ),
        ("eagle3", {"target_hidden_size": 128}, "target_hidden_size is 128, but that of TARGET"),
        ("eagle3", {"draft_vocab_size": -1}, "draft_vocab_size is -1; it must be"),
        ("speculators eagle3", {"norm_before_residual": None}, "it does not say norm_before_"),
        ("speculators eagle3", {"transformer_layer_config": 3}, "transformer_layer_config must be"),
        ("speculators eagle3", {"speculators_model_type": "dflash"}, None),
        ("medusa", {"medusa_num_heads": "many"}, None),
    ],
)
def test_a_configuration_that_is_not_covered_is_refused(
    layout: str, fields: dict[str, Any], line: str | None, tmp_path: Path, target: Path
) -> None:
    saved = checkpoint(layout)
    folder = replace(saved, config={**saved.config, **fields}).save(tmp_path)
    got = refusal(folder, target)
    if line is not None:
        assert got.startswith(f"config.json: {line}")


ODD_TYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
}


@pytest.mark.parametrize("kind", ODD_TYPES)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("medusa", "0.0.linear.weight"),
        ("medusa", "1.2.weight"),
        ("eagle", "fc.weight"),
        ("eagle", "layers.0.post_attention_layernorm.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
        ("speculators eagle3", "input_norm.weight"),
    ],
)
def test_a_tensor_of_a_type_that_nothing_expects_is_refused(
    layout: str, name: str, kind: str, tmp_path: Path, target: Path
) -> None:
    saved = checkpoint(layout)
    files = {**saved.files, name: saved.files[name].to(ODD_TYPES[kind])}
    line = refusal(replace(saved, files=files).save(tmp_path), target)
    assert line.startswith(f"{saved.file}: {name} holds numbers of type {kind}, and they must be")
    with pytest.raises(ModelError, match="and they must be float32, bfloat16 or float16"):
        refuse_odd_types(tmp_path / saved.file, whole=("d2t",))


@pytest.mark.parametrize("kind", ["float32", "int8", "bool", "complex64"])
def test_a_vocabulary_map_of_anything_but_whole_numbers_is_refused(
    kind: str, tmp_path: Path, target: Path
) -> None:
    saved = checkpoint("eagle3")
    files = {**saved.files, "d2t": saved.files["d2t"].to(getattr(torch, kind))}
    line = refusal(replace(saved, files=files).save(tmp_path), target)
    assert line.startswith(f"model.safetensors: d2t holds numbers of type {kind}, and they must be")
    with pytest.raises(ModelError, match=r"d2t holds numbers of type .* must be whole numbers"):
        refuse_odd_types(tmp_path / saved.file, whole=("d2t",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_does_not_compute_finite_numbers_is_refused(
    layout: str, tmp_path: Path, target: Path
) -> None:
    saved = checkpoint(layout)
    name = {"medusa": "0.0.linear.weight", "speculators eagle": "fusion_fc.weight"}
    name["last eagle3"] = "midlayer.mlp.up_proj.weight"
    large = name.get(layout, "fc.weight")
    files = {**saved.files, large: torch.full_like(saved.files[large], 3e38)}
    folder = replace(saved, files=files).save(tmp_path)
    with pytest.raises(ModelError, match="what the head computes is not finite"):
        load_head_engine(
            str(folder),
            revision=None,
            target=str(target),
            target_revision=None,
            dtype="float32",
            device="cpu",
            max_len=64,
            warm_rows=(1,),
            say=lambda state: None,
        )


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path, target: Path) -> None:
    for layout, name in (("eagle", "layers.0.input_layernorm.weight"), ("medusa", "0.9.weight")):
        saved = checkpoint(layout)
        files = {**saved.files, name: torch.ones(64)}
        folder = replace(saved, files=files).save(tmp_path / layout)
        line = refusal(folder, target)
        assert line.startswith(f"{saved.file}: nobody here knows its tensor {name}; ")


def test_what_is_no_head_is_refused(target: Path, tmp_path: Path) -> None:
    assert refusal(target, target).startswith("config.json: it describes no head that is covered")
    assert "no such folder" in refusal(tmp_path / "none", target)
    folder = checkpoint("eagle").save(tmp_path / "head")
    assert "no such folder" in refusal(folder, "./none")
    assert refusal(folder, target, dtype="int3").startswith("unknown dtype 'int3'")


def test_medusa_heads_draft_as_deep_as_there_are_heads(target: Path, tmp_path: Path) -> None:
    folder = medusa().save(tmp_path)
    engine = load_head_engine(
        str(folder),
        revision=None,
        target=str(target),
        target_revision=None,
        dtype="auto",
        device="cpu",
        max_len=64,
        warm_rows=(1,),
        say=lambda state: None,
    )
    assert engine.executor.backend == "medusa"
    assert isinstance(engine.loaded, LoadedHead)
    assert engine.loaded.depth == 3
