"""Small random models of the families that people serve, to compare with transformers.

Each has four layers and is 64 wide. Windows and chunks are 16 tokens long, so that short texts and
the branches of a tree are longer. Whatever a family has besides plain attention (soft caps, sinks,
temperatures, multipliers, biases, norms) is set so that logits change visibly if it is left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.draws import first_good, made_once, stored
from tests.tiny_models import add_noise, remember, widened

VOCAB = 199
WINDOW = 16  # tokens of a window, and of a chunk
LENGTH = 200  # tokens of a text, with its prompt
# Shorter than a window, longer than one, and longer than two.
PROMPTS = ((5, 9, 33, 71), tuple(range(30, 53)), tuple(range(150, 110, -1)))
NUM_DRAWS = 30
MIN_DISTINCT = 36  # different tokens in the text by which a model is chosen
_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW: Mapping[str, Any] = {"sliding_window": WINDOW}
_UPPER: Mapping[str, Any] = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2}
_WIDE: Mapping[str, Any] = {"head_dim": 16}
_CAPS: Mapping[str, Any] = {
    **_WIDE,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 12.0,
}
_EXPERTS: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FEW: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
}
_DELTA_RULE: Mapping[str, Any] = {
    **_WIDE,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA_2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}
_MUP: Mapping[str, Any] = {
    **_MAMBA_2,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 1.5,
    "key_multiplier": 1.3,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
    "mlp_multipliers": [1.2, 0.8],
    "lm_head_multiplier": 0.9,
}
# Transformers' `generate` does not hold each token to the least step (`engine/forward/mamba2.py`);
# with this one it makes no difference.
_STEPS: Mapping[str, Any] = {"time_step_min": 1e-6, "time_step_max": 2.0}
_SHARED: Mapping[str, Any] = {
    **_STEPS,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "chunk_size": 32,
    "num_mem_blocks": 1,
    "use_mem_rope": True,
    "adapter_rank": 64,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_KIMI_DELTA: Mapping[str, Any] = {
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "model_max_length": 1024,
}
_MAMBA_1: Mapping[str, Any] = {
    "intermediate_size": 128,
    "state_size": 8,
    "time_step_rank": 8,
    "tie_word_embeddings": False,
}
_CONVOLVED: Mapping[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
}
_LATENT: Mapping[str, Any] = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MULTIPLIERS: Mapping[str, Any] = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.25,
    "logits_scaling": 0.8,
}


def _rope(kind: str, **fields: float) -> Mapping[str, Any]:
    """Return rotary embeddings of a kind, stretched from 64 positions."""
    stretched = {"original_max_position_embeddings": 64, "rope_theta": 10000.0, "factor": 4.0}
    return {"rope_parameters": {"rope_type": kind, **stretched, **fields}}


# Name -> fields of the configuration. A name is the model type, perhaps with a word after a hyphen.
WINDOWED: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {**_WINDOW, "logit_scale": 1.0},
    "exaone4": {**_WINDOW, "sliding_window_pattern": 4},
    "gemma2": {**_WINDOW, **_CAPS, "tie_word_embeddings": False},
    "gemma3_text": {
        **_WINDOW,
        **_WIDE,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
    "gpt_oss": {**_WINDOW, **_WIDE, **_EXPERTS},
    "llama4_text": {
        **_WIDE,
        **_EXPERTS,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "floor_scale": 2 * WINDOW,
    },
    "ministral": {**_WINDOW, **_WIDE},
    "mistral-window": _WINDOW,
    "mixtral-window": {**_WINDOW, **_EXPERTS},
    "olmo3": _WINDOW,
    "phi3-window": _WINDOW,
    "qwen2-window": _UPPER,
    "qwen3-window": {**_UPPER, **_WIDE},
    "qwen3_moe-window": {**_UPPER, **_WIDE, **_FEW},
    "smollm3-window": {**_WINDOW, "use_sliding_window": True},
    "starcoder2-window": _WINDOW,
    "vaultgemma": {**_WINDOW, **_CAPS},
}
FULL: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {**_KIMI_DELTA, "kda_lower_bound": -0.05},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [2]},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "dots1": {**_ROUTED, **_WIDE},
    "ernie4_5": _WIDE,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": _MUP,
    "falcon_mamba": _MAMBA_1,
    "gemma": _WIDE,
    "glm": _WIDE,
    "glm4": _WIDE,
    "glm4_moe": {**_ROUTED, **_WIDE, "use_qk_norm": True},
    "gpt2": {},
    "gpt_neox": {},
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, **_EXPERTS},
    "granitemoehybrid": {
        **_MAMBA_2,
        **_MULTIPLIERS,
        **_EXPERTS,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "shared_intermediate_size": 64,
    },
    "hunyuan_v1_dense": _WIDE,
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": _KIMI_DELTA,
    "lfm2": _CONVOLVED,
    "lfm2_moe": {**_CONVOLVED, **_FEW, "num_dense_layers": 1},
    "llama": {},
    "llama-linear": _rope("linear"),
    "llama-llama3": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "llama-yarn": _rope("yarn"),
    "mamba": _MAMBA_1,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "minimax": {
        **_WIDE,
        **_EXPERTS,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "block_size": 32,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.3,
    },
    "mistral": {"sliding_window": None},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "nemotron": {},
    "nemotron_h": {
        **_WIDE,
        **_ROUTED,
        **_STEPS,
        "hybrid_override_pattern": "M-*ME",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo2": {},
    "olmo_hybrid": _DELTA_RULE,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**_FEW, "shared_expert_intermediate_size": 64},
    "qwen3": _WIDE,
    "qwen3_5_moe_text": {**_DELTA_RULE, **_FEW, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_moe": {**_FEW, **_WIDE},
    "qwen3_next": {**_DELTA_RULE, **_FEW, "shared_expert_intermediate_size": 64},
    "recurrent_gemma": {
        **_WIDE,
        "lru_width": 64,
        "attention_window_size": WINDOW,
        "intermediate_size": 256,
        "block_types": ["recurrent", "recurrent", "attention"],
        "logits_soft_cap": 12.0,
        "tie_word_embeddings": False,
    },
    "seed_oss": _WIDE,
    "smollm3": {},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "zamba2": _SHARED,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {**WINDOWED, **FULL}
_PER_LAYER: Mapping[str, Any] = {
    **_WINDOW,
    **_WIDE,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": False,
}
# Other forms of families, of which the engine is compared with transformers; no pair is started.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3-yarn": {**_LATENT, **_rope("yarn", mscale=1.0, mscale_all_dim=1.0)},
    "falcon-rw": {"multi_query": False, "parallel_attn": False, "bias": True},
    "falcon_h1-norm": {**_MUP, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "gemma3n_text-shared": {
        **_PER_LAYER,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text-shared": _PER_LAYER,
    "granitemoehybrid-dense": {
        **_MAMBA_2,
        **_MULTIPLIERS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 64,
    },
    "zamba2-adapter": {**_SHARED, "use_shared_attention_adapter": True, "num_mem_blocks": 2},
    "ministral3-yarn": {**_WIDE, **_rope("yarn", llama_4_scaling_beta=0.5)},
}
ALL: Mapping[str, Mapping[str, Any]] = {**FAMILIES, **FORMS}
# Tested where there is little time: a window in some layers, in all layers, chunks, experts, sinks,
# short convolutions, two kinds of a running state.
USUAL = (
    "bamba",
    "gemma3_text",
    "gpt_oss",
    "lfm2",
    "llama4_text",
    "mistral-window",
    "qwen3_5_text",
    "qwen3_moe",
)
# Model types with one key-value head per query head, whose configurations have no other number.
_ONE_EACH = ("falcon", "gpt2", "gpt_neox", "opt", "persimmon")
# How wide the matrices are drawn; where the usual is not enough, texts would repeat themselves.
_GAIN = 3.0
_GAINS: Mapping[str, float] = {
    **dict.fromkeys(("falcon", "gpt2", "gpt_neox", "opt", "persimmon"), 5.0),
    # With the usual gain rounding alone changes their logits by more than 1e-3.
    "minimax": 1.6,
    "zamba2-adapter": 2.0,
}


def kind_of(name: str) -> str:
    """Return the model type of the family `name`; other names are model types themselves."""
    return name.partition("-")[0] if name in ALL else name


def config_of(name: str) -> Any:
    """Return the configuration of a small model of the family `name`."""
    kind = kind_of(name)
    sizes = dict(_SIZES)
    if kind in _ONE_EACH:
        del sizes["num_key_value_heads"]
    return hf.AutoConfig.for_model(kind, **{**sizes, **ALL[name]})


def make_family(name: str, folder: Path) -> Path:
    """Save a random small model of the family `name` in `folder`; return `folder`.

    The draw is the first whose greedy text shows `MIN_DISTINCT` different tokens (`draws.json`).
    """

    def make(into: Path) -> None:
        number = stored().get(name_of(name))
        random_family(name, search(name) if number is None else number).save_pretrained(into)

    return made_once(("family", name), make, folder)


def name_of(name: str) -> str:
    """The name of a family in `draws.json`."""
    return f"family {name}"


def search(name: str) -> int:
    """Return the number of the first draw whose greedy text shows enough different tokens."""

    def is_good(number: int) -> bool:
        return len(set(greedy_text(random_family(name, number), PROMPTS[1]))) >= MIN_DISTINCT

    found = first_good(is_good, NUM_DRAWS)
    assert found is not None, f"{name}: every text repeats itself"
    return found


def random_family(name: str, number: int) -> Any:
    """Return the model of this draw, in float32. The random state of torch stays as it is."""
    kind: Any = hf.AutoModelForCausalLM
    random_state = torch.get_rng_state()
    torch.manual_seed(number)
    model = kind.from_config(config_of(name)).float().eval()
    torch.set_rng_state(random_state)
    _draw(model, _GAINS.get(name, _GAIN), number)
    remember(model)
    return model


def make_drafter(target: Path, out: Path, text: list[int]) -> Path:
    """Save a copy of the model in `target` with noise, which nearly always agrees, as `out`.

    It has the most noise, of some amounts, with which it agrees on five of six tokens of `text`,
    which the target has written. Returns `out`.
    """
    for step in range(12):
        model = add_noise(load(target), 0.2 / 2**step)
        if _agreement(model, text) >= 5 / 6:
            model.save_pretrained(out)
            return out
    raise AssertionError(f"{target}: the least noise changes its text")


def load(folder: Path, **fields: Any) -> Any:
    """Return transformers' own model of a folder, in float32; `fields` replace configuration."""
    kind: Any = hf.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, **fields).eval()


def greedy_text(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Return the tokens that transformers' own `generate` appends, up to `LENGTH`."""
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=LENGTH - len(prompt),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in text[0, len(prompt) :]]


def _draw(model: Any, gain: float, seed: int) -> None:
    """Draw all weights anew: matrices as `widened` does, vectors near what they were."""
    widened(model, gain, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                spread = 2.0 if name.endswith("sinks") else 0.1
                weight += spread * torch.randn(weight.shape, generator=generator)


def _agreement(model: Any, text: list[int]) -> float:
    """Return the share of the tokens of `text` that the model would choose too."""
    with torch.inference_mode():
        choices = model(torch.tensor([text])).logits[0, :-1].argmax(-1)
    return float((choices == torch.tensor(text[1:])).float().mean())
