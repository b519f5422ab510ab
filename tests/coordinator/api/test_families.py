"""Families that cannot work: the coordinator refuses just those that the engine refuses."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from coordinator.api.models.nodes import node_configs
from coordinator.api.models.preflight import Preflight
from engine.checkpoint import families
from engine.errors import ModelError
from proto.errors import SlipstreamError
from tests.coordinator.api.test_heads import LLAMA

# Their configuration of all defaults raises in transformers itself.
WITHOUT_DEFAULTS = {"gemma4_assistant", "gemma4_unified_assistant"}
WIDTH = re.compile(r" \(\d+ tokens\)")
REFUSED = {
    "rwkv": "recurrent states that it keeps outside of transformers' caches",
    "zaya": "attention whose queries, keys and values are mixed",
    "gpt_neo": "an attention mask of its own",
    "moshi": "sliding-window attention",
    "dots3_note": "sliding-window attention",
    "deepseek_v4": "keys and values that stand for several tokens",
    "deepseek_v32": "sparse attention",
    "roberta": "positions that it counts itself",
    "bert": "a view of the whole text at once",
    "openai-gpt": "no cache of a key and a value per token",
    "blt": "patches of bytes",
    "mpt": "ALiBi position biases",
}
RUN = (
    "llama",
    "mistral",
    "gemma2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gpt2",
    "phi3",
    "deepseek_v3",
    "glm4_moe",
)


# Whose running state rolls back.
WITH_STATES = {
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
    *("zamba", "zamba2"),
}


def causal_kinds() -> list[str]:
    """Every model type that transformers has a causal language model for."""
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in WITHOUT_DEFAULTS]


@cache
def configuration(kind: str) -> Any:
    """As transformers has it where config.json names the model type alone."""
    return CONFIG_MAPPING[kind]()


def said_before(stated: dict[str, Any], text: dict[str, Any] | None = None) -> str:
    """What the coordinator says of a config.json, and the node first; empty: nothing."""
    try:
        families.refuse("M", Path("config.json"), stated, text)
    except ModelError as error:
        return str(error)
    return ""


def said_by_engine(config: Any) -> str:
    """What the node says of what transformers makes of it."""
    return said_before(config.to_dict(), config.get_text_config(decoder=True).to_dict())


def test_the_table_names_just_what_transformers_has() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == families.CAUSAL


@pytest.mark.parametrize("kind", causal_kinds())
def test_what_the_engine_refuses_is_refused_before_a_process_is_started(kind: str) -> None:
    config = configuration(kind)
    assert type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._is_stateful and kind not in WITH_STATES:
        assert f"{config.model_type} has " in said_before({"model_type": kind})
    check_both_say_the_same(kind)


@pytest.mark.parametrize("kind", families.WRAPPERS)
def test_of_a_wrapper_both_look_at_its_language_model(kind: str) -> None:
    check_both_say_the_same(kind)


@pytest.mark.parametrize("kind", families.WRAPPERS)
def test_a_language_model_that_is_not_named_is_the_one_of_transformers(kind: str) -> None:
    text = configuration(kind).get_text_config(decoder=True).to_dict()
    assert families.text_kind(kind, {}) == families.text_kind(kind, text)


def check_both_say_the_same(kind: str) -> None:
    """Of a configuration of all defaults, stated or not."""
    config = configuration(kind)
    line = said_by_engine(config)
    whole = json.loads(config.to_json_string(use_diff=False))
    assert said_before(whole) == line
    # How wide the window is where config.json does not state it, only transformers knows.
    assert WIDTH.sub("", said_before({"model_type": kind})) == WIDTH.sub("", line)


@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
def test_a_family_that_cannot_work_is_refused_with_what_it_has(kind: str, why: str) -> None:
    assert said_before({"model_type": kind}).startswith(f"M: {kind} has {why}")


@pytest.mark.parametrize("kind", RUN)
def test_a_family_that_works_is_not_refused(kind: str) -> None:
    assert said_before({"model_type": kind}) == said_by_engine(configuration(kind)) == ""


@pytest.mark.parametrize(
    ("stated", "is_refused"),
    [
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "mixtral", "sliding_window": 512}, False),
        ({"model_type": "qwen2", "sliding_window": 512}, False),
        ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 28}, False),
        ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 29}, False),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 64}, False),
        ({"model_type": "afmoe", "sliding_window": 64}, False),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 26}, False),
        ({"model_type": "llama4_text", "layer_types": ["full_attention"] * 48}, False),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 16}, False),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32}, True),
        ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 27}, False),
        ({"model_type": "zamba2", "layer_types": ["mamba", "hybrid"] * 27}, False),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME"}, False),
        ({"model_type": "nemotron_h", "layer_types": ["mamba", "mlp", "attention"]}, False),
        ({"model_type": "llama", "layer_types": ["something"] * 32}, True),
        ({"model_type": "llama", "layer_types": ["linear_attention"] * 32}, True),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4}, False),
        ({"model_type": "minimax", "layer_types": ["linear_attention"] * 32}, False),
        ({"model_type": "recurrent_gemma", "attention_window_size": 2048}, False),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, False),
        ({"model_type": "falcon", "alibi": True}, True),
        ({"model_type": "falcon", "alibi": False}, False),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, True),
        ({"model_type": "bert", "is_decoder": True}, False),
        ({"model_type": "bart"}, True),
    ],
)
def test_both_say_the_same_of_what_config_json_states(
    stated: dict[str, Any], *, is_refused: bool
) -> None:
    line = said_before(stated)
    assert bool(line) == is_refused
    fields = {field: value for field, value in stated.items() if field != "model_type"}
    try:
        config = CONFIG_MAPPING[stated["model_type"]](**fields)
    except Exception:  # noqa: BLE001 (transformers has its own line for it)
        assert is_refused
        return
    assert said_by_engine(config) == line


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        ({"model_type": "llava", "text_config": {"model_type": "rwkv"}}, "M: llava has recurrent"),
        ({"model_type": "llava", "text_config": {"model_type": "xlstm"}}, "M: llava has recurrent"),
        (
            {"model_type": "llava", "text_config": {"model_type": "bart"}},
            "M: it is an encoder-decoder model",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "clip_text_model"}},
            'config.json: its language model is of type "clip_text_model", which cannot write',
        ),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, ""),
        ({"model_type": "qwen2_vl"}, ""),
        ({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}}, ""),
    ],
)
def test_what_matters_of_a_wrapper_is_its_language_model(stated: dict[str, Any], line: str) -> None:
    said = said_before(stated)
    assert said.startswith(line)
    assert bool(said) == bool(line)
    assert "\n" not in said


def test_where_target_and_drafter_have_the_fault_the_line_names_the_target(tmp_path: Path) -> None:
    from coordinator.api.config import PairConfig

    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        stated = {**LLAMA, "num_hidden_layers": 2, "model_type": "rwkv"}
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
    config = PairConfig(target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
    with pytest.raises(SlipstreamError) as caught:
        Preflight(node_configs(config, endpoint="", outside="", secret="", drafts=True))
    assert str(caught.value).startswith(f"{tmp_path / 'target'}: rwkv has recurrent states")
