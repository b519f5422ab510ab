"""Drafters that are started by hand: late, other ones, killed; the texts do not notice."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request
from coordinator.cli.wrapping import WIDTH, continued
from coordinator.launching.remote import RemoteNodes
from proto.errors import SlipstreamError
from proto.messages import Role
from tests.process.ray_nodes import free_port, wait_for
from tests.process.reference import generate
from tests.process.test_joining import LIMIT_S, ROOT, Node, joined
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

PIPELINED = SpeculationConfig(policy="pipelined", adaptive=False)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPTS = [(5, 6, 7 + number) for number in range(8)]
OLDER = (
    "import sys; from node import loading; from drafter_node.__main__ import load_serve, start;"
    "loading.PROTOCOL_VERSION -= 1; sys.exit(start('drafter', load_serve))"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model, drafted by itself."""
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that has another vocabulary."""
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "other", vocab=150))


@pytest.fixture(scope="module")
def whole(model: str) -> list[list[int]]:
    """The texts as the target alone writes them."""
    config = PairConfig(target=model, dtype="float32")
    with Pair(config, with_drafter=False) as pair:
        alone = SpeculationConfig(policy="ar")
        return [generate(pair, prompt, alone, GREEDY).tokens for prompt in PROMPTS]


@dataclass(slots=True)
class ByHand:
    """A coordinator in this process, and where nodes join it. Its texts go on all the time."""

    pair: Pair
    endpoint: str
    folder: Path
    made: list[list[list[int]]] = field(default_factory=list)  # eight texts each
    failures: list[SlipstreamError] = field(default_factory=list)
    num_accepted: int = 0
    is_over: bool = False

    def write(self) -> None:
        """Eight texts at once, again and again."""
        try:
            while not self.is_over:
                requests = [
                    Request(self.pair, PIPELINED, None, prompt, GREEDY) for prompt in PROMPTS
                ]
                for _ in Batch(self.pair, requests).steps():
                    pass
                made = [request.whole().outputs[0] for request in requests]
                self.made.append([one.token_ids for one in made])
                self.num_accepted += sum(
                    one.metrics.num_accepted_tokens for one in made if one.metrics is not None
                )
        except SlipstreamError as error:
            self.failures.append(error)

    def drafter(self, name: str, model: str) -> "Node":
        """Start one. It says that it waits when it has loaded."""
        place = ("--join", self.endpoint, "--model", model, "--dtype", "float32")
        return Node("drafter_node", self.folder / name, *place)

    def older(self, model: str) -> tuple[int, str]:
        """One of an older release: how it ends."""
        place = ("--join", self.endpoint, "--model", model, "--dtype", "float32")
        done = subprocess.run(
            [sys.executable, "-c", OLDER, *place],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stderr


@contextmanager
def by_hand(model: str, folder: Path) -> Iterator[ByHand]:
    """A target by hand that is somewhat slow, and eight texts on it."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = PairConfig(target=model, drafter=model, max_num_seqs=8)
    make = partial(RemoteNodes, endpoint, None, tuple(Role))
    with ExitStack() as stack:
        stack.enter_context(
            joined("target_node", folder / "target", endpoint, model, "--simulate-ms", "20")
        )
        pair = stack.enter_context(Pair(config, make_launcher=make))
        hand = ByHand(pair, endpoint, folder)
        writing = threading.Thread(target=hand.write)
        writing.start()
        try:
            yield hand
        finally:
            hand.is_over = True
            writing.join(LIMIT_S)
        pair.service.check_alive()
    assert not writing.is_alive()
    assert not hand.failures


def ended(node: Node) -> str:
    """What a node says that ends by itself, with status 2."""
    assert node.process.wait(LIMIT_S) == 2, node.log.read_text()
    assert "Traceback" not in node.log.read_text()
    return node.log.read_text().splitlines()[-1]


def killed(node: Node) -> None:
    node.process.kill()
    node.process.wait()


def test_drafters_come_late_do_not_fit_are_lost_and_come_back(
    model: str,
    other: str,
    whole: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_said(line: str) -> bool:
        return wait_for(lambda: any(line in one for one in caplog.messages), LIMIT_S)

    caplog.set_level(logging.WARNING)
    with by_hand(model, tmp_path) as hand:
        assert wait_for(lambda: bool(hand.made), LIMIT_S), "no text without a drafter"
        assert hand.num_accepted == 0
        wrong = hand.drafter("wrong", other)
        assert "error: refused by the coordinator: the drafter's vocabulary has" in ended(wrong)
        status, last = hand.older(model)
        assert (status, "run the same release on every host" in last) == (2, True), last
        first = hand.drafter("first", model)
        assert is_said("the drafter has joined on ")
        assert wait_for(lambda: hand.num_accepted > 20, LIMIT_S), "speculation is dead"
        killed(first)
        assert is_said("the drafter has been silent for 5 s; going on without drafts")
        second = hand.drafter("second", model)
        assert is_said("the drafter is there again")
        before = hand.num_accepted
        assert wait_for(lambda: hand.num_accepted > before + 20, LIMIT_S), "speculation is dead"
        killed(second)
    assert len(hand.made) > 2
    assert all(texts == whole for texts in hand.made)
    said = [line for line in caplog.messages if not line.startswith("a message to")]
    assert said[0].startswith("no drafter has joined yet: texts begin with the target alone")
    assert [line.split(":")[0].split(" on ")[0] for line in said[1:3]] == [
        "refused the drafter"
    ] * 2
    # A drafter whose greeting is late greets again, and may be announced again.
    assert len(dict.fromkeys(said)) == 6, said


@pytest.mark.slow
def test_eight_texts_are_whole_whatever_becomes_of_ten_drafters_in_a_row(
    model: str, other: str, whole: list[list[int]], tmp_path: Path
) -> None:
    accepted = []
    with by_hand(model, tmp_path) as hand:
        for number in range(10):
            drafter = hand.drafter(f"good-{number}", model)
            before = hand.num_accepted
            assert wait_for(lambda before=before: hand.num_accepted > before, LIMIT_S)
            accepted.append(hand.num_accepted - before)
            killed(drafter)
            wrong = hand.drafter(f"wrong-{number}", other)
            assert "refused by the coordinator" in ended(wrong)
    assert len(accepted) == 10
    assert len(hand.made) > 10
    assert all(texts == whole for texts in hand.made)


def test_a_coordinator_that_waits_says_what_to_type_and_says_it_again_on_ctrl_c(
    model: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    words = ["generate", "--prompt-ids", "5", "--target", model, "--drafter", model]
    log = tmp_path / "said"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "coordinator",
                *words,
                "--nodes",
                "remote",
                "--listen",
                endpoint,
            ],
            cwd=ROOT,
            stderr=errors,
        )
    commands = [
        f"  .venv/bin/python -m {role}_node --join {endpoint} --model {model}"
        for role in (Role.TARGET, Role.DRAFTER)
    ]
    shown = [
        "waiting for the target and the drafter; type on their hosts:",
        *(line for command in commands for line in continued(command, WIDTH)),
    ]
    try:
        assert wait_for(lambda: len(log.read_text().splitlines()) >= len(shown), LIMIT_S)
        time.sleep(1.0)
        assert log.read_text().splitlines() == shown
        process.send_signal(signal.SIGINT)
        assert process.wait(10.0) == 130
    finally:
        process.kill()
        process.wait()
    assert log.read_text().splitlines() == [*shown, *shown, "interrupted"]
