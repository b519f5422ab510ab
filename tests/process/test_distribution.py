"""Texts that real processes sample are distributed as the target says, exactly."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import product

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from rehearsal.lossless.chi_square import p_value
from tests.process.four_tokens import LEVEL, PIPELINED, SYNC, Joint, joint_of, make_pair, sample

pytestmark = pytest.mark.process

NUM_TEXTS, NUM_TEXTS_SLOW = 1_500, 3_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    return make_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def joint(models: PairConfig) -> Joint:
    return joint_of(models)


CASES = [
    (verify, policy, candidates)
    for (verify, candidates), policy in product(
        (("coupled", 64), ("token", 64), ("block", 64), ("token", 2), ("block", 2)),
        (SYNC, PIPELINED),
    )
]


@pytest.fixture(scope="module")
def pair_of(models: PairConfig) -> Iterator[Callable[[int], Pair]]:
    """The pair whose drafts are sampled from so many candidates, started when it is asked for."""
    with ExitStack() as stack:

        @cache
        def started(candidates: int) -> Pair:
            config = models.model_copy(update={"max_draft_candidates": candidates})
            return stack.enter_context(Pair(config))

        yield started


def assert_exact(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
    num_texts: int,
) -> None:
    verify, policy, candidates = case
    speculation = SpeculationConfig(**policy, verify=verify)
    counts, rate, num_drafted = sample(pair_of(candidates), speculation, range(num_texts))
    assert p_value(counts, joint) > LEVEL
    assert num_drafted > 0.1, "speculation is dead"
    assert 0.1 < rate < 0.95, "nothing is accepted, or there is nothing to verify"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES[:6:2], ids=str)
def test_texts_are_distributed_as_the_targets(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
) -> None:
    assert_exact(pair_of, joint, case, NUM_TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_texts_are_distributed_as_the_targets(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
) -> None:
    assert_exact(pair_of, joint, case, NUM_TEXTS_SLOW)
