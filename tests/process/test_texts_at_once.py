"""Eight texts in one pass are what they are one by one, whatever drafts them and whatever happens.

One by one means: by a pair that has room for one text. Whether drafts are accepted at all is asked
under `sync`: where the machine is busy, drafts that are not waited for may all be late.
"""

import os
import signal
from itertools import cycle
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.process.patience import wait_for
from tests.process.reference import EVERY_POLICY, generate
from tests.process.test_exactness import ARCHITECTURES
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

PROMPTS = tuple((5, 6 + number, 7) for number in range(8))
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
SYNC = SpeculationConfig(policy="sync", adaptive=False)
PIPELINED = SpeculationConfig(policy="pipelined", adaptive=False)
POLICIES = (*EVERY_POLICY[:-1], PIPELINED)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SOON_S = 3.0
Texts = list[list[int]]


def make_pair(architecture: str, folder: Path) -> PairConfig:
    """A random model, and a drafter that agrees with it at times."""
    target = make_model(architecture, folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.2)
    # A drafter as large as its target is only worth waiting for if the target is slower.
    return PairConfig(
        target=str(target),
        drafter=str(drafter),
        dtype="float32",
        max_model_len=512,
        simulate_target_ms=8.0,
    )


def together(
    pair: Pair,
    speculation: SpeculationConfig,
    request: SamplingParams,
    kill_after: int | None = None,
) -> tuple[Texts, int]:
    """All texts at once, and how many drafts were accepted.

    kill_after  tokens of the first text, after which the drafter is killed
    """
    streams = [pair.generate(prompt, speculation, request)[0] for prompt in PROMPTS]
    texts: Texts = [[] for _ in streams]
    for text, stream in zip(texts, streams, strict=True):
        for chunk in stream:
            text += chunk.tokens
            if kill_after is not None and len(text) >= kill_after:
                os.kill(pair.pids()["drafter"], signal.SIGKILL)
                kill_after = None
    results = [stream.result for stream in streams]
    return texts, sum(one.metrics.num_accepted_tokens for one in results if one is not None)


def check_every_policy(config: PairConfig, max_num_differences: int) -> None:
    """Greedy and seeded, eight at once and one by one."""
    num_differences = 0
    with (
        Pair(config.model_copy(update={"max_num_seqs": 1})) as one,
        Pair(config.model_copy(update={"max_num_seqs": 8})) as many,
    ):
        assert many.num_seqs == 8
        for request in (GREEDY, SEEDED):
            plain = [generate(one, prompt, POLICIES[0], request).tokens for prompt in PROMPTS]
            assert len({tuple(text) for text in plain}) == len(PROMPTS)
            for speculation in POLICIES:
                texts, num_accepted = together(many, speculation, request)
                num_differences += sum(a != b for a, b in zip(texts, plain, strict=True))
                assert num_accepted > 0 or speculation.policy != "sync", "speculation is dead"
    assert num_differences <= max_num_differences


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.slow if index else pytest.mark.long)
        for index, name in enumerate(ARCHITECTURES)
    ],
)
def test_eight_texts_at_once_are_the_same_under_every_policy(
    architecture: str, tmp_path: Path
) -> None:
    config = make_pair(architecture, tmp_path)
    check_every_policy(config, max_num_differences=1)  # of 80: a near tie of float32
    assert Path(config.target).is_dir()


@pytest.mark.slow
def test_so_they_are_in_reproducible_bfloat16(tmp_path: Path) -> None:
    config = make_pair("llama", tmp_path).model_copy(
        update={"dtype": "bfloat16", "reproducible": True}
    )
    with Pair(config.model_copy(update={"max_num_seqs": 8})) as pair:
        for request in (GREEDY, SEEDED):
            plain = [generate(pair, prompt, POLICIES[0], request).tokens for prompt in PROMPTS]
            for speculation in POLICIES:
                texts, num_accepted = together(pair, speculation, request)
                assert texts == plain
                assert num_accepted > 0 or speculation.policy != "sync", "speculation is dead"


def check_killed(folder: Path, counts: list[int]) -> None:
    """Kill the drafter after so many tokens of the first of eight texts.

    The target alone writes the same again.
    """
    target = str(make_model("llama", folder / "target"))
    config = PairConfig(
        target=target,
        drafter=target,
        dtype="float32",
        simulate_target_ms=5.0,
        drafter_restarts=0,
    )
    for count, speculation in zip(counts, cycle((SYNC, PIPELINED)), strict=False):
        with Pair(config) as pair:
            texts, num_accepted = together(pair, speculation, LONG, kill_after=count)
            assert wait_for(lambda: pair.pids().keys() == {"target"}, SOON_S)
            is_waited_for = speculation is SYNC and count >= 20
            assert num_accepted > 0 or not is_waited_for, "speculation is dead"
            whole, num_accepted = together(pair, speculation, LONG)
        assert num_accepted == 0
        assert texts == whole, f"killed at {count}"


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([60, 120], marks=pytest.mark.slow),
        pytest.param(list(range(1, 200, 20)), marks=pytest.mark.slow),
    ],
    ids=["twice", "ten times"],
)
def test_eight_texts_are_complete_when_the_drafter_is_killed(
    tmp_path: Path, counts: list[int]
) -> None:
    check_killed(tmp_path, counts)
    assert LONG.max_tokens == 200
