"""A rank that is to end lets its GPU come to the end of what it was given, as a node does."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import running
from engine.checkpoint.model import load_model
from engine.errors import EngineError
from engine.layout.slots import LaneLayout, Span
from engine.tensor_parallel import group
from engine.tensor_parallel.calls import Forward, MakeBackend
from engine.tensor_parallel.follower import FollowerRank
from engine.tensor_parallel.group import Followers, _Follower
from tests.engine.tensor_parallel.test_parts import rank_of
from tests.programs import python
from tests.tiny_models import make_model

# A rank that is told to end, by the end of its lifeline or by an error, while its GPU is at work.
RANK = """
import os, sys, threading, time
from engine import running
from engine.tensor_parallel import __main__ as rank
ended = threading.Event()
running.wait_at_end(lambda: ended.wait(10))
{how}
while not running._is_ending.is_set():
    time.sleep(0.001)
print("its forward has ended", flush=True)
ended.set()
time.sleep(10)
print("too late", flush=True)
"""
LIFELINE = """
reading, writing = os.pipe()
os.dup2(reading, 0)
threading.Thread(target=rank._end_with_parent, args=(os.getppid(),), daemon=True).start()
os.close(writing)
"""
ERROR = """
def work():
    rank._follow = lambda *_: 1
    rank._end_with_parent = rank._beat = lambda *_: None
    rank.Connection = lambda *_, **__: rank
    rank.recv = lambda: rank
    rank.parent_pid = 0
    os._exit(rank.main())
threading.Thread(target=work, daemon=True).start()
"""
FOLLOWER = """
import sys, time
sys.stdin.read()
print("its forward has ended", flush=True)
"""


@pytest.mark.parametrize(("how", "status"), [(LIFELINE, 0), (ERROR, 1)])
def test_a_rank_ends_behind_its_forward(how: str, status: int) -> None:
    done = python(RANK.format(how=how), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (status, "its forward has ended\n"), done.stderr


def test_a_call_is_launched_whole_also_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(running, "begin", lambda: asked.append("begin"))
    monkeypatch.setattr(running, "end", lambda: asked.append("end"))
    loaded = load_model(str(make_model("llama", tmp_path)), rank=rank_of(1))
    follower = FollowerRank(loaded)
    with pytest.raises(EngineError, match="has no backend"):
        follower.answer(Forward(torch.zeros(5, 1).numpy(), (Span(0, 1),), 64, None, ()))
    assert asked == ["begin", "end"]
    follower.answer(MakeBackend("fused", LaneLayout(1, 128), (), ()))
    assert asked == ["begin", "end"] * 2


def test_rank_0_waits_for_the_others_behind_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel kills them when rank 0 is gone.
    waits: list[Any] = []
    monkeypatch.setattr(running, "_waits", waits)
    monkeypatch.setattr(group, "meet", lambda *_: None)
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    followers = Followers("", revision=None, dtype="", devices=("cuda:0",))
    channel: Any = SimpleNamespace(close=process.stdin.close)
    followers._followers = [_Follower("rank 1", process, channel)]
    running.wait_at_end(lambda: None)
    followers.meet(torch.device("cpu"))
    assert len(waits) == 1, "cores have nothing to come to an end"
    followers.meet(torch.device("cuda"))
    assert waits[1:] == [followers._let_end]
    waits[1]()
    assert process.poll() == 0
    assert process.stdout.read() == b"its forward has ended\n"
    process.stdout.close()
    followers.close()
