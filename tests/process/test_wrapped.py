"""Models of several modalities write the text of transformers, which has all their parts."""

from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.tiny_models import make_noised
from tests.wrapped_models import WRAPPERS, make_wrapped, whole

USUAL = {"qwen2_5_vl"}  # tested each time; the others take a minute
PROMPT, LENGTH = [5, 9, 33, 71], 96

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind in USUAL else pytest.mark.slow)
        for kind in WRAPPERS
    ],
)
def test_a_text_is_that_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    target = make_wrapped(kind, tmp_path / "target", tie_word_embeddings=False)
    drafter = make_noised(target, tmp_path / "drafter", 0.005, load=whole)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        text = whole(target).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
        )
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH)
    sync = {"policy": "sync", "num_speculative_tokens": 2}
    with LLM(str(target), str(drafter), dtype="float32", speculative_config=sync) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    made = output.outputs[0]
    assert made.token_ids == text[0, len(PROMPT) :].tolist()
    assert len(set(made.token_ids)) > 8, "a text that repeats itself shows little"
    assert made.metrics is not None
    assert made.metrics.num_accepted_tokens > LENGTH / 4
    assert made.metrics.acceptance_rate > 0.5
