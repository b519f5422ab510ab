"""llama.cpp as a peer for the benchmark, where `llama-cpp-python` and `gguf` are installed.

    pip install llama-cpp-python gguf
    python -m lab.experiments.peers.llamacpp TARGET DRAFTER DTYPE DEVICE

Requests and answers are those of `huggingface.py`. Modes: plain, and lookup (its prompt lookup
decoding). The target is converted to GGUF in DTYPE, so that both compute with the same weights.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import torch
import transformers as hf
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

# -- gguf file -------------------------------------------------------------------------------------

# Writes a model of the llama architecture as a GGUF file, for the llama.cpp peer.
#
# The file has no tokenizer: the peer is given token ids and answers with token ids.

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
                weight = _interleaved(weight, heads[ours])
            found.append((f"blk.{number}.{ours}", weight))
    return [(f"{name}.weight", weight.detach()) for name, weight in found]


def _interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows in the order of llama.cpp's rotary embedding, which rotates neighbours.

    The other form rotates the two halves.

    weight  [num_heads * head_dim, hidden size] of q_proj or k_proj
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor to the GGUF file; vectors are converted to float32."""
    if tensor.dim() == 1:
        tensor = tensor.float()
    kind = TYPES[tensor.dtype]
    array = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
    writer.add_tensor(name, array.numpy(), raw_dtype=kind)


# -- llamacpp --------------------------------------------------------------------------------------

MAX_LEN = 1024
WARM_UP: dict[str, Any] = {
    "mode": "plain",
    "prompt": [1, 2],
    "max_tokens": 8,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
}


class Peer:
    """The target under llama.cpp, on a GPU or on all CPU cores that the process may use."""

    def __init__(self, target: str, dtype: str, device: str) -> None:
        self.num_gpu_layers = -1 if device.startswith("cuda") else 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "target.gguf"
            write(target, dtype, path)
            self.models = {
                "plain": self._model(path, None),
                "lookup": self._model(path, LlamaPromptLookupDecoding(num_pred_tokens=10)),
            }

    def _model(self, path: Path, draft: Any) -> Any:
        """Load and return the GGUF file's model; `draft` makes drafts (None: plain decoding)."""
        cores = len(os.sched_getaffinity(0))
        return llama_cpp.Llama(
            str(path),
            n_ctx=MAX_LEN,
            n_gpu_layers=self.num_gpu_layers,
            n_threads=cores,
            n_threads_batch=cores,
            flash_attn=True,
            use_mmap=False,
            draft_model=draft,
            verbose=False,
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate exactly `max_tokens` tokens for a request; return tokens, times and counts."""
        model = self.models[request["mode"]]
        model.reset()
        model.set_seed(request["seed"] & 0x7FFFFFFF)
        started = time.perf_counter()
        tokens: list[int] = []
        times: list[float] = []
        temperature = request["temperature"]
        made = model.generate(
            request["prompt"],
            temp=temperature,
            top_k=request["top_k"],
            top_p=request["top_p"],
            # A pair applies min_p after the temperature T, and llama.cpp before it. There min_p**T
            # keeps the same tokens: the ratio of two chances before T is that after it to the power
            # of T.
            min_p=request["min_p"] ** temperature if request["min_p"] else 0.0,
        )
        for token in made:
            tokens.append(int(token))
            times.append(time.perf_counter() - started)
            if len(tokens) == request["max_tokens"]:
                break
        return {"tokens": tokens, "times": times, "counts": [1] * len(times)}


def main() -> None:
    """Load the target, say that it is ready, and answer requests until standard input ends."""
    target, _, dtype, device = sys.argv[1:5]
    peer = Peer(target, dtype, device)
    peer.answer(WARM_UP)
    print(json.dumps({"ready": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
