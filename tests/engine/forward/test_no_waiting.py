"""Recorded passes of each family make the host wait for nothing, so a GPU can record them.

The GPU is played (`stand_in.py`): whatever would make the host wait raises an error. Loading also
compares the logits of recorded passes with those of transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.loading import make_executor
from tests.engine.forward.test_recorded_families import inner_of
from tests.engine.stand_in import StandIn, device
from tests.tiny_models import widened

__all__ = ["device"]  # a fixture
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WIDE = {"head_dim": 16}
WINDOW = {"sliding_window": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {  # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DBRX_EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "DeepseekV2Config": {**ROUTED, **LATENT},
    "DeepseekV3Config": {**ROUTED, **LATENT},
    "Dots1Config": {**ROUTED, **WIDE},
    "Ernie4_5_MoeConfig": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "FlexOlmoConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "Glm4MoeConfig": {**ROUTED, **WIDE},
    "Glm4MoeLiteConfig": {**ROUTED, **LATENT},
    "GptOssConfig": {**LOCAL, **WIDE, **WINDOW},
    "GraniteMoeConfig": LOCAL,
    "GraniteMoeSharedConfig": {**LOCAL, "shared_intermediate_size": 32},
    "HunYuanMoEV1Config": {**WIDE, "num_experts": 4, "moe_topk": 2},
    "Llama4TextConfig": {
        **LOCAL,
        **WIDE,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 16,
    },
    "MiniMaxM2Config": {**LOCAL, **WIDE},
    "MixtralConfig": {**LOCAL, **WINDOW},
    "OlmoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "PhimoeConfig": LOCAL,
    "Qwen2MoeConfig": {**FEW, "shared_expert_intermediate_size": 32},
    "Qwen3MoeConfig": {**FEW, **WIDE},
    "SolarOpenConfig": {**ROUTED, **WIDE},
}
DENSE: dict[str, dict[str, Any]] = {
    "ApertusConfig": {},
    "ArceeConfig": {},
    "Cohere2Config": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "CohereConfig": {},
    "Exaone4Config": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2Config": {**WIDE, **WINDOW},
    "Gemma3TextConfig": {**WIDE, **WINDOW},
    "GemmaConfig": WIDE,
    "Glm4Config": WIDE,
    "GlmConfig": WIDE,
    "GraniteConfig": {},
    "HunYuanDenseV1Config": WIDE,
    "MinistralConfig": {**WIDE, **WINDOW},
    "NemotronConfig": {},
    "Olmo2Config": {},
    "Olmo3Config": WINDOW,
    "OlmoConfig": {},
    "Phi3Config": WINDOW,
    "PhiConfig": {},
    "SeedOssConfig": WIDE,
    "SmolLM3Config": {**WINDOW, "use_sliding_window": True},
    "StableLmConfig": {},
    "Starcoder2Config": WINDOW,
    "VaultGemmaConfig": {**WIDE, **WINDOW},
}
# These fetch how many rows each expert has, in code of their own.
WAITING: dict[str, dict[str, Any]] = {
    "DbrxConfig": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "vocab_size": 99,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": DBRX_EXPERTS,
    },
    "JetMoeConfig": {**SIZES, **LOCAL, "kv_channels": 16},
}


def saved(name: str, folder: Path, fields: dict[str, Any]) -> Path:
    """Save a small random model of a family in `folder`; return `folder`."""
    torch.manual_seed(1)
    config = getattr(hf, name)(**fields)
    kind: Any = hf.AutoModelForCausalLM
    widened(kind.from_config(config).float().eval(), 2.0, 1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*MIXTURES, *DENSE])
def test_a_recorded_pass_waits_for_no_number(name: str, tmp_path: Path, device: StandIn) -> None:
    fields = {**SIZES, **{**MIXTURES, **DENSE}[name]}
    loaded = load_model(str(saved(name, tmp_path, fields)), dtype="float32")
    executor = make_executor(loaded, 96, backend="graphs", row_counts=(1, 4))
    inner = inner_of(executor)
    assert inner.name == "reference"
    assert bool(inner.experts.is_used) == (name in MIXTURES and name != "Llama4TextConfig")
    assert device.num_captures > 0


@pytest.mark.parametrize("name", WAITING)
def test_experts_that_fetch_their_numbers_of_rows_are_not_recorded(
    name: str, tmp_path: Path, device: StandIn
) -> None:
    loaded = load_model(str(saved(name, tmp_path, WAITING[name])), dtype="float32")
    with pytest.raises(ModelError, match="cannot be recorded as CUDA graphs"):
        make_executor(loaded, 96, backend="graphs", row_counts=(1, 4))
    assert make_executor(loaded, 96).backend == "reference"
