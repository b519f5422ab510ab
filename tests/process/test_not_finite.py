"""Real nodes, with models that overflow at one token: texts that need it end, and no others."""

from pathlib import Path

import pytest

from coordinator.api.llm import LLM
from coordinator.api.outputs import RequestOutput
from coordinator.api.params import SamplingParams
from tests.tiny_models import make_model, make_noised, make_overflowing

pytestmark = [pytest.mark.process, pytest.mark.long]

BAD = 127  # no token of the texts that are checked at load
PROMPTS = [[5, 6 + number, 7] for number in range(10)]
SPOILT = [5, *range(20, 60), BAD, 61]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in outputs]


def test_a_text_that_cannot_be_completed_ends_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("granite", tmp_path / "model")
    drafter = make_noised(model, tmp_path / "noised", 0.2)
    with LLM(
        str(make_overflowing(model, tmp_path / "target", BAD)),
        str(make_overflowing(drafter, tmp_path / "drafter", BAD)),
        speculative_config={"policy": "sync", "adaptive": False},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
    ) as llm:
        first = llm.generate(PROMPTS, PARAMS)
        want = [one for one in first if one.outputs[0].error is None][:5]
        good = [one.prompt_token_ids for one in want]
        assert len(good) == 5, "too many choose the token by themselves"
        caplog.clear()
        for _ in range(3):  # in other lanes each time
            *others, last = llm.generate([*good[:3], SPOILT, *good[3:], SPOILT], PARAMS)
            failed = others.pop(3)
            assert tokens(others) == tokens(want)
            for one in (failed, last):
                (made,) = one.outputs
                assert (made.finish_reason, made.token_ids, made.metrics) == ("error", [], None)
                assert "not finite at token position 41 (from 0, prompt included)" in (
                    made.error or ""
                )
            metrics = [one.outputs[0].metrics for one in others]
            assert sum(one.num_accepted_tokens for one in metrics if one is not None) > 0
        # Chosen by the target itself: the text up to it comes.
        chosen = PARAMS.model_copy(update={"logit_bias": {BAD: 100.0}})
        *parts, last_part = llm.stream(good[0], chosen)
        assert [token for part in parts for token in part.outputs[0].token_ids] == [BAD]
        assert "at token position 3 " in (last_part.outputs[0].error or "")
        assert tokens(llm.generate(good, PARAMS)) == tokens(want)
    told = [record for record in caplog.records if "could not be completed" in record.message]
    assert len(told) == 7
