"""Many prompts on the command line: what stands where, and what is kept when one of them fails."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forking.server import command_of
from tests.process.test_faults import ROOT, alive, children, wait_for
from tests.tiny_models import make_model, make_noised
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer

pytestmark = pytest.mark.process

TOO_LONG = "x" * 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options for a random pair with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    target = make_model("llama", root / "target", vocab=VOCAB_SIZE + 3)
    drafter = make_noised(target, root / "drafter", 0.2)
    for folder in (target, drafter):
        save_bytewise_tokenizer(folder)
    pair = ["--target", str(target), "--drafter", str(drafter), "--dtype", "float32"]
    return [*pair, "--max-model-len", "200", "--ignore-eos", "--max-tokens", "24"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coordinator", "generate", *arguments]


def run(*arguments: str, standard_input: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def json_lines(folder: Path, *prompts: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt_that_does_not_fit_loses_nothing_of_the_others(
    models: list[str], tmp_path: Path
) -> None:
    file = json_lines(tmp_path, "one", "two\nlines", TOO_LONG, "four")
    done = run("--prompt-file", file, "--json", *models)
    assert done.returncode == 2
    made = records(done.stdout)
    assert [record["index"] for record in made] == [0, 1, 2, 3]
    assert [record["prompt"] for record in made] == ["one", "two\nlines", TOO_LONG, "four"]
    assert made[2].keys() == {"index", "prompt", "error"}
    assert errors_of(done) == [f"error: prompt 3 of 4: {made[2]['error']}"]
    for record in (made[0], made[1], made[3]):
        assert len(record["token_origins"]) == len(record["token_ids"]) == 24
        figures = record["metrics"]["speculative_decoding"]
        accepted = record["token_origins"].count("draft:model")
        assert figures["num_accepted_draft_tokens"] == accepted


@pytest.mark.long
def test_texts_that_are_complete_are_kept_when_the_target_dies(
    models: list[str], tmp_path: Path
) -> None:
    file = json_lines(tmp_path, *"abcde")
    slowly = ["--max-num-seqs", "1", "--simulate-target-ms", "40", "--target-restarts", "0"]
    process = subprocess.Popen(
        command("--prompt-file", file, "--json", *slowly, *models),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(2)]
    nodes = children(process.pid)
    commands = {pid: command_of(pid) for pid in nodes}
    (target,) = [pid for pid, line in commands.items() if "target_node" in line]
    os.kill(target, signal.SIGKILL)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert [record["index"] for record in records("".join(first))] == [0, 1]
    assert rest == ""
    assert errors.splitlines()[-1].startswith("error: prompt 3 of 5: the target process was ended")
    assert wait_for(lambda: not any(map(alive, nodes)), 5.0)


@pytest.mark.long
def test_ctrl_c_loses_no_text_that_is_complete(models: list[str], tmp_path: Path) -> None:
    # The others end where the context does, before the first is half done.
    file = json_lines(tmp_path, "one", "b" * 192, "c" * 192)
    slowly = ["--max-num-seqs", "3", "--simulate-target-ms", "60"]
    arguments = ["--prompt-file", file, *slowly, *models]
    texts = [record["text"] for record in records(run("--json", *arguments).stdout)]
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.read(len(texts[0]) * 2 // 3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert len(texts[0]) > len(texts[1]) > 0
    lines = [text if text.endswith("\n") else text + "\n" for text in texts]
    assert (first + rest).endswith("".join(lines[1:]))
    assert not (first + rest).startswith(lines[0])


@pytest.mark.slow
def test_standard_output_carries_only_the_texts(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    done = run("--prompt-file", str(file), *models)
    assert done.returncode == 0
    assert not errors_of(done)
    made = records(run("--prompt-file", str(file), "--json", *models).stdout)
    assert [record["prompt"] for record in made] == ["one", "two"]
    lines = [text if text.endswith("\n") else text + "\n" for text in (r["text"] for r in made)]
    assert done.stdout == "".join(lines)
    assert "── 1 of 2 ── one ──" in done.stderr
    assert "── 2 of 2 ── two ──" in done.stderr
    assert "2 texts, 48 tokens" in done.stderr
    assert re.search(r"^target: fused, float32, .*; drafter: fused, float32, ", done.stderr, re.M)


@pytest.mark.long
def test_speculation_is_shown_in_marks_that_can_be_taken_away(models: list[str]) -> None:
    # In a tree a sibling may be accepted in place of a draft: only a chain shows all it rejects.
    # A target that takes long is worth drafting for, however busy this machine is.
    how = ("--show-speculation", "--verbose", "--policy", "sync", "--simulate-target-ms", "8")
    done = run("one\ntwo", *how, *models)
    assert done.returncode == 0
    assert "marks: accepted draft  [-rejected draft-]  {+the target's own+}" in done.stderr
    assert "\x1b[" not in done.stdout
    accepted, drafted = re.findall(r"\((\d+) of (\d+) drafts accepted\)", done.stderr)[0]
    assert int(accepted) < int(drafted)
    assert "[-" in done.stdout
    assert "{+" in done.stdout


@pytest.mark.long
def test_a_prompt_on_standard_input_may_have_several_lines_and_a_plain_chat_says_so(
    models: list[str],
) -> None:
    done = run("-", "--chat", "--json", *models, standard_input="Why?\nNow?")
    assert done.returncode == 0
    assert "the target has no chat template; a plain one is used" in done.stderr
    assert records(done.stdout)[0]["prompt"] == "User: Why?\nNow?\n\nAssistant:"


@pytest.mark.long
def test_every_sampling_parameter_is_a_flag_and_what_it_gives_is_in_the_object(
    models: list[str],
) -> None:
    flags = (
        "--temperature 0.9 --seed 3 --top-k 100 --top-p 0.98 --min-p 0.001 --n 2 --min-tokens 2 "
        "--repetition-penalty 1.1 --presence-penalty 0.1 --frequency-penalty 0.1 --logprobs 1 "
        "--logit-bias 50:-100,7:2.5 --bad-words a --bad-words b --prompt-logprobs 0"
    )
    # A target that takes long is worth drafting for, however busy this machine is.
    flags += " --policy sync --simulate-target-ms 8"
    (made,) = records(run("one", "--json", *flags.split(), *models).stdout)
    assert [row and len(row) for row in made["prompt_logprobs"]] == [None, 1, 1]
    assert len(made["outputs"]) == 2
    first = made["outputs"][0]
    assert first["token_ids"] != made["outputs"][1]["token_ids"]
    assert first["token_origins"].count("draft:model") > 0
    assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
    assert len(first["logprobs"]) == 24
    chosen = [row[str(t)] for row, t in zip(first["logprobs"], first["token_ids"], strict=True)]
    assert first["cumulative_logprob"] == pytest.approx(sum(each["logprob"] for each in chosen))
    stop = ["--stop-token-ids", f"3,{first['token_ids'][9]}", "--include-stop-str-in-output"]
    (again,) = records(run("one", "--json", *flags.split(), *stop, *models).stdout)
    last = again["outputs"][0]
    assert last["token_ids"] == first["token_ids"][: len(last["token_ids"])]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", last["token_ids"][-1])


@pytest.mark.slow
def test_several_texts_of_a_prompt_are_told_apart(models: list[str]) -> None:
    flags = ["--temperature", "1", "--seed", "1", "--n", "2"]
    (made,) = records(run("one", "--json", *flags, *models).stdout)
    done = run("one", *flags, *models)
    texts = [each["text"] for each in made["outputs"]]
    assert done.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    assert "text 1 of 2" in done.stderr
    assert "text 2 of 2" in done.stderr
    assert "2 texts, 48 tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "give either PROMPT, --prompt-file or --prompt-ids"),
        (["a", "--prompt-file", "b"], "give either PROMPT, --prompt-file or --prompt-ids"),
        (["--prompt-file", "./nowhere"], "cannot read nowhere: No such file or directory"),
        (["--prompt-file", "/dev/null"], "/dev/null has no prompts"),
        (["-"], "standard input is empty"),
        (["--prompt-ids", "1,2", "--chat"], "--chat needs a text"),
        (["a", "--json", "--show-speculation"], "--show-speculation is for people"),
        (["a", "--logprobs", "1"], "--logprobs and --prompt-logprobs are shown with --json"),
        (["a", "--logit-bias", "5"], "--logit-bias: expected biases like 50:-100,7:2.5, got '5'"),
        (["a", "--stop-token-ids", "x"], "--stop-token-ids: expected numbers like 1,2,3"),
        (["a", "--stop", ""], "--stop: expected a text that is not empty"),
        (["a", "--n", "2"], "n is 2, but at temperature 0 all texts are the same"),
    ],
)
def test_a_bad_request_is_one_line_before_anything_is_started(
    arguments: list[str], line: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (error,) = errors_of(done)
    assert line in error
    assert "starting" not in done.stderr


def test_the_command_line_answers_without_loading_a_model() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "coordinator", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "generate" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "ray"}
