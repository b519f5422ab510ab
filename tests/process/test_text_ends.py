"""What ends a text, with real processes: what is said at load, and that it helps."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from tests.process.test_faults import ROOT

pytestmark = pytest.mark.process
END = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy target, whose files name another end than its tokenizer does."""
    made = tmp_path_factory.mktemp("models") / "target"
    shutil.copytree(ROOT / "models" / "target", made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return made


@pytest.mark.long
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_command_says_once_which_end_the_files_do_not_name(folder: Path, command: str) -> None:
    arguments = ["--target", str(folder), "--drafter", "ngram", "--max-tokens", "4"]
    program = [sys.executable, "-m", "coordinator", command, *arguments]
    program += ["one"] if command == "generate" else []
    told = subprocess.run(
        program, input="one\ntwo\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    lines = [line for line in told.stderr.splitlines() if "--stop-token-ids 0" in line]
    assert len(lines) == 1, told.stderr
    assert "eos_token <|endoftext|> (id 0)" in lines[0]


def test_an_llm_logs_it_and_the_token_that_it_names_ends_a_text(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(folder), max_model_len=64, dtype="float32") as llm:
        logged = [one.getMessage() for one in caplog.records if "--stop-token" in one.getMessage()]
        free = SamplingParams(max_tokens=30, ignore_eos=True)
        tokens = llm.generate("the cat", free)[0].outputs[0].token_ids
        named = SamplingParams(max_tokens=30, stop_token_ids=[tokens[4]])
        (ended,) = llm.generate("the cat", named)[0].outputs
    assert len(logged) == 1
    assert ended.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", tokens[4])
