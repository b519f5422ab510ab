"""Heads in the target's process that fail cost speed, and none of the texts that are open."""

import logging

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import launcher
from proto.installation import MODELS
from proto.messages import Role
from tests.process.patience import wait_for

pytestmark = [pytest.mark.process, pytest.mark.long]

PROMPTS = [f"def read_{word}(path, encoding='utf-8'):\n" for word in "abcdefgh"]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
AR = SpeculationConfig(policy="ar")
TREE = SpeculationConfig(policy="tree", adaptive=False)
NUM_ROUNDS = 10


def config_of(head: str) -> PairConfig:
    """The embedded target with this head beside it."""
    return PairConfig(
        drafter=str(MODELS / head),
        drafter_home="target",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=len(PROMPTS),
    )


def written(pair: Pair, speculation: SpeculationConfig) -> list[list[int]]:
    """All texts, open at once."""
    opened = [pair.generate(pair.encode(prompt), speculation, GREEDY)[0] for prompt in PROMPTS]
    return [[token for emit in stream for token in emit.tokens] for stream in opened]


@pytest.mark.parametrize(
    ("way", "head", "line"),
    [
        # They may draft again: memory that is missing now may be there later.
        ("memory", "eagle", "the target: memory was missing in the middle of a text (CUDA out of"),
        ("shapes", "medusa", "the target: its drafter has failed, and drafts no more: mat1 and"),
        ("shapes", "drafter", "the target: its drafter has failed, and drafts no more: mat1 and"),
        ("nan", "drafter", "the target: its model computes numbers that are not finite"),
        ("nan", "eagle3", "the target: its head"),
    ],
)
def test_heads_that_fail_are_said_once_and_the_texts_are_those_of_the_target_alone(
    way: str,
    head: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.failing_heads")
    monkeypatch.setenv("SLIPSTREAM_TEST_FAILURE", way)
    with Pair(config_of(head)) as pair:
        plain = written(pair, AR)
        assert not caplog.messages
        assert written(pair, TREE) == plain
        assert wait_for(lambda: bool(caplog.messages), 10.0)
        for _ in range(NUM_ROUNDS - 1):
            assert written(pair, TREE) == plain
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith(line)


@pytest.mark.slow
def test_heads_may_fail_at_any_step_of_eight_texts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.failing_heads")
    monkeypatch.setenv("SLIPSTREAM_TEST_FAILURE", "shapes")
    plain: list[list[int]] = []
    for failing_step in range(0, 2 * NUM_ROUNDS, 2):
        monkeypatch.setenv("SLIPSTREAM_TEST_FAILING_STEP", str(failing_step))
        caplog.clear()
        with Pair(config_of("eagle")) as pair:
            plain = plain or written(pair, AR)
            assert written(pair, TREE) == plain, failing_step
            assert wait_for(lambda: bool(caplog.messages), 10.0), failing_step
        (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert said.startswith("the target: its drafter has failed, and drafts no more: mat1 and")
