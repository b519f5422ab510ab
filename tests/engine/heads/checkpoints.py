"""Checkpoints of heads with random weights, in each of the layouts that there are."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, LAYERS = 64, 199, 3  # of the target in tests/tiny_models.py
DRAFT_VOCAB = 40
NUM_HEADS, NUM_KV_HEADS, DIM, INNER = 4, 2, 16, 96
THETA, EPSILON = 5000.0, 1e-5
EAGLE_LAYOUTS = (
    *("eagle", "eagle3", "speculators eagle", "speculators eagle3"),
    *("normed eagle3", "last eagle3"),  # EAGLE 3.1; a head that reads the last state alone
)
LAYOUTS = ("medusa", *EAGLE_LAYOUTS)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """What is saved, and the same by the names of one layout, for a plain computation.

    files     as in the folder
    weights   by names of their own: fc, q, k, v, o, gate, up, down and so on
    """

    config: dict[str, Any]
    files: Tensors
    weights: Tensors = field(default_factory=dict)
    file: str = "model.safetensors"

    def save(self, folder: Path) -> Path:
        """Write it; a name that ends in .bin or .pt is PyTorch's format."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        path = folder / self.file
        if path.suffix == ".safetensors":
            save_file({n: t.contiguous() for n, t in self.files.items()}, path)
        else:
            torch.save(self.files, path)
        return folder


def checkpoint(layout: str, seed: int = 0) -> Checkpoint:
    """A head for the small llama."""
    if layout == "medusa":
        return medusa(seed)
    weights = _weights(seed, third=layout.endswith("3"))
    match layout:
        case "eagle":
            # As the first ones: nothing in config.json tells it from a Llama of one layer.
            config = {**_layer_config(), "architectures": ["LlamaForCausalLM"]}
            return Checkpoint(config, _named(weights, "fc", "layers.0"), weights)
        case "eagle3":
            config = {
                **_layer_config(),
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": DRAFT_VOCAB,
            }
            return Checkpoint(config, _named(weights, "fc", "midlayer"), weights)
        case "normed eagle3":
            for number in range(3):
                weights[f"feature norm {number}"] = _random(seed + number + 1, HIDDEN)
            config = {
                **_layer_config(),
                "architectures": ["LlamaForCausalLMEagle3"],
                "fc_norm": True,
                "norm_output": True,
                "draft_vocab_size": DRAFT_VOCAB,
            }
            return Checkpoint(config, _named(weights, "fc", "layers.0"), weights)
        case "last eagle3":
            del weights["fc"]
            config = {
                **_layer_config(),
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": {"use_aux_hidden_state": False},
                "draft_vocab_size": DRAFT_VOCAB,
            }
            return Checkpoint(config, _named(weights, "fc", "midlayer"), weights)
        case "speculators eagle":
            del weights["fc bias"]
            files = _named(weights, "fusion_fc", "transformer")
            return Checkpoint(_of_speculators("eagle"), files, weights)
        case "speculators eagle3":
            weights["input norm"] = _random(seed + 1, 3 * HIDDEN)
            files = _named(weights, "fc", "layers.0")
            more = {"norm_before_residual": True, "draft_vocab_size": DRAFT_VOCAB}
            more |= {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}
            return Checkpoint({**_of_speculators("eagle3"), **more}, files, weights)
    raise ValueError(f"no layout {layout!r}")


def medusa(
    seed: int = 0, *, num_heads: int = 3, num_layers: int = 2, prefix: str = ""
) -> Checkpoint:
    """Medusa heads, the last one without an output matrix of its own."""
    files: Tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{prefix}{head}.{layer}.linear"
            files[f"{name}.weight"] = _random(seed + 10 * head + layer, HIDDEN, HIDDEN)
            files[f"{name}.bias"] = _random(seed + 10 * head + layer + 5, HIDDEN)
        if head < num_heads - 1:
            files[f"{prefix}{head}.{num_layers}.weight"] = _random(seed + head, VOCAB, HIDDEN)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    return Checkpoint(config, files, file="medusa_lm_head.safetensors")


def _weights(seed: int, *, third: bool) -> Tensors:
    entering, joined = (2 * HIDDEN, 3 * HIDDEN) if third else (HIDDEN, 2 * HIDDEN)
    sizes = {
        "fc": (HIDDEN, joined),
        "q": (NUM_HEADS * DIM, entering),
        "k": (NUM_KV_HEADS * DIM, entering),
        "v": (NUM_KV_HEADS * DIM, entering),
        "o": (HIDDEN, NUM_HEADS * DIM),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
        "post norm": (HIDDEN,),
    }
    if third:
        sizes |= {"embedding norm": (HIDDEN,), "hidden norm": (HIDDEN,), "norm": (HIDDEN,)}
        sizes["lm_head"] = DRAFT_VOCAB, HIDDEN
    else:
        sizes |= {"fc bias": (HIDDEN,), "q bias": (NUM_HEADS * DIM,)}
    made = {name: _random(100 * seed + i, *size) for i, (name, size) in enumerate(sizes.items())}
    if third:
        drawn = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
        made["targets"] = drawn[:DRAFT_VOCAB].sort().values
    return made


def _named(weights: Tensors, fc: str, layer: str) -> Tensors:
    """The tensors as a layout calls them."""
    names = {
        "fc": f"{fc}.weight",
        "fc bias": f"{fc}.bias",
        "q bias": f"{layer}.self_attn.q_proj.bias",
    }
    names |= {x: f"{layer}.self_attn.{x}_proj.weight" for x in "qkvo"}
    names |= {x: f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    names |= {
        "post norm": f"{layer}.post_attention_layernorm.weight",
        "embedding norm": f"{layer}.input_layernorm.weight",
        "hidden norm": f"{layer}.hidden_norm.weight",
        "input norm": "input_norm.weight",
        **{f"feature norm {number}": f"fc_norm.{number}.weight" for number in range(3)},
        "norm": "norm.weight",
        "lm_head": "lm_head.weight",
    }
    made = {names[name]: tensor for name, tensor in weights.items() if name in names}
    if (targets := weights.get("targets")) is not None:
        made["d2t"] = targets - torch.arange(DRAFT_VOCAB)
        made["t2d"] = torch.isin(torch.arange(VOCAB), targets)
    return made


def _layer_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
    }


def _of_speculators(kind: str) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somebody/target"}},
        "transformer_layer_config": _layer_config(),
    }


def _random(seed: int, *size: int) -> torch.Tensor:
    """Norms are around one. Wider matrices would make much of the last bits in a long chain."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return 1 + 0.2 * drawn if len(size) == 1 else drawn * 0.8 / size[-1] ** 0.5
