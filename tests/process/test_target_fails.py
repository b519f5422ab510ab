"""A target that ends or is stopped: another one takes its place, and texts go on as they were."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import restarts
from proto.errors import NodeError
from proto.messages import Role
from tests.process.patience import wait_for
from tests.process.reference import generate
from tests.process.served import LIMIT_S, serving
from tests.process.test_texts_at_once import make_pair

pytestmark = pytest.mark.process

SYNC = SpeculationConfig(policy="sync", adaptive=False)
PROMPTS = tuple((5, 6 + number, 7) for number in range(4))
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """A random model, and a drafter that agrees with it at times; restarts without a pause."""
    monkeypatch.setattr(restarts, "BACK_OFF_S", 0.05)
    return make_pair("llama", tmp_path).model_copy(update={"max_num_seqs": 4})


def write(pair: Pair, kills: int = 0) -> tuple[list[list[int]], int]:
    """All texts at once, and how many drafts were accepted; the target is killed so often."""
    streams = [pair.generate(prompt, SYNC, SEEDED)[0] for prompt in PROMPTS]
    texts: list[list[int]] = [[] for _ in streams]
    ends_at = 20
    for text, stream in zip(texts, streams, strict=True):
        for chunk in stream:
            text += chunk.tokens
            if kills and len(text) >= ends_at:
                os.kill(pair.pids()["target"], signal.SIGKILL)
                kills, ends_at = kills - 1, ends_at + 20
    results = [stream.result for stream in streams]
    return texts, sum(one.metrics.num_accepted_tokens for one in results if one is not None)


def test_texts_go_on_with_the_same_tokens_when_the_target_is_killed(
    config: PairConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair(config) as pair:
        wanted, _ = write(pair)
        made, num_accepted = write(pair, kills=1)
        assert made == wanted
        assert num_accepted > 0, "speculation is dead"
        assert pair.service.restarts[Role.TARGET] == 1
        again, num_accepted = write(pair)
        assert again == wanted
        assert num_accepted > 0, "speculation is dead"
    (death,) = [line for line in caplog.messages if "SIGKILL" in line]
    assert death.endswith("; waiting for another")
    assert "the target is started again" in caplog.messages
    assert "the target is there again" in caplog.messages


def test_a_new_text_may_be_asked_for_while_there_is_no_target(config: PairConfig) -> None:
    with Pair(config) as pair:
        wanted = generate(pair, PROMPTS[0], SYNC, SEEDED).tokens
        os.kill(pair.pids()["target"], signal.SIGKILL)
        assert wait_for(lambda: not pair.is_ready, 5.0)
        assert generate(pair, PROMPTS[0], SYNC, SEEDED).tokens == wanted


@pytest.mark.long
def test_a_target_that_is_stopped_is_replaced_and_harmless(
    config: PairConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair(config) as pair:
        wanted, _ = write(pair)
        stopped = pair.pids()["target"]
        streams = [pair.generate(prompt, SYNC, SEEDED)[0] for prompt in PROMPTS]
        first = next(iter(streams[0]))
        os.kill(stopped, signal.SIGSTOP)
        rest = [token for chunk in streams[0] for token in chunk.tokens]
        others = [[token for chunk in one for token in chunk.tokens] for one in streams[1:]]
        assert [[*first.tokens, *rest], *others] == wanted
        assert pair.pids()["target"] != stopped
        assert not Path(f"/proc/{stopped}").exists()
    (silence,) = [line for line in caplog.messages if "has been silent for" in line]
    assert silence.endswith("; it is replaced")


@pytest.mark.long
def test_after_its_restarts_in_a_row_everything_ends_with_one_line(config: PairConfig) -> None:
    with Pair(config.model_copy(update={"target_restarts": 1})) as pair:
        with pytest.raises(NodeError) as caught:
            write(pair, kills=2)
        assert "SIGKILL" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert wait_for(lambda: not pair.is_ready, 5.0)


def test_without_restarts_everything_ends_at_once(config: PairConfig) -> None:
    with Pair(config.model_copy(update={"target_restarts": 0})) as pair:
        with pytest.raises(NodeError, match="SIGKILL"):
            write(pair, kills=1)
        assert pair.service.restarts[Role.TARGET] == 0


@pytest.mark.long
def test_clients_of_the_server_get_the_text_of_an_undisturbed_run(config: PairConfig) -> None:
    body = {"max_tokens": 100, "temperature": 0.8, "ignore_eos": True, "stream": False}

    def ask(url: str, seed: int) -> str:
        asked = {**body, "prompt": [5, 6, seed], "seed": seed}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with Pair(config) as pair, serving(pair) as served, ThreadPoolExecutor(6) as clients:
        wanted = list(clients.map(lambda seed: ask(served.url, seed), range(6)))
        asked = [clients.submit(ask, served.url, seed) for seed in range(6)]
        assert wait_for(lambda: served.llm.kv_cache_usage > 0, LIMIT_S)
        os.kill(pair.pids()["target"], signal.SIGKILL)
        assert wait_for(lambda: not pair.is_ready, LIMIT_S)
        assert httpx.get(f"{served.url}/health", timeout=5).status_code == 503
        assert ask(served.url, 3) == wanted[3], "a new request waits for the target"
        assert [one.result(LIMIT_S) for one in asked] == wanted
        assert wait_for(
            lambda: httpx.get(f"{served.url}/health", timeout=5).status_code == 200, LIMIT_S
        )
