"""The process that computes chances: one that ends early, hangs, or is left alone."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lab.pair import measuring
from lab.pair.requests import Request, Said
from proto.errors import NodeError
from proto.installation import ROOT

TEXT = Said((5, 17), (40, 8), 0.0, 3)


def asked(folder: Path) -> Request:
    name = str(folder)
    return Request(name, None, "float32", name, None, "float32", device="cpu", texts=(TEXT,))


@pytest.mark.slow
def test_a_process_that_cannot_load_the_models_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"the chances were not computed: .*config\.json"):
        list(measuring.judged(asked(tmp_path)))


def test_a_process_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ANSWER_LIMIT_S", 0.2)
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(silent, stdout=subprocess.PIPE, text=True) as process:
        assert measuring._line_of(process) == ""
        assert process.wait(10) < 0


@pytest.mark.slow
def test_it_ends_when_its_input_is_closed(tmp_path: Path) -> None:
    script = (
        "from lab.pair import chances\n"
        "chances.answers = lambda _: (__import__('time').sleep(1) for _ in iter(int, 1))\n"
        "chances.asdict = lambda _: None\n"
        "chances.main()\n"
    )
    code = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(code, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(asked(tmp_path))) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "null\n"
        process.stdin.close()
        assert process.wait(20) == 0
