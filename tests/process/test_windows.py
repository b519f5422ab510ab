"""Models with sliding windows write the text of transformers, up to the length of the window."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from slipstream import LLM, SamplingParams
from tests.tiny_models import make_noised, widened

WINDOW = 96
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": WINDOW,
}
WIDE = {"head_dim": 16}
FLAG = {"use_sliding_window": True}
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_local_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere2Config": {"logit_scale": 1.0},
    "Exaone4Config": {"sliding_window_pattern": 4},
    "Gemma2Config": {**WIDE, "tie_word_embeddings": False},
    "Gemma3TextConfig": {**WIDE, "tie_word_embeddings": False},
    "GptOssConfig": {**WIDE, **EXPERTS, "num_experts_per_tok": 2},
    "MinistralConfig": WIDE,
    "MistralConfig": {},
    "MixtralConfig": EXPERTS,
    "Olmo3Config": {},
    "Phi3Config": {},
    "Qwen2Config": {**FLAG, "max_window_layers": 1},
    "Qwen3Config": {**WIDE, **FLAG, "max_window_layers": 1},
    "Qwen3MoeConfig": {**WIDE, **FLAG, **FEW, "moe_intermediate_size": 64},
    "SmolLM3Config": FLAG,
    "Starcoder2Config": {},
    "VaultGemmaConfig": WIDE,
}
USUAL = {"Gemma3TextConfig"}  # tested each time; the others take a minute
PROMPT = [5, 9, 33, 71]

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in USUAL else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_text_as_long_as_the_window_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = getattr(hf, name)(**SIZES, **FAMILIES[name])
    kind: Any = hf.AutoModelForCausalLM
    model = widened(kind.from_config(config).float().eval(), 3.0, 5)
    model.save_pretrained(tmp_path / "target")
    drafter = make_noised(tmp_path / "target", tmp_path / "drafter", 0.02)
    length = WINDOW - len(PROMPT)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        whole = model.generate(ids, max_new_tokens=length, do_sample=False)[0].tolist()
    expected = whole[len(PROMPT) :]
    greedy = SamplingParams(temperature=0, max_tokens=length)
    tree = {"policy": "tree"}
    with LLM(
        str(tmp_path / "target"), str(drafter), dtype="float32", speculative_config=tree
    ) as llm:
        assert llm.pair.max_len == WINDOW
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    made = output.outputs[0]
    assert made.token_ids == expected
    assert len(set(expected)) > 8, "a text that repeats itself shows little"
    assert made.metrics is not None
    assert made.metrics.num_accepted_tokens > length / 10
