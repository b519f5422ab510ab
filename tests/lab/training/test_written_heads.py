"""The heads that are part of the repository: their layout, and whether they know their target."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from lab.training.first_choices import head_hits, rates
from lab.training.heads import FILES, NUM_MEDUSA_HEADS, load_head
from lab.training.teacher import load_teacher
from proto.head_kinds import HeadKind
from proto.installation import MODELS

H, KEYS, MLP, VOCAB = 384, 192, 1024, 4096
DRAFT_VOCAB_SIZE = 2048
MAX_BYTES = 24_000_000  # together
LAYER = {
    "self_attn.o_proj": (H, H),
    "mlp.gate_proj": (MLP, H),
    "mlp.up_proj": (MLP, H),
    "mlp.down_proj": (H, MLP),
    "post_attention_layernorm": (H,),
}
LAYOUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "medusa": {
        name: shape
        for i in range(NUM_MEDUSA_HEADS)
        for name, shape in {
            f"{i}.0.linear.weight": (H, H),
            f"{i}.0.linear.bias": (H,),
            f"{i}.1.weight": (VOCAB, H),
        }.items()
    },
    "eagle": {
        "fc.weight": (H, 2 * H),
        "fc.bias": (H,),
        **{f"layers.0.{name}.weight": shape for name, shape in LAYER.items()},
        "layers.0.self_attn.q_proj.weight": (H, H),
        "layers.0.self_attn.k_proj.weight": (KEYS, H),
        "layers.0.self_attn.v_proj.weight": (KEYS, H),
    },
    "eagle3": {
        "fc.weight": (H, 3 * H),
        **{f"midlayer.{name}.weight": shape for name, shape in LAYER.items()},
        "midlayer.self_attn.q_proj.weight": (H, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KEYS, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KEYS, 2 * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (DRAFT_VOCAB_SIZE, H),
        "d2t": (DRAFT_VOCAB_SIZE,),
        "t2d": (VOCAB,),
    },
}
DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
LLAMA_FIELDS = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
FIELDS: dict[str, dict[str, Any]] = {
    "medusa": {
        "medusa_num_heads": NUM_MEDUSA_HEADS,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "models/target",
        "hidden_size": H,
        "vocab_size": VOCAB,
    },
    "eagle": {**LLAMA_FIELDS, "architectures": ["LlamaForCausalLM"], "bias": True},
    "eagle3": {
        **LLAMA_FIELDS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
    },
}
# Of the first draft on one greedy text, where chance would be nothing and a feature that meets
# the wrong token next to nothing.
MIN_HITS = {"medusa": 0.3, "eagle": 0.5, "eagle3": 0.5}
PROMPT = "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    """All of a head's, by name."""
    with safe_open(MODELS / name / FILES[name], framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_has_the_tensors_of_its_layout_and_no_others(name: str) -> None:
    tensors = tensors_of(name)
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == LAYOUTS[name]
    for key, tensor in tensors.items():
        assert tensor.dtype == DTYPES.get(key, torch.bfloat16), key
        assert tensor.isfinite().all(), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_configuration_has_the_fields_of_published_ones(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    assert {key: config.get(key) for key in FIELDS[name]} == FIELDS[name]


def test_the_heads_are_small_enough_to_be_kept() -> None:
    sizes = [file.stat().st_size for name in LAYOUTS for file in (MODELS / name).iterdir()]
    assert sum(sizes) <= MAX_BYTES


def test_the_two_maps_of_the_vocabulary_agree() -> None:
    tensors = tensors_of("eagle3")
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_the_heads_are_right_about_their_target() -> None:
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    prompt = np.array(tokenizer.encode(PROMPT).ids)
    found = {}
    for kind in map(HeadKind, LAYOUTS):
        target = str(MODELS / "target")
        teacher = load_teacher(target, None, kind, dtype="float32", device="cpu")
        hits = head_hits(load_head(kind, teacher.shared, MODELS / kind), teacher)
        ((found[kind], *_),) = rates(teacher, [hits], [prompt], len(prompt) + 64, 0.0)
    assert {kind for kind, rate in found.items() if rate < MIN_HITS[kind]} == set(), found
