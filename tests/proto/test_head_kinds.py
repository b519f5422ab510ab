"""How heads are recognised: by config.json, or by the names of their tensors."""

from typing import Any

import pytest

from proto.head_kinds import HeadKind, head_kind, head_kind_of_tensors, num_mtp_layers

LAYER = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"medusa_num_heads": 4, "medusa_num_layers": 1}, HeadKind.MEDUSA),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, HeadKind.EAGLE3),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, HeadKind.EAGLE3),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, HeadKind.EAGLE3),
        ({"speculators_model_type": "eagle3", "architectures": ["x"]}, HeadKind.EAGLE3),
        ({"architectures": ["LlamaForCausalLMEagle"]}, HeadKind.EAGLE),
        ({"architectures": ["EagleLlamaForCausalLM"]}, HeadKind.EAGLE),
        ({"speculators_model_type": "eagle"}, HeadKind.EAGLE),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 3}, HeadKind.DFLASH),
        ({"architectures": ["DFlash2DraftModel"]}, HeadKind.DFLASH),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": {}}, HeadKind.DFLASH),
        # Not heads, or not to be told by this alone.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, None),
        ({"architectures": ["Eagle2_5_VLForConditionalGeneration"]}, None),
        ({"speculators_model_type": "peagle", "draft_vocab_size": 3}, HeadKind.EAGLE3),
        ({"speculators_model_type": "medusa2", "draft_vocab_size": 3}, None),
        ({"architectures": "LlamaForCausalLMEagle"}, None),
        ({"architectures": [3, None]}, None),
        ({"speculators_model_type": 7}, None),
        ({}, None),
    ],
)
def test_a_configuration_tells_which_head_it_is_of(
    config: dict[str, Any], kind: HeadKind | None
) -> None:
    assert head_kind(config) is kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["0.0.linear.weight", "0.1.weight"], HeadKind.MEDUSA),
        (["medusa_head.3.0.linear.weight"], HeadKind.MEDUSA),
        (["fc.weight", *LAYER], HeadKind.EAGLE),
        (["model.fc.weight", *LAYER], HeadKind.EAGLE),
        (["fusion_fc.weight", "transformer.mlp.up_proj.weight"], HeadKind.EAGLE),
        (["fc.weight", "midlayer.hidden_norm.weight"], HeadKind.EAGLE3),
        (["fc.weight", "layers.0.hidden_norm.weight", *LAYER], HeadKind.EAGLE3),
        (["fc.weight", "d2t", *LAYER], HeadKind.EAGLE3),
        (["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"], None),
        # A head without its first matrix, and a Llama of one layer that is tied.
        (["layers.0.self_attn.q_proj.weight", "embed_tokens.weight"], HeadKind.EAGLE),
        (["midlayer.hidden_norm.weight"], HeadKind.EAGLE3),
        (["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"], None),
        ([], None),
    ],
)
def test_the_names_of_tensors_tell_which_head_it_is(
    names: list[str], kind: HeadKind | None
) -> None:
    assert head_kind_of_tensors(names) is kind


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"num_mtp_layers": 3}, 3),
        ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}, 1),
        ({"model_type": "qwen3_5_text"}, 0),
        ({"model_type": "qwen3_next"}, 1),
        ({"model_type": "qwen3_next", "num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": True}, 0),
        ({"num_nextn_predict_layers": None, "num_mtp_layers": 1}, 1),
    ],
)
def test_how_many_layers_for_drafting_a_target_has(config: dict[str, Any], number: int) -> None:
    assert num_mtp_layers(config) == number
