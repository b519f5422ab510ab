"""Real processes: a target's own layer for multi-token prediction drafts for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.llm import LLM
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.mtp import Plain
from tests.process.reference import assert_drafts_are_accepted

pytestmark = [pytest.mark.process, pytest.mark.long]
PROMPT, LEN = (5, 9, 33, 71), 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layer is always right about it."""
    return Plain("deepseek_v3", is_right=True).save(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module", params=["at home", "own"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    home = "own" if request.param == "own" else ""
    config = PairConfig(target=str(folder), drafter="mtp", drafter_home=home, max_model_len=256)
    with Pair(config) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_drafts_are_accepted_and_the_text_is_the_targets(
    pair: Pair, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True)
    # How far a drafter gets ahead is a matter of time, and by that `auto` decides whether drafts
    # pay at all, but it tries; under `sync` the target waits for the drafter.
    least = {"auto": 0, "pipelined": LEN / 6, "sync": LEN / 2, "tree": LEN / 6}
    assert_drafts_are_accepted(pair, PROMPT, params, least)


def test_vllms_name_of_it_works_too(folder: Path) -> None:
    speculation = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=LEN, ignore_eos=True)
    with LLM(str(folder), speculative_config=speculation, max_model_len=256) as llm:
        (output,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], params)
    completion = output.outputs[0]
    assert len(completion.token_ids) == LEN
    assert completion.metrics.num_accepted_tokens > LEN / 2
