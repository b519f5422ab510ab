"""The peer that drafts and verifies in one loop: its texts are those of the target alone."""

from pathlib import Path

import pytest

from engine.choice.sampling import Sampling
from lab.experiments.description import experiment
from lab.experiments.engines import PeerEngine, Written, host_of, written_by_a_peer
from lab.experiments.peers.one_process import Model, OneProcess, answer, devices_of, loaded
from lab.synthetic import model
from lab.synthetic.executor import SyntheticExecutor
from proto.installation import MODELS

GREEDY, SAMPLED = Sampling(), Sampling(0.8)


def synthetic(*milliseconds: str) -> OneProcess:
    target, drafter = (
        Model(SyntheticExecutor(2048, 1, launch_s=0.0), device, num_ids=model.VOCAB_SIZE)
        for device in devices_of(milliseconds)
    )
    return OneProcess(
        target,
        drafter,
        num_valid=model.VOCAB_SIZE,
        choose=model.choose,
        rank=model.rank_scored,
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_prompt", [1, 17, 600])
def test_a_text_is_the_target_s_own_whatever_is_drafted(
    sampling: Sampling, num_prompt: int
) -> None:
    prompt, both = [1 + i % 7 for i in range(num_prompt)], synthetic()
    for k in (0, 1, 4, 16):
        made = both.write(prompt, 60, k=k, sampling=sampling, seed=9)
        assert tuple(made.tokens) == model.text_after(prompt, 60, sampling, 9)
        assert sum(made.counts) == 60
        assert len(made.counts) == len(made.times) == 1 + made.num_passes
        assert made.num_passes + made.num_accepted == 59
        assert (made.num_accepted > 0) == (k > 0)


def test_every_forward_has_the_time_of_its_simulated_device() -> None:
    made = synthetic("2", "0.5", "1", "0").write([1, 2], 6, k=2, sampling=GREEDY, seed=0)
    took_ms = [1e3 * (ends - launched) for _, launched, ends in made.launches]
    assert took_ms[0] >= 2.99  # the prompt's pass has two rows
    assert all(took >= 0.99 for took in took_ms)
    assert sum(took >= 3.49 for took in took_ms[1:]) >= 1  # two drafts are verified in three rows
    assert all(launched >= before for before, launched, _ in made.launches)


@pytest.fixture(scope="module")
def embedded() -> OneProcess:
    names = str(MODELS / "target"), str(MODELS / "drafter")
    return loaded(*names, "float32", "cpu", *devices_of(()))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_real_models_too(embedded: OneProcess, temperature: float) -> None:
    request = {"prompt": list(range(40, 60)), "max_tokens": 32, "seed": 5, "setting": 3}
    alone, drafted = (
        answer(embedded, {**request, "temperature": temperature, "mode": mode})
        for mode in ("plain", "assisted")
    )
    assert drafted["tokens"] == alone["tokens"]
    assert len(alone["tokens"]) == 32
    assert alone["num_accepted"] == 0 < drafted["num_accepted"]
    assert drafted["num_passes"] < alone["num_passes"]


@pytest.mark.process
def test_an_experiment_runs_it_as_a_peer_in_a_process_of_its_own() -> None:
    table = {"peer": "one_process", "mode": ["plain", "assisted"], "temperature": 0.8}
    devices = {"simulate_target_ms": 4, "simulate_draft_ms": 1, "dtype": "float32"}
    alone, drafted = experiment(
        {"title": "t", "arms": [table], "baseline": {}},
        Path(),
        {**devices, "max_tokens": 16},
    ).arms
    engine = PeerEngine(alone)
    try:
        (plain,) = engine.write(alone, [(40, 41, 42)], [7])
        (made,) = engine.write(drafted, [(40, 41, 42)], [7])
    finally:
        engine.close()
    assert host_of(alone) == host_of(drafted)
    assert len(plain.emitted) == 16 > len(made.emitted)
    assert made.tokens == plain.tokens
    assert plain.emitted[-1][0] >= 15 * 0.004


def test_a_text_whose_simulated_devices_were_much_too_late_is_void() -> None:
    def written(late_s: float) -> Written:
        return written_by_a_peer({"tokens": [1], "times": [1.0], "counts": [1], "late_s": late_s})

    assert written(0.04).void == ""
    assert written(0.07).void == "its forwards were late by 7% of the time"
