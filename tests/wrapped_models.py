"""Small random models of several modalities, saved as they are published, and their other names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tests.tiny_models import remember, widened

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WIDE = {**TEXT, "head_dim": 16}
WINDOW = {"sliding_window": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PLANES = {"rope_parameters": ROPE}
CHUNKS = {"num_local_experts": 2, "intermediate_size_mlp": 128, "floor_scale": 16}
CHUNKS |= {"no_rope_layers": [1, 0, 1], "attention_chunk_size": 16}
SEEN = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = {**SEEN, "model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = {**SEEN, "model_type": "siglip_vision_model"}
PIXTRAL = {**SEEN, "model_type": "pixtral"}
INTERN = {**SEEN, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
QWEN = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "intermediate_size": 32}
QWEN |= {"out_hidden_size": 64}
LLAMA4 = {**SEEN, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
GOT = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GOT |= {"image_size": 64, "patch_size": 16, "global_attn_indexes": [0], "mlp_dim": 32}
HEARD = {"hidden_size": 32, "intermediate_size": 32, "num_mel_bins": 8, "max_source_positions": 20}
HEARD |= {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
PERCEIVER = {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1}
PERCEIVER |= {"resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 2}

LLAMA = {**TEXT, "model_type": "llama"}
QWEN2 = {**TEXT, "model_type": "qwen2"}
LFM2 = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
COHERE2 = {**TEXT, **WINDOW, "model_type": "cohere2", "logit_scale": 1.0}
MISTRAL = {**WIDE, "model_type": "mistral", "sliding_window": None}
EXAONE = {**TEXT, **WINDOW, "model_type": "exaone4", "sliding_window_pattern": 4}
DELTA = {
    **WIDE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DEEP = {**QWEN, "deepstack_visual_indexes": [0]}
# Model type -> the configurations of its language model and of the part that sees.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aya_vision": (COHERE2, SIGLIP),
    "cohere2_vision": (COHERE2, SIGLIP),
    "deepseek_vl": (LLAMA, SIGLIP),
    "exaone4_5": (EXAONE, {**QWEN, "num_key_value_heads": 2}),
    "gemma3": ({**WIDE, **WINDOW}, SEEN),
    "got_ocr2": (QWEN2, GOT),
    "idefics2": (MISTRAL, SEEN),
    "idefics3": (LLAMA, SEEN),
    "internvl": (QWEN2, INTERN),
    "lfm2_vl": (LFM2, {**SEEN, "model_type": "siglip2_vision_model", "num_patches": 4}),
    "lighton_ocr": ({**WIDE, "model_type": "qwen3"}, PIXTRAL),
    "llama4": ({**WIDE, **CHUNKS}, LLAMA4),
    "llava": (LLAMA, CLIP),
    "llava_next": (LLAMA, CLIP),
    "llava_next_video": (LLAMA, CLIP),
    "llava_onevision": (QWEN2, SIGLIP),
    "mistral3": (MISTRAL, PIXTRAL),
    "qwen2_5_vl": ({**TEXT, **PLANES}, QWEN),
    "qwen2_vl": ({**TEXT, **PLANES}, QWEN),
    "qwen3_5": (DELTA, QWEN),
    "qwen3_5_moe": ({**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48}, QWEN),
    "qwen3_vl": ({**WIDE, **PLANES}, DEEP),
    "qwen3_vl_moe": ({**WIDE, **PLANES, **EXPERTS}, DEEP),
    "smolvlm": (LLAMA, SEEN),
    "vipllava": (LLAMA, {**CLIP, "num_hidden_layers": 12}),
}
# The same of those that hear.
HEARING = {
    "qwen2_audio": (QWEN2, {**HEARD, "model_type": "qwen2_audio_encoder"}),
    "voxtral": (LLAMA, {**HEARD, "num_hidden_layers": 1, "num_attention_heads": 2}),
}
WRAPPERS = SEEING | HEARING


def make_wrapped(kind: str, out: Path, **fields: Any) -> Path:
    """Save a model of that type, with those fields in its config beside the usual; return `out`."""
    text, other = WRAPPERS[kind]
    part = "vision_config" if kind in SEEING else "audio_config"
    fields = {"text_config": dict(text), part: other} | fields
    if kind in SEEING:
        is_id = "qwen" in kind or kind in ("deepseek_vl", "lfm2_vl")
        by = "image_token_id" if is_id else "image_token_index"
        fields[by] = 190
    if kind == "idefics2":
        fields["perceiver_config"] = PERCEIVER
    torch.manual_seed(1)
    config = hf.CONFIG_MAPPING[kind](**fields)
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
    made = widened(model.float().eval(), 3.0, 5)
    remember(made)
    made.save_pretrained(out)
    return out


def whole(folder: Path) -> Any:
    """The model with all its parts, as transformers reads it."""
    kind: Any = hf.AutoModelForMultimodalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Give the tensors of a folder other names."""
    path = folder / "model.safetensors"
    tensors = {new(name): tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def flatten(folder: Path) -> None:
    """Write the language model's fields beside the others, as in the first files of Qwen2-VL."""
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    text = stated.pop("text_config")
    path.write_text(json.dumps(text | stated | {"rope_scaling": ROPE | {"type": "mrope"}}))
