"""A mistake of the target shows in what real processes sample: the tests of that have power."""

from collections import Counter

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.launching import launcher
from proto.messages import Role
from rehearsal.lossless.chi_square import p_value
from tests.process.biased_target import BIASES
from tests.process.four_tokens import LEVEL, SYNC, Joint, joint_of, make_pair, sample

pytestmark = pytest.mark.process

NUM_TEXTS = 500  # at a time, until the mistake is seen
MOST_TEXTS = 12_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    return make_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def joint(models: PairConfig) -> Joint:
    return joint_of(models)


@pytest.mark.long
@pytest.mark.parametrize(
    "bias",
    # One of them has the time of `make long`.
    [
        pytest.param(bias.__name__, marks=pytest.mark.slow if number else ())
        for number, bias in enumerate(BIASES)
    ],
)
def test_a_mistake_of_the_target_is_seen(
    models: PairConfig, joint: Joint, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.biased_target")
    monkeypatch.setenv("SLIPSTREAM_TEST_BIAS", bias)
    counts: Counter[tuple[int, ...]] = Counter()
    with Pair(models) as pair:
        for first in range(0, MOST_TEXTS, NUM_TEXTS):
            # A busy machine has drafts that come too late, which hide a mistake in judging them.
            seeds = range(first, first + NUM_TEXTS)
            counts += sample(pair, SpeculationConfig(**SYNC, verify="token"), seeds)[0]
            if p_value(counts, joint) < LEVEL:
                break
    assert p_value(counts, joint) < LEVEL
