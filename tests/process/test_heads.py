"""Heads of the embedded target as draft sources: fewer passes, the same text, wherever they run.

So for a draft model in the target's process.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import EARLIER, HEADS, MODEL, origins
from coordinator.text.metrics import NGRAM as COPIED
from proto.installation import MODELS
from proto.messages import Role
from tests.process.reference import EVERY_POLICY, generate

pytestmark = [pytest.mark.process, pytest.mark.long]

MEDUSA, EAGLE, EAGLE3 = (str(MODELS / name) for name in ("medusa", "eagle", "eagle3"))
FLOAT32 = PairConfig(dtype="float32", drafter_dtype="float32", max_model_len=512)
PROMPT = "def read_lines(path, encoding='utf-8'):\n"
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=64, ignore_eos=True)
AR = SpeculationConfig(policy="ar")
TREE = SpeculationConfig(policy="tree", adaptive=False)
PLACES = [
    (FLOAT32.drafter, "target"),
    (MEDUSA, "target"),
    (EAGLE, "own"),
    (EAGLE3, "target"),
]
OTHER_PLACES = [(EAGLE, "target"), (EAGLE3, "own")]  # take as long again
NUM_KILLS = 10


@pytest.fixture(
    scope="module",
    params=[*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in OTHER_PLACES)],
    ids=lambda place: f"{Path(place[0]).name} {place[1]}",
)
def headed(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair whose drafter is a head, in one of its homes."""
    drafter, home = request.param
    config = FLOAT32.model_copy(update={"drafter": drafter, "drafter_home": home})
    with Pair(config) as pair:
        yield pair


def sources(pair: Pair, prompt: tuple[int, ...], speculation: SpeculationConfig) -> set[str]:
    """Who drafted what was accepted of a greedy text."""
    stream, _ = pair.generate(prompt, speculation, GREEDY)
    found = {origin for emit in stream for origin in origins(emit)}
    return {origin.removeprefix("draft:") for origin in found if origin.startswith("draft:")}


def test_under_every_policy_the_text_is_that_of_the_target_alone(headed: Pair) -> None:
    prompt = headed.encode(PROMPT)
    for params in (GREEDY, SAMPLED):
        plain = generate(headed, prompt, AR, params)
        num_accepted = 0
        for speculation in EVERY_POLICY:
            got = generate(headed, prompt, speculation, params)
            assert got.tokens == plain.tokens, speculation
            num_accepted += got.metrics.num_accepted_tokens
        assert num_accepted > 0, "speculation is dead"


def test_a_head_saves_passes_and_its_home_says_whose_its_drafts_are(headed: Pair) -> None:
    prompt = headed.encode(PROMPT)
    plain = generate(headed, prompt, AR, GREEDY)
    drafted = generate(headed, prompt, TREE, GREEDY)
    assert plain.metrics.num_target_passes >= 1.5 * drafted.metrics.num_target_passes
    is_at_home = not headed.service.registry.of_role(Role.DRAFTER)
    expected = HEADS if is_at_home else MODEL
    assert sources(headed, prompt, TREE) == {expected}
    assert drafted.metrics.accepted_by_source.keys() == {expected}
    assert bool(headed.hello(Role.TARGET).home_drafter) == is_at_home


@pytest.mark.parametrize(
    ("drafter", "changes", "others"),
    [
        (FLOAT32.drafter, {}, {MODEL}),
        (NGRAM, {}, {COPIED}),
        (FLOAT32.drafter, {"also_ngram": True, "remember": True}, {MODEL, COPIED, EARLIER}),
    ],
    ids=["model", "ngram", "model, ngram and earlier texts"],
)
def test_heads_join_the_drafts_of_others(
    drafter: str, changes: dict[str, bool], others: set[str]
) -> None:
    speculation = TREE.model_copy(update=changes)
    with Pair(FLOAT32.model_copy(update={"heads": MEDUSA, "drafter": drafter})) as pair:
        prompt = pair.encode(PROMPT * 2)
        for params in (GREEDY, SAMPLED):
            plain = generate(pair, prompt, AR, params)
            assert generate(pair, prompt, speculation, params).tokens == plain.tokens
        # A token that several have drafted is whose that came first.
        found = sources(pair, prompt, speculation)
        assert HEADS in found
        assert len(found) > 1
        assert found <= {HEADS, *others}


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_classical_rules_judge_the_drafts_of_a_head(headed: Pair, verify: str) -> None:
    speculation = TREE.model_copy(update={"verify": verify, "policy": "pipelined"})
    got = generate(headed, headed.encode(PROMPT), speculation, SAMPLED)
    assert len(got.tokens) == 64
    assert got.metrics.num_accepted_tokens > 0


def check_a_kill(seed: int) -> None:
    """A text whose head is killed while its drafts are accepted is complete, and no other than it
    would be."""
    update = {"drafter": EAGLE, "drafter_restarts": 0, "simulate_target_ms": 30.0}
    params = SAMPLED.model_copy(update={"seed": seed})
    with Pair(FLOAT32.model_copy(update=update)) as pair:
        prompt = pair.encode(PROMPT)
        plain = generate(pair, prompt, AR, params).tokens
        stream, _ = pair.generate(prompt, TREE, params)
        emits = iter(stream)
        tokens: list[int] = []
        num_drafted = 0
        while num_drafted <= seed % 4:
            emit = next(emits)
            tokens += emit.tokens
            num_drafted += any(origin.startswith("draft:") for origin in origins(emit))
        os.kill(pair.pids()["drafter"], signal.SIGKILL)
        tokens += [token for emit in emits for token in emit.tokens]
        assert tokens == plain
        assert stream.result is not None
        metrics = stream.result.metrics
        assert 0 < (metrics.drafter_lost_at or 0) < len(plain)
        assert generate(pair, prompt, TREE, params).tokens == plain


def test_a_head_that_is_killed_costs_speed_and_no_text() -> None:
    check_a_kill(1)


@pytest.mark.slow
def test_a_head_may_be_killed_ten_times_of_ten() -> None:
    for seed in range(NUM_KILLS):
        check_a_kill(seed)
