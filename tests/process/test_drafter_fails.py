"""A drafter that fails costs speed, never a text, and it is said once what became of it."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import launcher, restarts
from lab.measure.shares import profile
from proto.errors import NodeError
from proto.messages import Role
from proto.node_config import NodeConfig
from tests.forking.server import command_of
from tests.process.reference import generate
from tests.process.test_faults import children, start_cli, wait_for
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=120, ignore_eos=True)
PIPELINED = SpeculationConfig(policy="pipelined", adaptive=False)  # where it is slow, it may rest
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A random model drafted by itself, by a target that is slow enough to wait for it.

    A drafter that has ended is not started again.
    """
    folder = str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    return PairConfig(
        target=folder,
        drafter=folder,
        dtype="float32",
        simulate_target_ms=5.0,
        drafter_restarts=0,
    )


@pytest.fixture(scope="module")
def whole(tiny: PairConfig) -> list[int]:
    """The text as the target alone writes it."""
    with Pair(tiny, with_drafter=False) as pair:
        return generate(pair, PROMPT, SpeculationConfig(policy="ar"), GREEDY).tokens


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The drafter is one that fails, in the way that `tests.process.failing_drafter` is told."""
    monkeypatch.setitem(launcher.MODULES, Role.DRAFTER, "tests.process.failing_drafter")
    return monkeypatch


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    """What was said of the drafter's end: one line."""
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    (line,) = [one for one in said if not one.startswith("dropped a frame")]
    assert "\n" not in line
    assert line.endswith("; going on without drafts")
    return line


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("memory_error", "the drafter failed: .*: there is no memory left beside its weights"),
        ("too_large", "the drafter failed: the drafter's weights do not fit on cuda:0"),
        ("killed", r"the drafter process was ended by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_drafter_that_fails_while_it_loads_is_done_without(
    tiny: PairConfig,
    whole: list[int],
    failing: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    line: str,
) -> None:
    failing.setenv("SLIPSTREAM_TEST_FAILURE", f"{way} load")
    with Pair(tiny) as pair:
        assert wait_for(lambda: pair.pids().keys() == {"target"}, 10)  # it says so, then it ends
        for _ in range(2):
            got = generate(pair, PROMPT, PIPELINED, GREEDY)
            assert got.tokens == whole
            assert got.metrics.drafter_lost_at == 0
            assert got.metrics.num_draft_tokens == 0
    assert re.match(line, only_warning(caplog))


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("fault", "the drafter failed: the device has been taken away"),
        ("exit_", "the drafter process exited with status 3"),
        ("garbage", "the drafter keeps sending garbled frames"),
    ],
)
def test_a_drafter_that_fails_in_the_middle_of_a_text_is_done_without(
    tiny: PairConfig,
    whole: list[int],
    failing: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    line: str,
) -> None:
    failing.setenv("SLIPSTREAM_TEST_FAILURE", f"{way} run")
    with Pair(tiny) as pair:
        got, next_one = (generate(pair, PROMPT, PIPELINED, GREEDY) for _ in range(2))
        time.sleep(0.2)  # the end of the process is no second line
    assert got.tokens == next_one.tokens == whole
    assert 0 < (got.metrics.drafter_lost_at or 0) < len(whole)
    assert got.metrics.num_accepted_tokens > 0
    assert next_one.metrics.drafter_lost_at == 0
    assert next_one.metrics.num_draft_tokens == 0
    assert re.match(line, only_warning(caplog))


def test_a_drafter_that_was_killed_is_started_again_and_drafts_in_the_same_text(
    tiny: PairConfig, caplog: pytest.LogCaptureFixture
) -> None:
    slow = {"drafter_restarts": 1, "simulate_target_ms": 100.0}
    with Pair(tiny.model_copy(update=slow)) as pair:
        first = pair.pids()["drafter"]
        stream, _ = pair.generate(PROMPT, PIPELINED, GREEDY.model_copy(update={"max_tokens": 900}))
        tokens = iter(stream)
        before = [next(tokens) for _ in range(5)]
        os.kill(first, signal.SIGKILL)
        assert wait_for(lambda: pair.pids().get("drafter", first) != first, LIMIT_S)
        assert wait_for(lambda: "the drafter is there again" in caplog.messages, LIMIT_S)
        again = pair.service.registry.ready(Role.DRAFTER)
        assert [node.id for node in again] == [b"drafter-1.1"]
        assert wait_for(lambda: again[0].progress > 20, LIMIT_S), "it does not draft"
        assert before
    assert caplog.messages == [
        "the drafter process was ended by signal 9 (SIGKILL); going on without drafts",
        "the drafter is started again",
        "the drafter is there again",
    ]


def test_a_drafter_that_keeps_failing_is_started_again_a_few_times(
    tiny: PairConfig,
    whole: list[int],
    failing: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing.setenv("SLIPSTREAM_TEST_FAILURE", "exit_ run")
    ends = "the drafter process exited with status 3; going on without drafts"
    with Pair(tiny.model_copy(update={"drafter_restarts": 2})) as pair:
        deadline = time.monotonic() + LIMIT_S
        while caplog.messages.count(ends) < 3 and time.monotonic() < deadline:
            assert generate(pair, PROMPT, PIPELINED, GREEDY).tokens == whole
        assert pair.pids().keys() == {"target"}
    again = "the drafter is started again"
    assert [one for one in caplog.messages if one.startswith(again)] == [again, again]
    assert caplog.messages.count(ends) == 3


def test_whatever_keeps_a_drafter_from_its_start_it_is_tried_again_and_said_once(
    tiny: PairConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "BACK_OFF_S", 0.02)
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    hindrances: list[Exception] = [full, full, full, LookupError("no such\npackage")]
    completed = launcher.Launcher._completed

    def hindered(self: launcher.Launcher, config: NodeConfig) -> NodeConfig:
        if hindrances:
            raise hindrances.pop(0)
        return completed(self, config)

    with Pair(tiny.model_copy(update={"drafter_restarts": 5})) as pair:
        monkeypatch.setattr(launcher.Launcher, "_completed", hindered)
        os.kill(pair.pids()["drafter"], signal.SIGKILL)
        assert wait_for(lambda: "the drafter is there again" in caplog.messages, LIMIT_S)
    said = [one for one in caplog.messages if "is started again" not in one]
    assert said == [
        "the drafter process was ended by signal 9 (SIGKILL); going on without drafts",
        "cannot start the drafter process: Too many open files; raise the limit of open "
        "files (ulimit -n); going on without drafts",
        "cannot start the drafter process (LookupError: no such package); going on without drafts",
        "the drafter is there again",
    ]


def test_nothing_is_started_when_the_coordinator_ends_in_between(
    tiny: PairConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = children(os.getpid())  # a pair that all tests share may run
    with Pair(tiny.model_copy(update={"drafter_restarts": 1})) as pair:
        os.kill(pair.pids()["drafter"], signal.SIGKILL)
        said = "the drafter process was ended by signal 9 (SIGKILL); going on without drafts"
        assert wait_for(lambda: said in caplog.messages, LIMIT_S)
    time.sleep(1.5)  # it would have been
    assert children(os.getpid()) == before


def test_a_drafter_that_cannot_be_used_is_an_error_from_the_start(
    tiny: PairConfig, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(tiny.drafter, tmp_path / "odd"))
    config = json.loads((odd / "config.json").read_text())
    # Only whoever makes a model of it can know.
    (odd / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(NodeError, match=r"the drafter failed: .* lacks 9 tensors of this model"):
        Pair(tiny.model_copy(update={"drafter": str(odd)}))


def test_the_command_line_says_it_in_one_line_and_in_the_figures(tiny: PairConfig) -> None:
    process = start_cli(tiny, "--max-tokens", "20")
    drafter: list[int] = []

    def is_there() -> bool:
        drafter[:] = [pid for pid in children(process.pid) if "drafter_node" in command_of(pid)]
        return bool(drafter)

    assert wait_for(is_there, LIMIT_S)
    os.kill(drafter[0], signal.SIGKILL)
    text, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert len(text.split(",")) == 20
    assert [line for line in said.splitlines() if "going on without drafts" in line] == [
        "the drafter process was ended by signal 9 (SIGKILL); going on without drafts"
    ]
    assert "the drafter was lost after 0 tokens" in said


def test_a_profile_tells_how_many_texts_had_no_drafter(
    tiny: PairConfig, failing: pytest.MonkeyPatch
) -> None:
    failing.setenv("SLIPSTREAM_TEST_FAILURE", "exit_ load")
    with Pair(tiny) as pair:
        found = profile(pair, [PROMPT, PROMPT], PIPELINED, GREEDY)
    assert found.num_without_drafter == 2
    assert [share.process for share in found.shares] == ["target", "coordinator"]
