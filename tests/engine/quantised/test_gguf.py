"""GGUF files say what the package `gguf` says that their weights are; others are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.files import read_config
from engine.checkpoint.gguf_folder import config_of, folder_of
from engine.checkpoint.gguf_list import _TYPES, BLOCKS, PLAIN, read_gguf
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.loading import make_executor
from engine.quantised import gguf_blocks
from engine.quantised.gguf_blocks import KEPT
from engine.quantised.linear import QuantisedLinear
from tests.gguf_models import random_blocks, save_gguf, wide_model
from tests.tiny_models import make_config, make_model

ROOT = Path(__file__).parents[3]
EMBEDDINGS = "model.embed_tokens.weight"
ODD = (0.0, -1.0, float("nan"), float("inf"))
IDS = torch.randint(0, 199, (1, 40), generator=torch.Generator().manual_seed(3))


def logits_of(model: Any) -> torch.Tensor:
    """What a model says of a fixed text."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def plainly(folder: Path) -> Any:
    """A model as transformers alone reads it."""
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def mixed(name: str) -> str:
    """Types as in a Q4_K_M file: query and key are not of the type of value."""
    if "norm" in name:
        return "F32"
    kinds = {"embed": "Q6_K", "v_proj": "Q6_K", "down": "Q6_K", "o_proj": "Q5_K", "up": "F16"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


PACKED = [kind for kind in BLOCKS if kind not in PLAIN]


def test_the_types_are_those_that_the_package_dequantises() -> None:
    found = {}
    for kind in gguf.GGMLQuantizationType:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found[kind.value] = kind.name, numbers, size
    assert found == _TYPES


@pytest.mark.parametrize("kind", PACKED)
def test_a_block_is_read_bit_for_bit_as_the_package_reads_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "_NUMBERS_AT_ONCE", 4 * 1024)  # in two pieces
    raw = random_blocks(kind, 6, 1024)
    want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert torch.isfinite(want).all()
    assert len(want.unique()) > 2
    blocks = torch.from_numpy(raw).view(6, -1, BLOCKS[kind][1])
    assert torch.equal(gguf_blocks.weight(kind, blocks), want)


@pytest.mark.parametrize("kind", KEPT)
def test_a_block_stays_as_it_is_stored(kind: str) -> None:
    raw = random_blocks(kind, 6, 1024)
    blocks = torch.from_numpy(raw).view(6, -1, BLOCKS[kind][1])
    matrix = gguf_blocks.codes(kind, blocks)
    assert matrix.shape == (6, 1024)
    want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(matrix.dequantised(), want)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("Q8_0", 0.01), ("Q5_0", 0.1), ("Q5_1", 0.1), ("Q4_0", 0.2), ("Q4_1", 0.2), ("MXFP4", 0.5)],
)
def test_what_is_quantised_is_read_as_about_what_it_was(kind: str, most: float) -> None:
    numbers = np.random.default_rng(5).normal(0, 0.05, (8, 512)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    found = gguf_blocks.weight(kind, torch.from_numpy(raw).view(8, -1, BLOCKS[kind][1]))
    wrong = (found - torch.from_numpy(numbers)).abs().max() / np.abs(numbers).max()
    assert wrong < most / 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_file_is_the_model_of_the_weights_that_it_stands_for(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "source")
    folder, plain = save_gguf(source, tmp_path, lambda _: "Q8_0")
    want = logits_of(plainly(plain))
    assert not torch.equal(want, logits_of(plainly(source)))
    assert torch.equal(logits_of(load_model(str(folder), dtype="float32").model), want)
    kept = load_model(str(folder), dtype="float32", keep_codes=True)
    assert torch.equal(logits_of(kept.model), want)
    assert sum(isinstance(part, QuantisedLinear) for part in kept.model.modules()) == 22
    assert kept.vocab_size == 199
    assert make_executor(kept, 128, backend="fused").backend == "fused"


@pytest.mark.parametrize("output", ["own", "tied"])
def test_types_may_be_mixed_and_the_output_matrix_may_be_the_embeddings(
    output: str, tmp_path: Path
) -> None:
    source = wide_model(tmp_path / "source", tied=output == "tied")
    folder, plain = save_gguf(source, tmp_path, mixed)
    kept = load_model(str(folder), dtype="float32", keep_codes=True)
    assert torch.equal(logits_of(kept.model), logits_of(plainly(plain)))
    kinds = {name: type(part) for name, part in kept.model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] is torch.nn.Linear
    assert kinds["lm_head"] is kinds["model.layers.1.self_attn.v_proj"] is QuantisedLinear
    executor = make_executor(kept, 128, backend="fused")  # which compares it with the model's own
    with pytest.raises(AssertionError, match="was freed"):
        logits_of(executor.loaded.model)


@pytest.mark.parametrize("shift", range(2))
def test_every_type_is_read_in_a_model(shift: int, tmp_path: Path) -> None:
    source = wide_model(tmp_path / "source")
    names = [one for one in load_file(source / "model.safetensors") if "norm" not in one]
    assert len(names) * 2 > len(PACKED)
    kinds = {one: PACKED[(i * 2 + shift) % len(PACKED)] for i, one in enumerate(sorted(names))}
    folder, plain = save_gguf(source, tmp_path, lambda name: kinds.get(name, "F32"))
    want = logits_of(plainly(plain))
    assert torch.equal(logits_of(load_model(str(folder), dtype="float32").model), want)
    kept = load_model(str(folder), dtype="float32", keep_codes=True)
    assert torch.equal(logits_of(kept.model), want)
    parts = kept.model.named_modules()
    as_stored = {f"{name}.weight" for name, one in parts if isinstance(one, QuantisedLinear)}
    assert as_stored == {name for name, kind in kinds.items() if kind in KEPT} - {EMBEDDINGS}


def test_a_file_alone_has_a_folder_made_of_its_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, plain = save_gguf(make_model("qwen2", tmp_path / "source"), tmp_path, lambda _: "F16")
    file = folder / "model.gguf"
    made = find_checkpoint(str(file), None)
    assert made == folder_of(file)
    assert made.is_relative_to(tmp_path / "cache" / "slipstream")
    loaded = load_model(str(made), dtype="float32")
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))
    assert read_config(made)["dtype"] == "float16"
    shutil.move(file, tmp_path / "other.gguf")  # another file has another folder
    assert folder_of(tmp_path / "other.gguf") != made


def test_the_tokenizer_in_a_file_gives_the_tokens_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = ROOT / "models" / "target" / "tokenizer.json"
    source = make_model("llama", tmp_path / "source", vocab=4096)
    content = json.loads(path.read_text())
    folder, _ = save_gguf(source, tmp_path, lambda _: "Q8_0", tokenizer=content)
    made = folder_of(folder / "model.gguf")
    theirs, ours = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(made / path.name))
    text = "def area(w, h):\n    return w * h  # it's 42 <|endoftext|> über"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "number"), [("default", ["Ġ2024"]), ("smollm", ["Ġ", "2", "0", "2", "4"])]
)
def test_numbers_are_split_as_the_file_says(
    pre: str, number: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = json.loads((ROOT / "models" / "target" / "tokenizer.json").read_text())
    source = make_model("llama", tmp_path / "source", vocab=4096)
    folder, _ = save_gguf(source, tmp_path, lambda _: "F32", tokenizer=content, pre=pre)
    made = Tokenizer.from_file(str(folder_of(folder / "model.gguf") / "tokenizer.json"))
    assert made.pre_tokenizer is not None
    pieces = [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("in 2024, it's")]
    assert pieces == ["in", *number, ",", "Ġit", "'s"]


def test_the_rotary_factors_of_llama_3_are_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    config = make_config("llama")
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model: Any = hf.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    base = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (base / model.model.rotary_emb.inv_freq).numpy()
    write = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        write(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        made, _ = save_gguf(folder, tmp_path, lambda _: "F32")
    file = made / "model.gguf"
    found = config_of(read_gguf(file))["rope_parameters"]
    assert found == config.rope_parameters
    at = file.read_bytes().index(divisors.astype(np.float32).tobytes())
    for wrong, words in ((2.0, "not those of Llama 3"), *((n, "no numbers above") for n in ODD)):
        number = np.float32(wrong).tobytes()
        changed(made, lambda data, number=number: data[:at] + number + data[at + 4 :])
        with pytest.raises(ModelError, match=words):
            config_of(read_gguf(file))


@pytest.mark.parametrize("field", ["rope.freq_base", "block_count", "attention.head_count"])
def test_a_field_that_is_no_number_is_refused(field: str, tmp_path: Path) -> None:
    add = gguf.GGUFWriter.add_key_value

    def add_text(writer: Any, name: str, value: Any, kind: Any, *rest: Any, **more: Any) -> None:
        if name.endswith(field):
            value, kind = "many", gguf.GGUFValueType.STRING
        add(writer, name, value, kind, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_key_value", add_text)
        made, _ = save_gguf(make_model("llama", tmp_path / "source"), tmp_path, lambda _: "F32")
    with pytest.raises(ModelError, match=f"its field {field} is many; put it into a folder"):
        config_of(read_gguf(made / "model.gguf"))


def test_what_a_file_holds_is_read_without_numpy(tiny: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from engine.checkpoint import files, gguf_folder; "
        "gguf = gguf_folder.read_gguf(Path(sys.argv[1])); gguf_folder.config_of(gguf); "
        "files.read_shapes(gguf.path.parent); print(*sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tiny / "model.gguf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "engine" in loaded
    assert not loaded & {"numpy", "torch", "gguf"}


def changed(folder: Path, change: Any) -> Path:
    """Change the bytes of a folder's file; return the file."""
    file = folder / "model.gguf"
    file.write_bytes(change(file.read_bytes()))
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    return save_gguf(make_model("llama", out / "source"), out, lambda _: "Q8_0")[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:20], "it is no GGUF file; get the file again"),
        (lambda data: b"GGML" + data[4:], "it is no GGUF file; get the file again"),
        (lambda data: data[:4] + b"\1" + data[5:], "GGUF of version 1 is not read"),
        (lambda data: data[:300], "it is cut off or damaged; get the file again"),
        (lambda data: data[:-5000], r"it is cut off in blk\.2\.attn_q\.weight; get the file again"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "it is damaged; get the file again"),
        (
            lambda data: data.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gemma"),
            "'gemma'; only",
        ),
        (
            lambda data: data.replace(b"ffn_down", b"ffn_exps", 1),
            "is not one of a model of the kind",
        ),
    ],
)
def test_a_damaged_or_strange_file_is_refused_in_one_line(
    change: Any, words: str, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    changed(folder, change)
    with pytest.raises(ModelError, match=words) as refusal:
        load_model(str(folder))
    assert str(refusal.value).startswith(str(folder))
    assert "\n" not in str(refusal.value)


def test_a_type_that_is_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(name: str) -> str:
        return "TQ1_0" if "v_proj" in name else "F16"

    folder, _ = save_gguf(wide_model(tmp_path / "wide"), tmp_path, kinds)
    monkeypatch.delitem(_TYPES, 34)
    words = r"blk\.0\.attn_v\.weight has the type number 34, which is none of F32, "
    with pytest.raises(ModelError, match=words):
        load_model(str(folder))


@pytest.mark.parametrize(("kind", "start"), [("Q4_1", 0), ("Q4_0", 0), ("IQ4_XS", 0), ("Q2_K", 80)])
@pytest.mark.parametrize("keep_codes", [False, True])
def test_a_scale_that_is_not_finite_is_refused_in_one_line(
    kind: str, start: int, *, keep_codes: bool, tmp_path: Path
) -> None:
    source = wide_model(tmp_path / "wide")
    folder, _ = save_gguf(source, tmp_path, lambda name: kind if "v_proj" in name else "F32")
    entry = read_gguf(folder / "model.gguf").tensors["model.layers.1.self_attn.v_proj.weight"]
    at = entry.start + start
    changed(folder, lambda data: data[:at] + b"\0\x7e" + data[at + 2 :])
    with pytest.raises(ModelError, match=r"blk\.1\.attn_v\.weight holds NaN or infinity; get"):
        load_model(str(folder), dtype="float32", keep_codes=keep_codes)


def test_a_norm_may_be_packed(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source")
    folder, plain = save_gguf(source, tmp_path, lambda _: "Q4_1", vectors="Q8_0")
    loaded = load_model(str(folder), dtype="float32", keep_codes=True)
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))


def test_a_file_beside_the_config_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    for change, words in (
        ({"model_type": "qwen2"}, "model_type is 'qwen2', and model.gguf holds a model of the"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, and model.gguf has 4; one of the"),
        ({"intermediate_size": 96}, "in the checkpoint it is"),
    ):
        folder = Path(shutil.copytree(tiny, tmp_path / next(iter(change))))
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=words):
            load_model(str(folder))
    shutil.copy(tiny / "model.gguf", folder / "second.gguf")
    with pytest.raises(ModelError, match="it has 2 GGUF files; give the path of one of them"):
        load_model(str(folder))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("llama-quantize") is None, reason="no llama-quantize here")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_what_llama_cpp_quantises_is_read(kind: str, tmp_path: Path) -> None:
    folder, _ = save_gguf(wide_model(tmp_path / "source"), tmp_path, lambda _: "F32")
    file = folder / "model.gguf"
    out = tmp_path / "quantised.gguf"
    command = ["llama-quantize", str(file), str(out), kind, "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    file.unlink()
    shutil.move(out, file)
    reader = gguf.GGUFReader(file)
    packed = load_model(str(folder), dtype="float32", keep_codes=True).model
    down = next(one for one in reader.tensors if one.name == "blk.1.ffn_down.weight")
    want = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    assert torch.equal(packed.model.layers[1].mlp.down_proj.matrix.dequantised(), want)
    assert make_executor(load_model(str(folder), dtype="float32", keep_codes=True), 128).backend
