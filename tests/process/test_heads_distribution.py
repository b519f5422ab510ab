"""Texts that are sampled with the drafts of heads are distributed as the target says, exactly."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from rehearsal.lossless.chi_square import p_value
from tests.engine.heads.checkpoints import VOCAB, Checkpoint, checkpoint
from tests.process.four_tokens import LEVEL, PIPELINED, SYNC, Joint, joint_of, sample
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

NUM_TEXTS = 800
# So few that a head with random weights often says what the target says.
FEW = 8
PROMPT = (1, 5, 7, 3)
PLACES = [("eagle", "own"), ("eagle", "target"), ("medusa", "target")]


def of_few_words(head: Checkpoint) -> Checkpoint:
    """The same for a target of a small vocabulary."""
    files = {name: t[:FEW] if t.shape[0] == VOCAB else t for name, t in head.files.items()}
    config = {name: FEW if name == "vocab_size" else value for name, value in head.config.items()}
    return replace(head, config=config, files=files)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sure of little, so that the noise which both share makes a head agree with it."""
    return make_model("llama", tmp_path_factory.mktemp("target"), vocab=FEW, scale=0.4)


@pytest.fixture(scope="module")
def joint(target: Path) -> Joint:
    return joint_of(PairConfig(target=str(target)), PROMPT)


@pytest.fixture(scope="module", params=PLACES, ids=str)
def headed(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """The target with a head in one of its homes."""
    layout, home = request.param
    head = of_few_words(checkpoint(layout)).save(tmp_path_factory.mktemp("head"))
    config = PairConfig(
        target=str(target),
        drafter=str(head),
        drafter_home=home,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        simulate_target_ms=20.0 if home == "own" else 0.0,
    )
    with Pair(config) as pair:
        yield pair


@pytest.mark.parametrize("verify", ["coupled", "token", "block"])
def test_texts_are_distributed_as_the_targets(headed: Pair, joint: Joint, verify: str) -> None:
    policy = SYNC if headed.config.has_draft_process else PIPELINED
    speculation = SpeculationConfig(**policy, verify=verify)
    counts, rate, num_drafted = sample(headed, speculation, range(NUM_TEXTS), PROMPT)
    assert p_value(counts, joint) > LEVEL
    assert num_drafted > 0.1, "speculation is dead"
    assert 0.05 < rate < 0.95, "nothing is accepted, or there is nothing to verify"
