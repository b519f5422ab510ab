"""Real processes: a target's own layer for multi-token prediction drafts for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.llm import LLM
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.mtp import NUM_LAYERS, PLAINLY, Plain, wrap
from tests.packed_models import RECIPES, save_packed
from tests.process.reference import Reference, assert_drafts_are_accepted, generate

pytestmark = [pytest.mark.process, pytest.mark.long]
PROMPT, LEN = (5, 9, 33, 71), 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layer is always right about it."""
    return Plain("deepseek_v3", is_right=True).save(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with layers that keep a running state, in a model of several modalities."""
    plain = Plain("qwen3_5_moe_text", is_right=True)
    return wrap(plain.save(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def in_a_row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with three such layers in a row."""
    plain = Plain("deepseek_v3", 3, is_right=True)
    return plain.save(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module", params=["at home", "own", "three at home", "three own"])
def pair(request: pytest.FixtureRequest, folder: Path, in_a_row: Path) -> Iterator[Pair]:
    home = "own" if request.param.endswith("own") else ""
    target = str(in_a_row if request.param.startswith("three") else folder)
    config = PairConfig(target=target, drafter="mtp", drafter_home=home, max_model_len=256)
    with Pair(config) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_drafts_are_accepted_and_the_text_is_the_targets(
    pair: Pair, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True)
    least = {"auto": 0, "pipelined": LEN / 6, "sync": LEN / 2, "tree": LEN / 6}
    if pair.config.drafter_home == "own":
        # How far this drafter gets ahead is a matter of time: only `sync` and `tree` wait for it.
        any_number = -1
        least |= {"auto": any_number, "pipelined": any_number}
    assert_drafts_are_accepted(pair, PROMPT, params, least)


@pytest.mark.parametrize("home", ["", "own"])
def test_for_a_target_that_keeps_a_running_state_in_a_model_of_several_modalities(
    home: str, qwen: Path
) -> None:
    config = PairConfig(target=str(qwen), drafter="mtp", drafter_home=home, max_model_len=256)
    # In a process of its own the layer, a mixture of experts, is as slow as the whole small target.
    any_number = -1
    others = dict.fromkeys(("auto", "pipelined", "tree"), any_number)
    with Pair(config) as pair:
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True
            )
            assert_drafts_are_accepted(pair, PROMPT, params, {"sync": LEN / 3, **others})


def test_layers_of_which_the_files_alone_tell_the_number(tmp_path: Path) -> None:
    folder = Plain("mimo_v2_flash", 3, is_right=True).save(tmp_path)
    with Pair(PairConfig(target=str(folder), drafter="auto", max_model_len=256)) as pair:
        assert pair.config.drafter == "mtp"
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True
            )
            assert_drafts_are_accepted(pair, PROMPT, params, {"sync": LEN / 3, "tree": 0})


@pytest.mark.parametrize("recipe", ["fp8-block", "gptq"])
def test_the_layer_of_a_quantised_target_drafts_for_it(recipe: str, tmp_path: Path) -> None:
    source = Plain("deepseek_v3", 2, is_right=True).save(tmp_path / "source")
    of_layer = "eh_proj" if recipe == "fp8-block" else f"layers.{NUM_LAYERS}"
    plainly = *PLAINLY, of_layer, f"layers.{NUM_LAYERS + 1}.eh_proj"
    packed, _ = save_packed(source, tmp_path, RECIPES[recipe], plainly=plainly)
    config = PairConfig(target=str(packed), drafter="mtp", max_model_len=256)
    with Pair(config) as pair:
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True
            )
            assert_drafts_are_accepted(pair, PROMPT, params, {"sync": LEN / 3, "tree": 0})


def test_what_qwen3_next_brings_is_found_and_drafts(tmp_path: Path) -> None:
    folder = Plain("qwen3_next", is_right=True).save(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=LEN, ignore_eos=True)
    with Pair(PairConfig(target=str(folder), drafter="auto", max_model_len=256)) as pair:
        got = generate(pair, PROMPT, SpeculationConfig(policy="sync"), params)
    assert got.tokens == Reference(folder).greedy(PROMPT, LEN)
    assert got.metrics.num_accepted_tokens > LEN / 3


def test_vllms_name_of_it_works_too(folder: Path) -> None:
    speculation = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=LEN, ignore_eos=True)
    with LLM(str(folder), speculative_config=speculation, max_model_len=256) as llm:
        (output,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], params)
    completion = output.outputs[0]
    assert len(completion.token_ids) == LEN
    assert completion.metrics.num_accepted_tokens > LEN / 2
