"""The account of memory by a model's files is what loading the model takes."""

import json
import struct
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from engine import memory
from engine.checkpoint.model import load_model
from engine.checkpoint.parts import kind_of_part
from engine.checkpoint.stated import read_stated
from engine.forward.cache_tensors import SlotCache
from engine.forward.more_layers import more_in_slots
from engine.room import Sizes
from engine.stated_sizes import How, StatedSizes, stated_sizes
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.split import cuts_of, share_head
from tests.engine.conftest import Folder
from tests.gguf_models import save_gguf
from tests.packed_models import RECIPES, save_mxfp4, save_packed
from tests.small_families import make_small
from tests.wrapped_models import make_wrapped

META = torch.device("meta")


def stated(folder: Path, **how: Any) -> StatedSizes:
    """What the account says of a model that is loaded on this CPU."""
    settings = {"kind": "cpu", "device_bytes": memory.total_bytes(torch.device("cpu"))} | how
    return stated_sizes(read_stated(str(folder), folder), How(**settings))


def measured(folder: Path, dtype: str, quantization: str = "") -> Sizes:
    """What loading takes."""
    loaded = load_model(str(folder), dtype=dtype, quantization=quantization, keep_codes=True)
    more_in_slots(loaded.model)
    return memory._sizes(loaded)


def check(found: StatedSizes, want: Sizes, most: float = 0.05) -> None:
    """All but the weights is the same; these are nearly."""
    got = found.sizes
    assert got.weights == pytest.approx(want.weights, rel=most)
    for field in ("kind", "device", "slot", "state", "mask", "scored", "most_len"):
        assert getattr(got, field) == getattr(want, field), field


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "gpt2", "gemma3", "gpt_oss"])
def test_a_plain_model_takes_what_its_files_say(kind: str, dtype: str, folder: Folder) -> None:
    found = stated(folder(kind), dtype=dtype)
    check(found, measured(folder(kind), dtype), 0.01)
    assert found.dtype == found.weights == dtype


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "falcon_h1", "nemotron_h", "lfm2"])
def test_states_and_convolutions_are_in_the_account(kind: str, tmp_path: Path) -> None:
    folder = make_small(kind, tmp_path)
    check(stated(folder, dtype="float32"), measured(folder, "float32"), 0.01)


@pytest.mark.parametrize(
    "kind",
    [
        *("gptq", "gptq-sym", "gptq-act-order", "awq", "pack-zeros", "pack-8", "nvfp4"),
        *("fp8-block", "modelopt-mx", "nf4", "compressed-channel"),
    ],
)
def test_packed_weights_take_the_bits_in_which_they_stay(
    kind: str, folder: Folder, tmp_path: Path
) -> None:
    packed, _ = save_packed(folder("llama"), tmp_path, RECIPES[kind])
    found = stated(packed, dtype="bfloat16")
    stays = kind in ("gptq", "gptq-sym", "awq", "pack-zeros", "pack-8", "nvfp4")
    assert (found.weights == "their own few bits") == stays
    check(found, measured(packed, "bfloat16"), 0.01)


def test_other_files_with_few_bits(folder: Folder, tmp_path: Path) -> None:
    packed, _ = save_mxfp4(folder("gpt_oss"), tmp_path / "mxfp4")
    check(stated(packed, dtype="bfloat16"), measured(packed, "bfloat16"), 0.01)
    for kind in ("Q8_0", "Q4_1", "Q4_0", "Q5_0"):
        packed, _ = save_gguf(folder("llama"), tmp_path / kind, lambda _, kind=kind: kind)
        check(stated(packed, dtype="bfloat16"), measured(packed, "bfloat16"), 0.01)
    for method in ("int8", "int4"):
        found = stated(folder("llama"), dtype="bfloat16", quantization=method)
        check(found, measured(folder("llama"), "bfloat16", method), 0.01)
    wrapped = make_wrapped("llava", tmp_path / "wrapped")
    check(stated(wrapped, dtype="float32"), measured(wrapped, "float32"), 0.01)


def test_the_type_of_the_checkpoint_is_taken_unless_this_processor_would_emulate_it(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hf.AutoModelForCausalLM.from_pretrained(folder("llama")).to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    for flags, want in (({"avx512_bf16"}, "bfloat16"), ({"avx2"}, "float32")):
        monkeypatch.setattr("engine.stated_sizes.cpu_flags", lambda flags=flags: flags)
        assert stated(tmp_path).dtype == want
        assert stated(tmp_path, kind="cuda").dtype == "bfloat16"
    assert stated(tmp_path, dtype="fastest").dtype == "float32", "the larger of what is timed"


# -- large shapes, without memory ------------------------------------------------------------------

LLAMA = {"max_position_embeddings": 131072, "vocab_size": 128256, "num_key_value_heads": 8}
SHAPES: Mapping[str, Any] = {
    "8b": hf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        **LLAMA,
    ),
    "32b": hf.Qwen3Config(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "70b": hf.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        **LLAMA,
    ),
    "gpt-oss-120b": hf.GptOssConfig(),  # its defaults are that model
}


class Allocations(TorchDispatchMode):
    """Records every allocation of torch, and what of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record the memory of what it returns."""
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._held[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return made

    def of(self, *tensors: Any) -> int:
        """Return the bytes of the recorded allocations in which these tensors lie."""
        places = {one.untyped_storage()._cdata for one in tensors}
        assert places <= set(self._held), "all of them were recorded"
        return sum(self._held[place][1] for place in places)


def save_headers(out: Path, model: Any, config: Any, packed: str = "") -> None:
    """Write config.json, and a file that holds the list of a model's tensors and no number.

    packed  "fp8": matrices are 8-bit floats with scales of blocks; "mxfp4": experts as gpt-oss's
    """
    out.mkdir()
    listed: dict[str, tuple[str, list[int]]] = {}
    for name, weight in model.state_dict().items():
        shape = list(weight.shape)
        is_matrix = len(shape) == 2 and "embed" not in name and "lm_head" not in name
        if packed == "fp8" and is_matrix:
            listed[name] = "F8_E4M3", shape
            grid = [-(-size // 128) for size in shape]
            listed[name.replace(".weight", ".weight_scale_inv")] = "F32", grid
        elif packed == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            listed[f"{name}_blocks"] = "U8", [experts, outputs, inputs // 32, 16]
            listed[f"{name}_scales"] = "U8", [experts, outputs, inputs // 32]
        else:
            listed[name] = "BF16", shape
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    fields["dtype"] = "bfloat16"
    if packed == "fp8":
        fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    elif packed:
        fields["quantization_config"] = {"quant_method": "mxfp4"}
    (out / "config.json").write_text(json.dumps(fields))
    header, at = {}, 0
    for name, (kind, shape) in listed.items():
        size = prod(shape) * {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)  # numbers that were never written take no place


@pytest.mark.parametrize(
    ("name", "num_ranks", "packed"),
    [
        *(("8b", 1, ""), ("8b", 1, "fp8"), ("32b", 1, ""), ("70b", 2, "")),
        *(("70b", 2, "fp8"), ("gpt-oss-120b", 1, "mxfp4")),
    ],
)
def test_large_models_take_what_loading_allocates(
    name: str, num_ranks: int, packed: str, tmp_path: Path
) -> None:
    config, max_len, num_lanes = SHAPES[name], 4096, 8
    config.tie_word_embeddings = False
    kind: Any = hf.AutoModelForCausalLM
    with META:
        whole = kind.from_config(config, dtype=torch.bfloat16)
    folder = tmp_path / "model"
    save_headers(folder, whole, config, packed)
    found = stated(folder, kind="cuda", device_bytes=80 << 30, num_ranks=num_ranks)
    with Allocations() as allocations, torch.inference_mode(), META:
        if num_ranks == 1:
            part = kind.from_config(config, dtype=torch.bfloat16)
        else:
            rank = Rank(0, num_ranks, lambda _: None)
            part = kind_of_part(whole, cuts_of(name, whole, rank), rank)(config)
            part = part.to(torch.bfloat16)
            share_head(part, config.vocab_size, rank)
        cache = SlotCache(part, num_lanes * found.sizes.slots(max_len), META)
    weights = allocations.of(*part.parameters(), *part.buffers())
    caches = allocations.of(*cache.buffers.values())
    assert found.sizes.weights == pytest.approx(weights, rel=0.05)
    assert num_lanes * found.sizes.lane(max_len) == pytest.approx(caches, rel=0.05)
    assert weights > 10e9
