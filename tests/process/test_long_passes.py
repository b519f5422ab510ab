"""A target whose passes take long: a text is told once, and how far its prompt was read is shown.

The passes are those of a simulated device, so the host has nothing to do meanwhile.
"""

from collections.abc import Iterator

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request
from node.rows import PREFILL_CHUNK
from tests.process.served import Served, serving

pytestmark = pytest.mark.process

PASS_MS = 700.0
PROMPT = [5 + number % 200 for number in range(3 * PREFILL_CHUNK + 9)]
LONG_MS = 2600.0  # longer than a text is left without a sign of its target's work


def started(pass_ms: float) -> Pair:
    """A target alone whose every pass takes so long."""
    config = PairConfig(drafter="ngram", dtype="float32", simulate_target_ms=pass_ms)
    return Pair(config, with_drafter=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with such a target."""
    way = SpeculationConfig(policy="ar")
    with started(PASS_MS) as pair, serving(pair, speculation=way) as served:
        yield served


def test_a_stream_tells_how_far_its_prompt_was_read(server: Served) -> None:
    wanted = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "return_progress": True}
    chunks = server.events("/v1/completions", **wanted)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [one["processed"] for one in told] == [number * PREFILL_CHUNK for number in (1, 2, 3)]
    assert {one["total"] for one in told} == {len(PROMPT)}
    assert 0.5 * PASS_MS < told[0]["time_ms"] < told[2]["time_ms"]
    assert "choices" in chunks[-1], "then the text comes"
    assert all(not chunk["choices"] for chunk in chunks if "prompt_progress" in chunk)
    assert len([chunk for chunk in chunks if chunk["choices"]]) >= 2


def test_who_does_not_ask_is_not_told(server: Served) -> None:
    prompt = [*PROMPT[1:], 7]  # of which nothing is in the cache
    chunks = server.events("/v1/completions", prompt=prompt, max_tokens=1, temperature=0)
    assert not [chunk for chunk in chunks if "prompt_progress" in chunk]
    refused = server.post("/v1/completions", prompt=[7, 8], max_tokens=1, return_progress=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "return_progress goes with stream: true"


@pytest.mark.long
def test_a_prompt_whose_passes_take_longer_than_any_other_wait_is_told_once() -> None:
    with started(LONG_MS) as pair:
        way, params = SpeculationConfig(policy="ar"), SamplingParams(max_tokens=2)
        request = Request(pair, way, None, tuple(PROMPT), params)
        for _ in Batch(pair, [request]).steps():
            pass
    metrics = request.whole().outputs[0].metrics
    assert metrics is not None
    assert (metrics.num_tokens, metrics.num_reopened) == (2, 0)
