"""Small models as GGUF files, written by the package `gguf`, and what their weights stand for.

Beside each folder with a GGUF file lies a plain one with the weights that `gguf` dequantises.
Blocks of types that the package cannot make (Q4_K, IQ4_XS ...) are random bytes with scales of a
usual size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from engine.checkpoint.gguf_list import BLOCKS

Array = np.ndarray[Any, Any]
Kinds = Callable[[str], str]
"""Function: name of a tensor in transformers' models -> its type in the file."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Where a block has its float16 scales, of the types that the package `gguf` cannot make; else at 0.
SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
MADE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
"""The types that the package `gguf` can make of numbers."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Array:
    """Bytes [rows, bytes of a row] of a matrix in a type, with random codes and scales."""
    random = np.random.default_rng(seed)
    each, size = BLOCKS[kind]
    count = columns // each
    if kind in MADE:
        numbers = random.normal(0, 0.05, (rows, columns)).astype(np.float32)
        return np.asarray(gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]))
    raw = random.integers(0, 256, (rows, count, size), dtype=np.uint8)
    match kind:
        case "IQ1_M":  # the upper halves of four numbers are the digits of a float16
            raw[..., 53::2] = raw[..., 53::2] & 15 | np.array([4, 1], dtype=np.uint8) << 4
        case "NVFP4":
            raw[..., :4] &= 31  # floats of 8 bits
        case _:
            start, end = SCALES.get(kind, (0, 2))
            usual = 1e-3 if kind in ("Q4_K", "Q5_K") else 1e-4
            halves = random.normal(0, usual, (rows, count, (end - start) // 2))
            raw[..., start:end] = halves.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def save_gguf(
    source: Path,
    out: Path,
    kinds: Kinds,
    tokenizer: dict[str, Any] | None = None,
    vectors: str = "F32",
    pre: str = "default",
) -> tuple[Path, Path]:
    """Write the plain model in `source` as `out`/gguf and, as it then is, as `out`/plain.

    tokenizer  content of a tokenizer.json to write into the file; None: it has no tokenizer
    vectors    type of norms and biases
    pre        how the tokenizer splits texts, by llama.cpp's name
    """
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    folder, plain = out / "gguf", out / "plain"
    for made in (folder, plain):
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps(config))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama" if kind == "mistral" else kind)
    add_fields(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, pre)
    stood_for: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        array = tensor.float().numpy()
        stored = np.ascontiguousarray(turned(name, array, config))
        array = _add(writer, name, stored, vectors if array.ndim == 1 else kinds(name), number)
        back = turned(name, array, config, back=True)
        stood_for[name] = torch.from_numpy(np.ascontiguousarray(back))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file):
        step()
    writer.write_tensors_to_file()
    writer.close()
    save_file(stood_for, plain / "model.safetensors", {"format": "pt"})
    return folder, plain


def _add(writer: Any, name: str, array: Array, kind: str, seed: int) -> Array:
    """Add a tensor to a file in a type; return what it stands for."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in MADE:
        data = gguf.quants.quantize(array, number)
    else:
        data = random_blocks(kind, *array.shape, seed)
    writer.add_tensor(name_in_file(name), data, raw_dtype=number)
    return np.asarray(gguf.quants.dequantize(data, number), dtype=np.float32).reshape(array.shape)


def name_in_file(name: str) -> str:
    """The name in a GGUF file of a tensor of transformers' models."""
    stem, _, part = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{part}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{part}"


def turned(name: str, array: Array, config: dict[str, Any], *, back: bool = False) -> Array:
    """Rows of query and key as they lie in files of llama's architecture, or back from there."""
    heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    count = next((config[field] for part, field in heads.items() if part in name), None)
    if count is None or config["model_type"] not in ("llama", "mistral"):
        return array
    sizes = (count, -1, 2) if back else (count, 2, len(array) // count // 2)
    return array.reshape(*sizes, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def add_fields(writer: Any, config: dict[str, Any]) -> None:
    """Add the fields of a model to a file."""
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: Any, tokenizer: dict[str, Any], pre: str) -> None:
    """Add a byte-level tokenizer, as in a tokenizer.json, to a file."""
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda one: one[1])
    special = {one["content"] for one in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)


def wide_model(folder: Path, *, tied: bool = False) -> Path:
    """Save a llama of two layers, 256 wide, as blocks of 256 need it; return `folder`."""
    config = hf.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
