"""What a node's program does before it loads torch."""

import os
import subprocess
import sys

import pytest

from node.starting import THREADS, let_threads_sleep


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in THREADS:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    let_threads_sleep()
    assert {name: os.environ[name] for name in THREADS} == THREADS
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in os.environ


def test_that_is_set_before_torch_is_loaded() -> None:
    watch = (
        "import os, sys, runpy, importlib.abc\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')); os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from node.starting import start\n"
        "sys.argv = ['x', '--join', 'tcp://127.0.0.1:1']\n"
        "start('drafter', lambda: None)\n"
    )
    own = {name: value for name, value in os.environ.items() if name not in THREADS}
    ended = subprocess.run(
        [sys.executable, "-c", watch], env=own, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.strip() == THREADS["GOMP_SPINCOUNT"], ended.stderr
