"""Several targets in one coordinator: eight texts at once, while targets come, die and wake."""

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from coordinator.api.config import SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching.remote import RemoteNodes
from coordinator.text.metrics import Metrics
from coordinator.text.stream import TokenStream
from proto.installation import MODELS
from proto.messages import Role
from tests.process.behaviours import AR, CONFIG, PIPELINED
from tests.process.patience import wait_for
from tests.process.ray_nodes import free_port
from tests.process.test_joining import LIMIT_S, Node, joined

pytestmark = [pytest.mark.process, pytest.mark.long]

PROMPTS = [f"def read_{name}(path):" for name in ("lines", "words", "bytes", "file")]
SLOW = ("--simulate-ms", "20", "--max-model-len", "384")


def wanted(number: int) -> SamplingParams:
    """Four texts are greedy, and four are sampled."""
    temperature = 0.8 if number >= len(PROMPTS) else 0.0
    return SamplingParams(max_tokens=160, ignore_eos=True, temperature=temperature, seed=number)


@dataclass(slots=True)
class Eight:
    """Eight texts that are written at once."""

    pair: Pair
    streams: list[TokenStream]
    tokens: list[list[int]]

    @classmethod
    def begun(cls, pair: Pair, policy: SpeculationConfig = PIPELINED) -> "Eight":
        """All have their first tokens."""
        streams = []
        for number in range(2 * len(PROMPTS)):
            prompt = pair.encode(PROMPTS[number % len(PROMPTS)])
            streams.append(pair.generate(prompt, policy, wanted(number))[0])
        return cls(pair, streams, [list(next(iter(one)).tokens) for one in streams])

    def targets(self) -> list[str]:
        """The target of each text, in the order of the texts."""
        texts = sorted(self.pair.service.status()["texts"], key=lambda one: one["number"])
        return [one["target"] for one in texts]

    def whole(self) -> tuple[list[list[int]], list[Metrics]]:
        """Their tokens to the end, and what each has cost."""
        for tokens, stream in zip(self.tokens, self.streams, strict=True):
            for step in stream:
                tokens += step.tokens
        results = [stream.result for stream in self.streams]
        return self.tokens, [one.metrics for one in results if one is not None]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The texts as one target writes them by plain decoding."""
    with Pair(CONFIG, with_drafter=False) as pair:
        return Eight.begun(pair, AR).whole()[0]


@contextmanager
def by_hand(folder: Path) -> Iterator[tuple[Pair, str, Node]]:
    """A coordinator with one target and one drafter by hand, its endpoint, and the target."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    make = partial(RemoteNodes, endpoint, None, tuple(Role))
    with ExitStack() as stack:
        first = stack.enter_context(target(folder, endpoint, "target-1"))
        drafter = str(MODELS / "drafter")
        stack.enter_context(joined("drafter_node", folder / "drafter", endpoint, drafter))
        config = CONFIG.model_copy(update={"max_num_seqs": 8})
        pair = stack.enter_context(Pair(config, make_launcher=make, awaits_target=True))
        yield pair, endpoint, first


@contextmanager
def target(folder: Path, endpoint: str, name: str) -> Iterator[Node]:
    """A target that waits for the coordinator; stopped or not, it has ended afterwards."""
    model = str(MODELS / "target")
    with joined("target_node", folder / name, endpoint, model, "--name", name, *SLOW) as node:
        yield node


def has_both(pair: Pair) -> bool:
    return len(pair.service.registry.ready(Role.TARGET)) == 2


def test_texts_are_whole_and_the_same_while_targets_join_die_stop_and_wake(
    alone: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        by_hand(tmp_path) as (pair, endpoint, first),
        target(tmp_path, endpoint, "target-2") as second,
    ):
        assert wait_for(lambda: has_both(pair), LIMIT_S), "no second target"
        assert pair.num_seqs == 16

        eight = Eight.begun(pair)
        at = eight.targets()
        assert Counter(at) == {"target-1": 4, "target-2": 4}
        tokens, metrics = eight.whole()
        assert tokens == alone
        accepted = Counter[str]()
        for name, one in zip(at, metrics, strict=True):
            accepted[name] += one.num_accepted_tokens
        assert min(accepted.values()) > 60, "speculation is dead at a target"

        eight = Eight.begun(pair)
        first.process.kill()
        first.process.wait()
        tokens, _ = eight.whole()
        assert tokens == alone, "a target was killed"
        assert "target-2 goes on with 4 texts of target-1" in caplog.messages

        with target(tmp_path, endpoint, "target-1"):
            assert wait_for(lambda: has_both(pair), LIMIT_S), "the first is not there again"
            eight = Eight.begun(pair)
            os.kill(second.process.pid, signal.SIGSTOP)
            moved = wait_for(lambda: set(eight.targets()) == {"target-1"}, LIMIT_S)
            os.kill(second.process.pid, signal.SIGCONT)
            assert moved, "the texts of a stopped target stay with it"
            tokens, _ = eight.whole()
            assert tokens == alone, "a target was stopped, and woke"
            assert wait_for(lambda: has_both(pair), LIMIT_S), "it has not come back"
            eight = Eight.begun(pair)
            assert Counter(eight.targets()) == {"target-1": 4, "target-2": 4}
            tokens, _ = eight.whole()
            assert tokens == alone, "after all that"


def test_of_two_targets_that_were_started_here_one_is_killed_and_comes_back(
    alone: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    here = {"targets": 2, "drafters": 2, "max_num_seqs": 8, "simulate_target_ms": 20.0}
    with Pair(CONFIG.model_copy(update=here)) as pair:
        assert sorted(pair.pids()) == ["drafter-1", "drafter-2", "target-1", "target-2"]
        eight = Eight.begun(pair)
        assert Counter(eight.targets()) == {"target-1": 4, "target-2": 4}
        os.kill(pair.pids()["target-2"], signal.SIGKILL)
        tokens, metrics = eight.whole()
        assert tokens == alone
        assert sum(one.num_accepted_tokens for one in metrics) > 60, "speculation is dead"
        killed, moved, *_ = caplog.messages
        assert killed.startswith("the target-2 process was ended by signal 9")
        assert killed.endswith("going on without it")
        assert moved == "target-1 goes on with 4 texts of target-2"
        assert wait_for(lambda: has_both(pair), LIMIT_S), "it is not started again"
        eight = Eight.begun(pair)
        assert Counter(eight.targets()) == {"target-1": 4, "target-2.1": 4}
        assert eight.whole()[0] == alone
