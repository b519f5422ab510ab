"""Writes a model of the llama architecture as a GGUF file, with its tokenizer, for llama.cpp.

Needs `gguf`. The files are kept in the cache (`kept`) under a name that is made of the model's
files, so a model that was not changed is written once.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.launching.compile_cache import trim
from proto.system import cache_folder

FORM = 1  # of the files: a higher number makes the cache write them anew
MAX_BYTES = 1 << 33  # of the files in the cache; those that were used longest ago go first
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
NORMAL, CONTROL = 1, 3  # kinds of tokens in a GGUF file
# llama.cpp's name for the pieces into which a ByteLevel pre-tokenizer with its regex cuts a text.
PIECES = "gpt-2"


class CannotWrite(Exception):
    """A model has no GGUF file that llama.cpp would run as it is; the message is one line."""


def llama_cpp_folder() -> Path:
    """Return the folder of our cache for llama.cpp: its programs (`bin`) and GGUF files."""
    return cache_folder("llama.cpp")


# -- cache -----------------------------------------------------------------------------------------


def digest_of(folder: Path, *more: str) -> str:
    """Return a name made of the content of a model's weights, configuration and tokenizer.

    more  what else decides the file, such as its number type
    """
    from engine.checkpoint.tokenizer_files import FILES

    found = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name in ("config.json", *FILES):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
    found.update(repr((FORM, *more)).encode())
    return found.hexdigest()


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a GGUF file in the cache; if it is not there, `make` writes it.

    A file that is half written never has its name. Old files go if there are too many bytes.
    """
    folder = llama_cpp_folder() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.gguf"
    if not path.exists():
        part = folder / f"{name}.{os.getpid()}.part"
        try:
            make(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    path.touch()
    trim(folder, MAX_BYTES)  # what was used today stays
    return path


def kept_model(folder: Path, dtype: str) -> Path:
    """Return the GGUF file of the model in `folder`, with its matrices in `dtype`.

    Raises CannotWrite.
    """
    name = f"{digest_of(folder, dtype)}-{dtype}"
    return kept(name, lambda path: write(folder, dtype, path))


# -- vocabulary ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a byte-level BPE tokenizer, as a GGUF file states them.

    tokens  by id, bytes written as the printable characters that stand for them
    kinds   NORMAL, or CONTROL for tokens that are no text
    merges  pairs of tokens with a space between them, the first to be merged first
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]


def vocabulary(folder: Path, size: int) -> Vocabulary:
    """Return the vocabulary of a model's tokenizer; ids without a token get a name.

    size  number of ids of the model

    Raises CannotWrite: llama.cpp would read texts as other tokens than this tokenizer.
    """
    from engine.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer

    about = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    model, pieces = about["model"], about["pre_tokenizer"] or {}
    is_plain = pieces.get("type") == "ByteLevel" and pieces.get("use_regex", True)
    if model["type"] != "BPE" or not is_plain or about["normalizer"] is not None:
        raise CannotWrite("the peer llamacpp writes only byte-level BPE tokenizers as GGUF")
    tokens = [f"[unused {index}]" for index in range(size)]
    kinds = [CONTROL] * size
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, NORMAL
    for index, added in read_tokenizer(folder).tokenizer.get_added_tokens_decoder().items():
        if index < size:
            tokens[index], kinds[index] = added.content, CONTROL
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return Vocabulary(tokens, kinds, [" ".join(pair) for pair in pairs])


# -- file ------------------------------------------------------------------------------------------


def write(folder: Path, dtype: str, path: Path) -> None:
    """Write the model in `folder` as GGUF, with its matrices in `dtype` ("auto": as they are).

    Raises CannotWrite.
    """
    # These are imported only where a file is written: with them a peer takes seconds to start.
    import gguf
    import torch
    import transformers as hf

    kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    config = model.config
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default":
        raise CannotWrite(
            "the peer llamacpp writes only llama with plain rotary embeddings as GGUF"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, vocabulary(folder, config.vocab_size), config.eos_token_id)
    for name, tensor in _tensors(model):
        _add(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, words: Vocabulary, eos: int | list[int] | None) -> None:
    """Add the tokens; no token is put before a text, as ours does not."""
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name for byte-level BPE
    writer.add_tokenizer_pre(PIECES)
    writer.add_token_list(words.tokens)
    writer.add_token_scores([0.0] * len(words.tokens))
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    writer.add_add_bos_token(False)
    ends = [eos] if isinstance(eos, int) else eos
    if ends:
        writer.add_eos_token_id(ends[0])


def _tensors(model: Any) -> list[tuple[str, Any]]:
    """Return the model's weights, each with its name in a GGUF file."""
    config, inner = model.config, model.model
    found = [("token_embd", inner.embed_tokens.weight), ("output_norm", inner.norm.weight)]
    if not config.tie_word_embeddings:
        found.append(("output", model.lm_head.weight))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for number, layer in enumerate(inner.layers):
        for theirs, ours in NAMES.items():
            weight = layer.get_submodule(theirs).weight
            if ours in heads:
                weight = interleaved(weight, heads[ours])
            found.append((f"blk.{number}.{ours}", weight))
    return [(f"{name}.weight", weight.detach()) for name, weight in found]


def interleaved(weight: Any, num_heads: int) -> Any:
    """Return rows in the order of llama.cpp's rotary embedding, which rotates neighbours.

    The other form rotates the two halves.

    weight  [num_heads * head_dim, hidden size] of q_proj or k_proj
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: Any) -> None:
    """Add a tensor to the GGUF file; vectors are converted to float32."""
    import gguf
    import torch

    if tensor.dim() == 1:
        tensor = tensor.float()
    kind = gguf.GGMLQuantizationType[KINDS[str(tensor.dtype)]]
    array = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
    writer.add_tensor(name, array.numpy(), raw_dtype=kind)
