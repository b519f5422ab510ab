"""Processes die, stop and talk nonsense; the text stays the same or one clear line is said."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from proto.errors import IncompatibleError, SlipstreamError
from proto.links.transport import Connection
from proto.liveness import SILENCE_LIMIT_S
from tests.forking.server import is_server
from tests.process.patience import wait_for
from tests.process.reference import generate
from tests.tiny_models import make_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
GENERATE = (sys.executable, "-m", "coordinator", "generate")
PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=200, ignore_eos=True)
SYNC = SpeculationConfig(policy="sync", adaptive=False)
NUM_DRAFTS, WINDOW = 8, 16
PIPELINED = SpeculationConfig(  # where it is slow, it may rest
    policy="pipelined", num_speculative_tokens=NUM_DRAFTS, window=WINDOW, adaptive=False
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A random model drafted by itself: everything is accepted while the drafter lives."""
    folder = str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    return PairConfig(target=folder, drafter=folder, dtype="float32")


@pytest.fixture(scope="module")
def slow(tiny: PairConfig) -> Iterator[Pair]:
    """Drafts are worth waiting for only if the target is slower than its drafter."""
    with Pair(tiny.model_copy(update={"simulate_target_ms": 5.0})) as pair:
        yield pair


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def check_drafter_killed(config: PairConfig, counts: list[int]) -> None:
    """Kill the drafter after so many tokens; without it, the target writes the same text again."""
    for count, speculation in zip(counts, cycle((SYNC, PIPELINED)), strict=False):
        update = {"simulate_target_ms": 5.0, "drafter_restarts": 0}
        with Pair(config.model_copy(update=update)) as pair:
            stream, _ = pair.generate(PROMPT, speculation, GREEDY)
            tokens: list[int] = []
            drafter: int | None = pair.pids()["drafter"]
            for chunk in stream:
                tokens += chunk.tokens
                if drafter is not None and len(tokens) >= count:
                    os.kill(drafter, signal.SIGKILL)
                    drafter = None
            whole = generate(pair, PROMPT, speculation, GREEDY)
        assert tokens == whole.tokens, f"killed at {count}"
        assert stream.result is not None
        metrics = stream.result.metrics
        # Where the machine is busy, what is not waited for may always be late.
        is_waited_for = speculation is SYNC and count >= 20
        assert metrics.num_accepted_tokens > 0 or not is_waited_for, "speculation is dead"
        lost_at = metrics.drafter_lost_at
        if lost_at is None:
            assert count > 150, "the end came before the death was noticed"
        else:
            assert lost_at >= count


@pytest.mark.parametrize("counts", [[60], pytest.param([1, 120], marks=pytest.mark.long)])
def test_the_text_is_complete_when_the_drafter_is_killed(
    tiny: PairConfig, counts: list[int]
) -> None:
    check_drafter_killed(tiny, counts)
    assert GREEDY.max_tokens == 200


@pytest.mark.slow
def test_the_text_is_complete_wherever_the_drafter_is_killed(tiny: PairConfig) -> None:
    check_drafter_killed(tiny, list(range(1, 200, 10)))
    assert len(range(1, 200, 10)) == 20


@pytest.mark.timed
@pytest.mark.long
def test_a_stopped_drafter_is_not_waited_for_and_is_used_again_later(slow: Pair) -> None:
    whole = generate(slow, PROMPT, PIPELINED, GREEDY)
    drafter = slow.pids()["drafter"]
    os.kill(drafter, signal.SIGSTOP)
    try:
        stopped = generate(slow, PROMPT, PIPELINED, GREEDY)
    finally:
        os.kill(drafter, signal.SIGCONT)
    resumed = generate(slow, PROMPT, PIPELINED, GREEDY)
    assert stopped.tokens == resumed.tokens == whole.tokens
    assert stopped.metrics.num_draft_tokens <= 2 * NUM_DRAFTS
    assert stopped.metrics.fallbacks.get("late", 0) <= 8, "it is tried again and again"
    assert resumed.metrics.num_accepted_tokens > 20


@pytest.mark.slow
def test_a_coordinator_that_was_stopped_for_long_goes_on(tiny: PairConfig) -> None:
    """As with Ctrl-Z and fg, or a laptop that sleeps: its nodes have not been silent."""
    two_texts = ("--max-tokens", "60", "--temperature", "1", "--seed", "7", "--n", "2")
    undisturbed, process = start_cli(tiny, *two_texts), start_cli(tiny, *two_texts)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1).decode()
    process.send_signal(signal.SIGSTOP)
    time.sleep(4 * SILENCE_LIMIT_S)
    process.send_signal(signal.SIGCONT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "silent" not in errors
    expected, _ = undisturbed.communicate(timeout=60)
    assert first + rest == expected
    assert expected.count(",") == 2 * 59


@pytest.mark.long
def test_a_drafter_fills_its_window_and_stops(tiny: PairConfig) -> None:
    config = tiny.model_copy(update={"simulate_target_ms": 1000.0})
    with Pair(config) as pair:
        stream, _ = pair.generate(PROMPT, PIPELINED, GREEDY)
        iterator = iter(stream)
        for _ in range(2):
            next(iterator)
        node = pair.service.registry.of(list(pair.states())[1])
        assert node is not None
        time.sleep(0.6)
        before = node.progress
        time.sleep(0.3)
        assert node.progress == before, "the drafter did not stop at its window"
        assert before <= 4 * WINDOW + 5


def start_cli(config: PairConfig, *more: str) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, generating slowly."""
    return subprocess.Popen(
        [
            *(*GENERATE, "--prompt-ids", "5,6,7", "--ignore-eos", "--max-tokens", "600"),
            *("--target", config.target, "--drafter", config.drafter),
            *("--simulate-target-ms", "50", *more),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Process ids of a process's children, but for the one from which its nodes are forked."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = {int(child) for child in " ".join([text, *tasks]).split()}
    return sorted(child for child in found if not is_server(child))


@pytest.mark.really
@pytest.mark.long
def test_nothing_is_left_when_the_coordinator_is_killed(tiny: PairConfig) -> None:
    for round_number in range(5 if os.environ.get("SLIPSTREAM_FULL") else 2):
        coordinator = start_cli(tiny)
        assert coordinator.stdout is not None
        assert coordinator.stdout.read(4), "no text came"
        nodes = children(coordinator.pid)
        assert len(nodes) == 2
        coordinator.kill()
        coordinator.wait()
        assert wait_for(lambda nodes=nodes: not any(map(alive, nodes)), 5.0), round_number
        coordinator.stdout.close()
        assert coordinator.stderr is not None
        coordinator.stderr.close()


@pytest.mark.really
@pytest.mark.timed
def test_ctrl_c_ends_all_three_processes_within_two_seconds(tiny: PairConfig) -> None:
    coordinator = start_cli(tiny)
    assert coordinator.stdout is not None
    assert coordinator.stdout.read(4), "no text came"
    nodes = children(coordinator.pid)
    started = time.monotonic()
    os.killpg(coordinator.pid, signal.SIGINT)
    _, errors = coordinator.communicate(timeout=10)
    assert time.monotonic() - started < 2.0
    assert coordinator.returncode == 130
    assert not any(map(alive, nodes))
    assert errors.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


def test_another_vocabulary_is_refused(tiny: PairConfig, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path / "other", vocab=150)
    with pytest.raises(IncompatibleError, match=r"vocabulary has \d+ tokens"):
        Pair(tiny.model_copy(update={"drafter": str(other)}))


@pytest.mark.long
def test_garbage_on_the_socket_of_a_stranger_is_ignored(slow: Pair) -> None:
    stranger = Connection(slow.service.endpoint, b"stranger")
    for junk in (b"", b"\xff" * 100, b"\x01garbage", os.urandom(1000)):
        stranger.send(junk)
    got = generate(slow, PROMPT, PIPELINED, GREEDY)
    stranger.close(linger_s=0.0)
    assert len(got.tokens) == GREEDY.max_tokens
    assert got.metrics.num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--target", "./nowhere"], "no such folder"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens"),
        (["--num-speculative-tokens", "16", "--reproducible"], "--num-speculative-tokens is 16"),
        (["--prompt-ids", ",".join(["5"] * 700)], "the prompt has 700 tokens"),
        (["--nonsense"], "there is no option --nonsense"),
    ],
)
def test_bad_input_is_one_line_and_a_nonzero_exit(
    tiny: PairConfig, arguments: list[str], line: str
) -> None:
    base = ["--target", tiny.target, "--drafter", tiny.drafter, "--max-model-len", "512"]
    prompt = [] if "--prompt-ids" in arguments else ["--prompt-ids", "5,6,7"]
    done = subprocess.run(
        [*GENERATE, *base, *prompt, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(errors) == 1, done.stderr
    assert line in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.really
@pytest.mark.long
def test_json_is_one_object_and_nothing_else_on_stdout(tiny: PairConfig) -> None:
    done = subprocess.run(
        [
            *(*GENERATE, "--prompt-ids", "5,6,7", "--json", "--max-tokens", "20"),
            *("--target", tiny.target, "--drafter", tiny.drafter),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    record = json.loads(done.stdout)
    assert record.keys() >= {"text", "token_ids", "finish_reason", "metrics"}
    assert record["finish_reason"] in ("stop", "length")
    assert record["metrics"]["tokens_per_second"] > 0


@pytest.mark.long
def test_use_after_close_is_a_clear_error(tiny: PairConfig) -> None:
    pair = Pair(tiny)
    pids = pair.pids()
    pair.close()
    assert not any(map(alive, pids.values()))
    with pytest.raises(SlipstreamError, match="closed"):
        pair.generate(PROMPT, PIPELINED, GREEDY)
