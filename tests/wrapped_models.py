"""Small random models of several modalities, saved as they are published, and their other names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.tiny_models import widened

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
WINDOW = {"sliding_window": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PLANES = {"rope_parameters": ROPE}
CHUNKS = {"num_local_experts": 2, "intermediate_size_mlp": 128}
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
# Model type -> the configurations of its language model and of the part that sees.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aya_vision": ({**TEXT, **WINDOW, "model_type": "cohere2", "logit_scale": 1.0}, SIGLIP),
    "cohere2_vision": ({**TEXT, **WINDOW, "model_type": "cohere2", "logit_scale": 1.0}, SIGLIP),
    "gemma3": ({**WIDE, **WINDOW}, SEEN),
    "idefics3": ({**TEXT, "model_type": "llama"}, SEEN),
    "internvl": ({**TEXT, "model_type": "qwen2"}, INTERN),
    "llama4": ({**WIDE, **CHUNKS, "layer_types": ["full_attention"] * 3}, LLAMA4),
    "llava": ({**TEXT, "model_type": "llama"}, CLIP),
    "llava_next": ({**TEXT, "model_type": "llama"}, CLIP),
    "llava_onevision": ({**TEXT, "model_type": "qwen2"}, SIGLIP),
    "mistral3": ({**WIDE, "model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "qwen2_5_vl": ({**TEXT, **PLANES}, QWEN),
    "qwen2_vl": ({**TEXT, **PLANES}, QWEN),
    "qwen3_vl": ({**WIDE, **PLANES}, {**QWEN, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ({**WIDE, **PLANES, **EXPERTS}, {**QWEN, "deepstack_visual_indexes": [0]}),
    "smolvlm": ({**TEXT, "model_type": "llama"}, SEEN),
}


def make_wrapped(kind: str, out: Path, **fields: Any) -> Path:
    """Save a model of that type, with those fields in its config beside the usual; return `out`."""
    text, seen = WRAPPERS[kind]
    words = {"image_token_id": 190} if kind.startswith("qwen") else {"image_token_index": 190}
    torch.manual_seed(1)
    config = hf.CONFIG_MAPPING[kind](text_config=dict(text), vision_config=seen, **words, **fields)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
    widened(model.float().eval(), 3.0, 5).save_pretrained(out)
    return out


def whole(folder: Path) -> Any:
    """The model with all its parts, as transformers reads it."""
    kind: Any = hf.AutoModelForImageTextToText
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
