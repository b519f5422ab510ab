"""A small random model of any family that runs, made of transformers' own configuration of it."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import CONFIG_MAPPING

from engine.checkpoint.families import family
from tests.tiny_models import remember, widened

MAX_LEN = 512
_VOCAB, _HIDDEN, _INNER = 199, 32, 48
# The fields of all families, under the names that these have for them. A family gets those that
# its configuration knows.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), _HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    "num_global_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("swa_v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "ffn_hidden_size"), _INNER),
    "intermediate_size_mlp": _INNER,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), MAX_LEN),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), 4),
    "n_routed_experts": 8,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), _HIDDEN),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), _HIDDEN),
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 2,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
_FLAGS = {"use_sliding_window": True}

_DELTA_RULE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA_2 = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "time_step_limit": [0.5, 1.2],
}
_KIMI_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "kv_lora_rank": 16,
    "num_experts_per_token": 2,
    "num_experts": 4,
    "model_max_length": MAX_LEN,
}
_MAMBA_1 = {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64}
_WIDE = {_HIDDEN: 64, _INNER: 128}
_OF_KIND: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 64, "key_multiplier": 1.3},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "bailing_hybrid": {
        **_KIMI_DELTA,
        "num_expert_group": 2,
        "topk_group": 1,
        "kda_lower_bound": -0.05,
    },
    "falcon_mamba": _MAMBA_1,
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _KIMI_DELTA,
    "mamba": _MAMBA_1,
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "time_step_limit": [0.5, 1.2],
        "chunk_size": 32,
    },
    "minimax": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "sliding_window": None,
        "block_size": 32,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.3,
    },
    "olmo_hybrid": {**_DELTA_RULE, "num_key_value_heads": 2},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "attention_window_size": 16,
        "lru_width": _HIDDEN,
        "intermediate_size": 2 * _INNER,
        "num_key_value_heads": 2,
    },
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 2 * _HIDDEN,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": _INNER,
            "hidden_size": _HIDDEN,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "doge": {"sliding_window": None},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]},
    "helium": {"head_dim": 8},  # hidden_size / num_attention_heads
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "nemotron_h": {
        "hybrid_override_pattern": "M-*ME",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": _HIDDEN,
        "sliding_window": None,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "num_key_value_heads": 4,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
}


def make_small(kind: str, folder: Path, *, is_wide: bool = False) -> Path:
    """Save a small random model of a model type in `folder`; return `folder`.

    is_wide  True: rows of 64 and 128 numbers and 32 experts, which fill whole vectors as those of
             real models do

    It has two layers, of all kinds that the family has: full attention, windows of 16, chunks.
    """
    known = CONFIG_MAPPING[kind]().to_dict()
    named = {*known, *CONFIG_MAPPING[kind].attribute_map}
    fields = {name: value for name, value in {**_FIELDS, **_FLAGS}.items() if name in named}
    if known.get("kv_lora_rank"):  # multi-head latent attention: as many key heads as query heads
        fields["num_key_value_heads"] = 4
    if known.get("layer_types"):
        kinds = list(dict.fromkeys(known["layer_types"]))
        if kinds == ["full_attention"] and family(kind).has_windows:
            kinds.append("sliding_attention")
        fields["layer_types"] = (kinds * 2)[:2]
    if known.get("mlp_layer_types"):
        fields["mlp_layer_types"] = ["dense", "sparse"]
    fields |= _OF_KIND.get(kind, {})
    if is_wide:
        sizes = {name: value for name, value in fields.items() if type(value) is int}
        fields |= {name: _WIDE.get(value, value) for name, value in sizes.items()}
        fields |= {name: 32 for name in _EXPERTS if name in fields}
    config = CONFIG_MAPPING[kind](**fields)
    torch.manual_seed(1)
    model: Any = hf.AutoModelForCausalLM
    made = widened(model.from_config(config).float().eval(), 2.0, 1)
    remember(made)
    made.save_pretrained(folder)
    return folder
