"""What a node's program does before it loads torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from node.starting import (
    KERNELS,
    PAGES,
    THREADS,
    keep_few_kernels,
    let_threads_sleep,
    use_large_pages,
)


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


def test_torch_asks_for_large_pages_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name,) = PAGES
    monkeypatch.setenv(name, "0")
    use_large_pages()
    assert os.environ[name] == "0"
    monkeypatch.delenv(name)
    use_large_pages()
    assert os.environ[name] == "1"
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert name.encode() in library.read_bytes(), "torch reads this variable"


def test_torch_keeps_few_programs_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in KERNELS:
        monkeypatch.setenv(name, "7")
        keep_few_kernels()
        assert os.environ[name] == "7"
        monkeypatch.delenv(name)
    keep_few_kernels()
    assert {name: os.environ[name] for name in KERNELS} == KERNELS
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert b"LRU_CACHE_CAPACITY" in library.read_bytes(), "torch reads this variable"


def test_that_is_set_before_torch_is_loaded() -> None:
    watch = (
        "import os, sys, runpy, importlib.abc\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            names = 'GOMP_SPINCOUNT', 'THP_MEM_ALLOC_ENABLE', 'LRU_CACHE_CAPACITY'\n"
        "            print(*map(os.environ.get, names), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from node.starting import start\n"
        "sys.argv = ['x', '--join', 'tcp://127.0.0.1:1']\n"
        "start('drafter', lambda: None)\n"
    )
    theirs = {**THREADS, **PAGES, **KERNELS}
    own = {name: value for name, value in os.environ.items() if name not in theirs}
    ended = subprocess.run(
        [sys.executable, "-c", watch], env=own, capture_output=True, text=True, timeout=60
    )
    wanted = [THREADS["GOMP_SPINCOUNT"], *PAGES.values(), KERNELS["LRU_CACHE_CAPACITY"]]
    assert ended.stdout.split() == wanted, ended.stderr


@pytest.mark.long
def test_a_node_imports_no_package_that_it_does_not_use() -> None:
    code = (
        "import sys\n"
        "from node import starting\n"
        "if 'all' not in sys.argv: starting.leave_out_unused()\n"
        "import target_node.worker, drafter_node.worker\n"
        "from transformers import AutoModelForCausalLM\n"
        "import transformers.models.llama.modeling_llama\n"
        "from transformers.utils import is_scipy_available\n"
        "print(is_scipy_available(), any(n.startswith('scipy.') for n in sys.modules))\n"
    )
    for words, said in (((), "False False\n"), (("all",), "True True\n")):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == said, done.stderr
