"""Simulated devices and links change when a text is there, and not what it says."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from proto.installation import ROOT
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

PROMPT = tuple(range(3, 15))
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True, seed=5)
SAMPLED = GREEDY.model_copy(update={"temperature": 0.9})
AR = SpeculationConfig(policy="ar")
POLICIES = (SpeculationConfig(policy="sync", adaptive=False), SpeculationConfig(adaptive=False))
PASS_MS, STEP_MS, DELAY_MS = 20.0, 4.0, 6.0
LOSSY = {
    "simulate_target_ms": PASS_MS,
    "simulate_draft_ms": STEP_MS,
    "link": (f"drafter:delay={DELAY_MS:g}ms,jitter=2ms,loss=4%", "target:loss=1%"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A random model, and a drafter that agrees with it mostly."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model("llama", folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.1)
    return PairConfig(
        target=str(target), drafter=str(drafter), dtype="float32", max_model_len=256, max_num_seqs=1
    )


def written(
    pair: Pair, speculation: SpeculationConfig, request: SamplingParams
) -> tuple[tuple[int, ...], Metrics]:
    """A text and its figures."""
    before = pair.simulated()
    stream, _ = pair.generate(PROMPT, speculation, request)
    tokens = tuple(token for emit in stream for token in emit.tokens)
    assert stream.result is not None
    return tokens, pair.marked(stream.result.metrics, before)


@pytest.fixture(scope="module")
def plain(models: PairConfig) -> dict[float, tuple[int, ...]]:
    """What the target writes alone, on the machine that there is, by temperature."""
    with Pair(models, with_drafter=False) as pair:
        made = {request.temperature: written(pair, AR, request) for request in (GREEDY, SAMPLED)}
    assert all(metrics.simulated is None for _, metrics in made.values())
    return {temperature: tokens for temperature, (tokens, _) in made.items()}


@pytest.fixture(scope="module")
def rehearsed(models: PairConfig) -> Iterator[Pair]:
    """The same on other hardware."""
    with Pair(models.model_copy(update=LOSSY)) as pair:
        yield pair


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.policy)
def test_texts_are_the_same_over_links_that_lose_messages(
    rehearsed: Pair, plain: dict[float, tuple[int, ...]], policy: SpeculationConfig
) -> None:
    for request in (GREEDY, SAMPLED):
        tokens, metrics = written(rehearsed, policy, request)
        assert tokens == plain[request.temperature]
        assert metrics.num_accepted_tokens > 0
        # Neither a pass nor the way to the drafter and back is faster than it may be.
        assert metrics.elapsed_s * 1e3 >= metrics.num_target_passes * PASS_MS
        assert metrics.simulated is not None
        assert metrics.simulated.target_ms == PASS_MS
        assert metrics.simulated.links == LOSSY["link"]
        assert metrics.simulated.num_forwards > 0
    if policy.policy == "sync":
        assert metrics.wait_s * 1e3 >= 2 * DELAY_MS - 4


@pytest.mark.timed
@pytest.mark.long
def test_waits_adapt_to_the_way_to_the_drafter(models: PairConfig) -> None:
    far = {"simulate_target_ms": PASS_MS, "link": ("drafter:delay=40ms",)}
    with Pair(models.model_copy(update=far)) as pair:
        _, metrics = written(pair, POLICIES[0], GREEDY)
        _, metrics = written(pair, POLICIES[0], GREEDY)
    assert metrics.num_accepted_tokens > metrics.num_target_passes
    assert metrics.fallbacks.get("late", 0) <= 2
    assert metrics.wait_s / metrics.num_target_passes >= 0.05


def test_a_device_that_is_faster_than_this_one_is_told_of(models: PairConfig) -> None:
    with Pair(models.model_copy(update={"simulate_target_ms": 0.001}), with_drafter=False) as pair:
        # A text takes less time than from one heartbeat, which tells of it, to the next.
        for _ in range(100):
            _, metrics = written(pair, AR, GREEDY)
            if metrics.simulated is not None and metrics.simulated.num_overruns:
                break
    simulated = json.loads(json.dumps(dataclasses.asdict(metrics)))["simulated"]
    assert simulated["target_ms"] == 0.001
    assert simulated["num_overruns"] > 0
    assert metrics.simulated is not None
    assert metrics.simulated.is_void


def test_a_link_that_is_none_is_refused_before_anything_is_started() -> None:
    command = [sys.executable, "-m", "coordinator", "generate", "text", "--link"]
    done = subprocess.run(
        [*command, "drafter:delay=fast"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --link: a time is written as 300us, 5ms or 0.5s")
    assert len(done.stderr.splitlines()) == 1
