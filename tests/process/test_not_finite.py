"""Real nodes, with models that overflow at one token: texts that need it end, and no others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.api.llm import LLM
from coordinator.api.outputs import RequestOutput
from coordinator.api.params import SamplingParams
from tests.tiny_models import (
    make_model,
    make_noised,
    make_overflowing,
    make_overflowing_llama,
)

pytestmark = pytest.mark.process

BAD = 127  # no token of the texts that are checked at load
PROMPTS = [[5, 6 + number, 7] for number in range(16)]
SPOILT = [5, *range(20, 60), BAD, 61]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
NUM_TEXTS = 8  # at once


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in outputs]


def granite(tmp_path: Path) -> tuple[Path, Path]:
    """A target that runs on `reference`, and its drafter. They overflow."""
    model = make_model("granite", tmp_path / "model")
    drafter = make_noised(model, tmp_path / "noised", 0.2)
    target = make_overflowing(model, tmp_path / "target", BAD)
    return target, make_overflowing(drafter, tmp_path / "drafter", BAD)


def llama(tmp_path: Path) -> tuple[Path, Path]:
    """A target that runs on `fused`, and its drafter. They overflow."""
    model = make_model("llama", tmp_path / "model")
    drafter = make_noised(model, tmp_path / "noised", 0.2)
    target = make_overflowing_llama(model, tmp_path / "target", BAD)
    return target, make_overflowing_llama(drafter, tmp_path / "drafter", BAD)


@pytest.mark.parametrize(
    ("make", "backend", "num_rounds"),
    [
        pytest.param(llama, "fused", 2),
        pytest.param(llama, "fused", 10, marks=pytest.mark.long),
        pytest.param(granite, "reference", 10, marks=pytest.mark.long),
    ],
)
def test_a_text_that_cannot_be_completed_ends_alone(
    make: Callable[[Path], tuple[Path, Path]],
    backend: str,
    num_rounds: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, drafter = make(tmp_path)
    with LLM(
        str(target),
        str(drafter),
        speculative_config={"policy": "sync", "adaptive": False},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=NUM_TEXTS,
        backend=backend,
    ) as llm:
        first = llm.generate(PROMPTS, PARAMS)
        want = [one for one in first if one.outputs[0].error is None][: NUM_TEXTS - 1]
        good = [one.prompt_token_ids for one in want]
        assert len(good) == NUM_TEXTS - 1, "too many choose the token by themselves"
        caplog.clear()
        for number in range(num_rounds):  # in other lanes each time
            where = number % NUM_TEXTS
            others = llm.generate([*good[:where], SPOILT, *good[where:]], PARAMS)
            (made,) = others.pop(where).outputs
            assert tokens(others) == tokens(want)
            assert (made.finish_reason, made.token_ids, made.metrics) == ("error", [], None)
            assert "not finite at token position 41 (from 0, prompt included)" in (made.error or "")
            metrics = [one.outputs[0].metrics for one in others]
            assert sum(one.num_accepted_tokens for one in metrics if one is not None) > 0
        # Chosen by the target itself: the text up to it comes.
        chosen = PARAMS.model_copy(update={"logit_bias": {BAD: 100.0}})
        *parts, last_part = llm.stream(good[0], chosen)
        assert [token for part in parts for token in part.outputs[0].token_ids] == [BAD]
        assert "at token position 3 " in (last_part.outputs[0].error or "")
        assert tokens(llm.generate(good, PARAMS)) == tokens(want)
    told = [record for record in caplog.records if "could not be completed" in record.message]
    assert len(told) == num_rounds + 1
