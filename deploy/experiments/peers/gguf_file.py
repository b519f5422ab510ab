"""Writes a model of the llama architecture as a GGUF file, for the llama.cpp peer.

Tokens have no text there: the peer is given ids and answers with ids.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers as hf

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
TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write(folder: str, dtype: str, path: Path) -> None:
    """Convert the model in `folder`, with its matrices in `dtype` ("auto": the checkpoint's)."""
    kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    config = model.config
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default":
        raise SystemExit(f"{folder}: only llama with plain rotary embeddings is written as GGUF")
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
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(model):
        _add(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    config, inner = model.config, model.model
    found = [("token_embd", inner.embed_tokens.weight), ("output_norm", inner.norm.weight)]
    if not config.tie_word_embeddings:
        found.append(("output", model.lm_head.weight))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for number, layer in enumerate(inner.layers):
        for theirs, ours in NAMES.items():
            weight = layer.get_submodule(theirs).weight
            if ours in heads:
                weight = _interleaved(weight, heads[ours])
            found.append((f"blk.{number}.{ours}", weight))
    return [(f"{name}.weight", weight.detach()) for name, weight in found]


def _interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotary embedding, which turns neighbours and not halves."""
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1:
        tensor = tensor.float()
    kind = TYPES[tensor.dtype]
    array = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
    writer.add_tensor(name, array.numpy(), raw_dtype=kind)
