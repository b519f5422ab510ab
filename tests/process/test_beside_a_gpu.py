"""Texts of nodes that go on while a (played) GPU computes are those of nodes that compute."""

from pathlib import Path

import pytest

from coordinator.api.config import SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.launching import launcher
from proto.messages import Role
from tests.process.test_texts_at_once import (
    GREEDY,
    POLICIES,
    SEEDED,
    SYNC,
    Texts,
    make_pair,
    together,
)

pytestmark = pytest.mark.process

PLAIN = SpeculationConfig(policy="ar")
TREE = SpeculationConfig(policy="tree")


def both_texts(pair: Pair, speculation: SpeculationConfig) -> tuple[list[Texts], int]:
    """Greedy and seeded ones, eight each, and how many drafts were accepted."""
    made = [together(pair, speculation, request) for request in (GREEDY, SEEDED)]
    return [texts for texts, _ in made], sum(count for _, count in made)


@pytest.mark.parametrize(
    "policies", [(SYNC, TREE), pytest.param(POLICIES, marks=pytest.mark.long)], ids=["two", "all"]
)
def test_texts_are_equal_and_drafts_are_accepted_whenever_the_gpu_ends(
    policies: tuple[SpeculationConfig, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_pair("llama", tmp_path).model_copy(
        update={"simulate_target_ms": 0.0, "max_num_seqs": 8}
    )
    with Pair(config) as pair:
        wanted, _ = both_texts(pair, PLAIN)
    for role in Role:
        monkeypatch.setitem(launcher.MODULES, role, "tests.process.played_gpu")
    with Pair(config) as pair:
        for speculation in policies:
            texts, num_accepted = both_texts(pair, speculation)
            assert texts == wanted, speculation
            assert num_accepted > 0 or speculation != SYNC, "speculation is dead"
        nodes = [pair.service.registry.of(role) for role in Role]
    assert all(node is not None and sum(node.beside_us) > 0 for node in nodes), "no host was free"


@pytest.mark.long
def test_a_result_that_is_read_too_early_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_pair("llama", tmp_path).model_copy(update={"simulate_target_ms": 0.0})
    with Pair(config) as pair:
        wanted, _ = together(pair, PLAIN, GREEDY)
    for role in Role:
        monkeypatch.setitem(launcher.MODULES, role, "tests.process.hasty_gpu")
    with Pair(config) as pair:
        texts, _ = together(pair, PLAIN, GREEDY)
    assert texts != wanted
