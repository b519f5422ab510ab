"""A model that two processes share says what it says in one; a rank that ends takes all with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from engine.checkpoint.model import load_model
from engine.tensor_parallel import silence
from engine.tensor_parallel.calls import Start
from proto.errors import SlipstreamError
from proto.liveness import SILENCE_LIMIT_S
from tests.engine.test_slot_cache import TOLERANCE, difference
from tests.process.behaviours import CONFIG
from tests.process.reference import (
    EVERY_POLICY,
    PROMPTS,
    Reference,
    assert_same_but_for_near_ties,
    generate,
)
from tests.process.test_faults import alive, wait_for
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
TWO = "cpu:0,cpu:1"
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
PROMPT = (5, 6, 7)
SYNC = SpeculationConfig(policy="sync", adaptive=False)
LIMIT_S = 120.0
# Hidden states of a prompt, written to a file by whoever is rank 0.
FEATURES = """
import sys
import torch
from engine.loading import load_engine
from engine.layout.slots import Feed

model, device, made = sys.argv[1:]
options = {"revision": None, "dtype": "float32", "max_len": 64, "fixed_rows": None}
engine = load_engine(model, device=device, warm_rows=(1,), say=print, layers=(1, -1), **options)
executor, where = engine.executor, tuple(range(30))
out = executor.forward(executor.lay_out([Feed(where, where, where, 0, None)], [()]), (1, -1))
torch.save(out.features, made)
engine.loaded.rank.followers.close()
"""
# A rank 0 that is killed when its follower has been stopped.
KILLED_RANK_0 = """
import os, signal, subprocess, sys
from multiprocessing.connection import Connection
from engine.tensor_parallel.calls import Start

command = [sys.executable, "-m", "engine.tensor_parallel"]
follower = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
channel = Connection(follower.stdin.fileno(), readable=False)
channel.send(Start("nothing", None, "auto", "cpu:1", 1, 2, "/nowhere", os.getpid()))
assert follower.stdout.read(1) == b"\\n"
follower.send_signal(signal.SIGSTOP)
os.waitid(os.P_PID, follower.pid, os.WSTOPPED | os.WNOWAIT)
print(follower.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def split() -> Iterator[Pair]:
    """The embedded pair with a target of six heads, four on one rank and two on the other."""
    with Pair(CONFIG.model_copy(update={"target_device": TWO})) as pair:
        yield pair


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def has_begun(follower: int) -> bool:
    """Whether a child runs a follower's program yet.

    Until then its parent waits in the kernel (vfork), where no signal reaches it: stopping such a
    child would stop the parent too.
    """
    return b"engine.tensor_parallel" in Path(f"/proc/{follower}/cmdline").read_bytes()


def test_greedy_text_of_two_ranks_is_that_of_transformers_under_every_policy(split: Pair) -> None:
    reference, prompt = Reference(CONFIG.target), split.encode(PROMPTS[0])
    want = reference.greedy(prompt, GREEDY.max_tokens)
    num_accepted = num_ties = 0
    for speculation in EVERY_POLICY:
        got = generate(split, prompt, speculation, GREEDY)
        num_accepted += got.metrics.num_accepted_tokens
        num_ties += not assert_same_but_for_near_ties(
            reference, prompt, want, got.tokens, speculation.policy
        )
    assert num_ties <= 1
    assert num_accepted > 40, "speculation is dead"
    (follower,) = children(split.pids()["target"])
    assert alive(follower)


def test_sampled_text_of_two_ranks_is_that_of_one(split: Pair, embedded: Pair) -> None:
    prompt = split.encode(PROMPTS[1])
    one = generate(embedded, prompt, SYNC, SAMPLED)
    two = generate(split, prompt, SYNC, SAMPLED)
    assert two.tokens == one.tokens
    assert two.metrics.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3"])
def test_other_architectures_and_a_drafter_of_two_ranks(architecture: str, tmp_path: Path) -> None:
    target = str(make_model(architecture, tmp_path / "target"))
    config = PairConfig(
        target=target,
        drafter=target,
        dtype="float32",
        drafter_dtype="fastest",
        target_device=TWO,
        drafter_device="cpu:0-1",
        drafter_tensor_parallel_size=2,
        simulate_target_ms=15.0,
    )
    reference, prompt = Reference(target), (5, 6, 7)
    want = reference.greedy(prompt, GREEDY.max_tokens)
    with Pair(config) as pair:
        for speculation in (EVERY_POLICY[0], SYNC, EVERY_POLICY[2]):
            got = generate(pair, prompt, speculation, GREEDY)
            assert_same_but_for_near_ties(reference, prompt, want, got.tokens, speculation.policy)
            assert speculation is not SYNC or got.metrics.num_accepted_tokens > 0
        assert [len(children(pid)) for pid in pair.pids().values()] == [1, 1]


def idle(pair: Pair, kill: Callable[[], None]) -> None:
    """Between two texts."""
    generate(pair, PROMPT, EVERY_POLICY[0], GREEDY)
    kill()
    assert wait_for(lambda: not pair.pids(), 15.0)
    generate(pair, PROMPT, EVERY_POLICY[0], GREEDY)


def busy(pair: Pair, kill: Callable[[], None]) -> None:
    """In the middle of one."""
    stream, _ = pair.generate(PROMPT, EVERY_POLICY[0], ENDLESS)
    next(iter(stream))
    kill()
    for _ in stream:
        pass


@pytest.mark.parametrize(
    ("rank", "when"),
    [(1, busy), (0, busy), pytest.param(1, idle, marks=pytest.mark.slow)],
)
def test_a_rank_that_is_killed_ends_the_target_with_one_line(
    rank: int, when: Callable[[Pair, Callable[[], None]], None], tmp_path: Path
) -> None:
    folder = str(make_model("llama", tmp_path))
    config = PairConfig(
        target=folder, drafter=folder, dtype="float32", target_device=TWO, target_restarts=0
    )
    with Pair(config, with_drafter=False) as pair:
        target = pair.pids()["target"]
        ranks = [target, *children(target)]
        assert len(ranks) == 2
        with pytest.raises(SlipstreamError) as told:
            when(pair, lambda: os.kill(ranks[rank], signal.SIGKILL))
        assert wait_for(lambda: not any(map(alive, ranks)), 10.0)
    line = str(told.value)
    assert "\n" not in line
    assert "SIGKILL" in line
    assert rank == 0 or "rank 1 of 2 (cpu:1)" in line


@pytest.mark.parametrize("when", [busy, pytest.param(idle, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_is_named_within_the_limit_of_silence(
    when: Callable[[Pair, Callable[[], None]], None], tmp_path: Path
) -> None:
    folder = str(make_model("llama", tmp_path))
    config = PairConfig(
        target=folder, drafter=folder, dtype="float32", target_device=TWO, target_restarts=0
    )
    with Pair(config, with_drafter=False) as pair:
        target = pair.pids()["target"]
        ranks = [target, *children(target)]
        began = time.monotonic()
        with pytest.raises(SlipstreamError) as told:
            when(pair, lambda: os.kill(ranks[1], signal.SIGSTOP))
        assert time.monotonic() - began < SILENCE_LIMIT_S + silence.LIMIT_S
        assert wait_for(lambda: not any(map(alive, ranks)), 10.0)
    line = str(told.value)
    assert "rank 1 of 2 (cpu:1) has been silent for 10 s" in line
    assert "\n" not in line


@pytest.mark.parametrize("stopped", [(0, 1), (1,)])
def test_no_rank_is_left_behind_when_a_pair_is_closed(
    stopped: tuple[int, ...], tmp_path: Path
) -> None:
    folder = str(make_model("llama", tmp_path))
    config = PairConfig(
        target=folder, drafter=folder, dtype="float32", target_device=TWO, target_restarts=0
    )
    with Pair(config, with_drafter=False) as pair:
        target = pair.pids()["target"]
        ranks = [target, *children(target)]
        stream, _ = pair.generate(PROMPT, EVERY_POLICY[0], ENDLESS)
        next(iter(stream))
        for rank in stopped:
            os.kill(ranks[rank], signal.SIGSTOP)
    assert wait_for(lambda: not any(map(alive, ranks)), 5.0)


def test_a_follower_ends_with_rank_0_also_while_it_loads() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "engine.tensor_parallel"]
    follower = subprocess.Popen(command, cwd=ROOT, stdin=reading)
    os.close(reading)
    rank_0 = Connection(writing, readable=False)
    rank_0.send(Start(CONFIG.target, None, "auto", "cpu:1", 1, 2, "/nowhere", os.getpid()))
    with pytest.raises(subprocess.TimeoutExpired):
        follower.wait(0.5)
    rank_0.close()
    assert follower.wait(10.0) == 0


def test_a_follower_whose_rank_0_is_gone_before_it_was_told_anything_says_nothing() -> None:
    command = [sys.executable, "-m", "engine.tensor_parallel"]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_follower_that_is_stopped_ends_when_rank_0_is_killed() -> None:
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", KILLED_RANK_0], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    said, _ = rank_0.communicate(timeout=LIMIT_S)
    assert rank_0.returncode == -signal.SIGKILL
    assert wait_for(lambda: not alive(int(said)), 10.0)


# A follower that is stopped in its first moments has not yet asked to be killed with its parent.
@pytest.mark.parametrize("stopped_after_s", [None, 0.0, 0.5])
def test_a_signal_while_a_node_by_hand_loads_ends_all_its_ranks_and_leaves_no_folder(
    stopped_after_s: float | None, tmp_path: Path
) -> None:
    rank_0 = subprocess.Popen(
        [sys.executable, "-m", "target_node", "--join", "tcp://127.0.0.1:5998", "--device", TWO],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert wait_for(lambda: bool(children(rank_0.pid)), LIMIT_S)
        (follower,) = children(rank_0.pid)
        assert wait_for(lambda: has_begun(follower), LIMIT_S)
        assert len(list(tmp_path.glob("ranks-*"))) == 1
        if stopped_after_s is not None:
            time.sleep(stopped_after_s)
            os.kill(follower, signal.SIGSTOP)
        rank_0.send_signal(signal.SIGTERM)
        _, said = rank_0.communicate(timeout=LIMIT_S)
    finally:
        rank_0.kill()
    assert (rank_0.returncode, said.splitlines()[-1]) == (0, "target: ended by SIGTERM")
    assert wait_for(lambda: not alive(follower), 10.0)
    assert list(tmp_path.glob("ranks-*")) == []


def test_hidden_states_of_two_ranks_are_those_of_the_whole(tmp_path: Path) -> None:
    folder, made = str(make_model("llama", tmp_path / "model")), tmp_path / "made"
    command = [sys.executable, "-c", FEATURES, folder, TWO, str(made)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    model = load_model(folder).model
    with torch.inference_mode():
        states = model(torch.arange(30)[None], output_hidden_states=True).hidden_states
    want = torch.cat((states[1][0], states[-1][0]), dim=1)
    assert difference(torch.load(made), want) < TOLERANCE


def test_an_architecture_that_cannot_be_divided_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = str(make_model("gpt2", tmp_path))
    config = PairConfig(target=folder, drafter="ngram", target_device=TWO)
    with pytest.raises(SlipstreamError, match=r"gpt2 cannot be divided among ranks") as told:
        Pair(config)
    assert "\n" not in str(told.value)
