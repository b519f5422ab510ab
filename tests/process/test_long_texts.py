"""Texts beyond the original length of a longrope are read with its long factors from the start."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.long_models import MOST, ORIGINAL, make_long, plain, with_one_set
from tests.tiny_models import make_noised

PROMPT = [5, 9, 33, 71]
LONG_PROMPT = torch.randint(0, 180, (ORIGINAL + 9,), generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.process


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=length, do_sample=False)
    return [int(token) for token in text[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("phi3", {}, marks=pytest.mark.long),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("phi3", {"backend": "reference"}, marks=pytest.mark.slow),
    ],
)
def test_a_text_that_passes_the_original_length_is_that_of_the_long_factors(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    target = make_long(kind, tmp_path / "target")
    drafter = make_noised(target, tmp_path / "drafter", 0.005)
    length = 3 * ORIGINAL
    params = SamplingParams(temperature=0, max_tokens=length)
    sync = {"policy": "sync", "num_speculative_tokens": 2}
    with LLM(
        str(target),
        str(drafter),
        dtype="float32",
        max_model_len=MOST // 2,
        speculative_config=sync,
        **options,
    ) as llm:
        assert llm.pair.max_len == MOST // 2
        prompts = [{"prompt_token_ids": ids} for ids in (PROMPT, LONG_PROMPT.tolist())]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert outputs[0].token_ids == greedy(with_one_set(kind, target), PROMPT, length)
    # Of a prompt that is longer than that, transformers itself reads all with the long factors.
    long_one = outputs[1].token_ids
    assert long_one == greedy(plain(target), LONG_PROMPT.tolist(), len(long_one))
    for made in outputs:
        assert len(set(made.token_ids)) > 8, "a text that repeats itself shows little"
        assert made.metrics is not None
        assert made.metrics.acceptance_rate > 0.5


@pytest.mark.slow
def test_without_a_maximum_length_texts_end_at_the_original_one(tmp_path: Path) -> None:
    target = make_long("phi3", tmp_path / "target")
    drafter = make_noised(target, tmp_path / "drafter", 0.005)
    with LLM(str(target), str(drafter), dtype="float32") as llm:
        assert llm.pair.max_len == ORIGINAL
        notice, *_ = llm.pair.notices()  # the others are about sizes and the end of texts
        assert notice.startswith(f"texts have at most {ORIGINAL} tokens: their rope factors are")
        length = ORIGINAL - len(PROMPT)
        params = SamplingParams(temperature=0, max_tokens=length)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(plain(target), PROMPT, length)
