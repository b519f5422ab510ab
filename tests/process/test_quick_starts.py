"""Commands as users of other programs type them, as real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from proto.installation import MODELS
from tests.process.test_faults import ROOT

pytestmark = pytest.mark.process

TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")
LENGTH = ("-n", "12", "--temp", "0", "--dtype", "float")


def run(*words: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def coordinator(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(sys.executable, "-m", "coordinator", *arguments)


def test_a_command_of_llama_cpp_and_one_with_vllms_json_write_the_same_text() -> None:
    json = f'{{"model": "{DRAFTER}", "num_speculative_tokens": 3, "method": "draft_model"}}'
    prompt = ("-p", "def read(path):")
    theirs = coordinator("generate", "-m", TARGET, "-md", DRAFTER, *prompt, *LENGTH)
    vllm = ("--model", TARGET, "--speculative_config", json, "--gpu_memory_utilization", "0.5")
    others = coordinator("generate", *vllm, *prompt, *LENGTH)
    assert (theirs.returncode, others.returncode) == (0, 0), theirs.stderr + others.stderr
    assert theirs.stdout == others.stdout
    assert len(theirs.stdout.strip()) > 5


def test_a_command_that_is_not_ours_ends_with_a_line_and_the_status_of_a_mistake() -> None:
    for words, line in (
        (("run", "gemma3"), "there is no command 'run'; `.venv/bin/python -m coordinator chat"),
        (("serve", TARGET, "-ngl", "99"), "-ngl: a model is on its device as a whole; "),
    ):
        done = coordinator(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert line.partition(".venv/bin/")[0] in done.stderr
        assert "python -m coordinator chat" in done.stderr or words[0] != "run"


@pytest.mark.really
def test_the_installed_command_names_itself(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("slipstream")
    if not script.exists():
        pytest.skip("this environment has no such command")
    done = run(str(script), "generate", "-h", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  slipstream generate " in done.stdout
    assert "python -m" not in done.stdout
