"""What was forked from a coordinator keeps nothing of it alive, and ends nothing of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.process.test_faults import ROOT, alive, wait_for
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

# A program of a user: `fork` is Python's, or a C library's, which runs no hook of Python.
BEGIN = """
import ctypes, os, sys, time
from coordinator.api.config import (PairConfig, SpeculationConfig,)
from coordinator.api.params import SamplingParams
from coordinator.api.pair import Pair
from proto.errors import ClosedError

library = ctypes.CDLL(None)
how, folder = sys.argv[1:]
fork = os.fork if how == "python" else library.fork
params = SamplingParams(max_tokens=20, ignore_eos=True)

def text():
    stream, _ = pair.generate((5, 6, 7), SpeculationConfig(), params)
    return [token for emit in stream for token in emit.tokens]

pair = Pair(PairConfig(target=folder, drafter=folder, dtype="float32"))
"""
A_CHILD_THAT_LIVES_ON = """
child = fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, *pair.pids().values(), flush=True)
time.sleep(60)
"""
A_CHILD_THAT_ENDS = """
before = text()
child = fork()
if child == 0:
    try:
        text()
    except ClosedError as error:
        print(error, flush=True)
    pair.close()
    sys.exit(0)  # with all that runs at exit
os.waitpid(child, 0)
assert text() == before
assert len(pair.pids()) == 2
child = fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
started = time.monotonic()
pair.close()
took_s = time.monotonic() - started
os.kill(child, 9)
print(took_s, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model."""
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@contextmanager
def program(code: str, how: str, folder: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the program of a user; it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code, how, folder],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a child that hangs holds the pipes
        process.communicate()


@pytest.mark.parametrize("how", ["python", "c"])
def test_no_node_outlives_a_killed_coordinator_while_its_child_lives(how: str, folder: str) -> None:
    with program(A_CHILD_THAT_LIVES_ON, how, folder) as process:
        assert process.stdout is not None
        child, *nodes = (int(pid) for pid in process.stdout.readline().split())
        try:
            assert len(nodes) == 2
            assert all(map(alive, nodes))
            process.kill()
            assert wait_for(lambda: not any(map(alive, nodes)), 5.0)
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.timed
def test_what_a_forked_child_does_leaves_its_parent_alone(folder: str) -> None:
    with program(A_CHILD_THAT_ENDS, "python", folder) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    refusal, took_s = said.splitlines()
    assert refusal == "a forked process cannot use its parent's nodes; start some in it"
    assert float(took_s) < 1.0, "the nodes did not see that their lifeline was closed"
