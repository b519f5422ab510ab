"""Conversations with real processes: at a terminal with Ctrl-C, and in a pipe."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.api.chat import ChatTemplate
from coordinator.api.prompts import Tokenization
from coordinator.cli.chat.conversation import Conversation
from tests.forking.server import command_of
from tests.process.reference import Reference
from tests.process.terminal import AtTerminal
from tests.process.test_faults import ROOT, wait_for
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

# Every answer is a line: no control characters, and no circumflex, with which a terminal shows ^C.
LETTERS = [chr(code) for code in range(ord(" "), 127) if chr(code) != "^"]
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if brief %}<|system|>brief<|end|>{% endif %}<|assistant|>"
)
NUM_TOKENS = 24
SYSTEM = "Be kind."
ENDS = re.compile(r"\r\n(?:the answer ends at --max-tokens|stopped; what was written)")


def save_tokenizer(folder: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    signs = [byte_level.pre_tokenize_str(letter)[0][0] for letter in LETTERS]
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    target = make_model("llama", root / "target", vocab=len(LETTERS) + len(MARKS))
    drafter = make_noised(target, root / "drafter", 0.2)
    for folder in (target, drafter):
        save_tokenizer(folder)
    return target, drafter


def command(folders: tuple[Path, Path], *arguments: str) -> list[str]:
    target, drafter = map(str, folders)
    pair = ["--target", target, "--drafter", drafter, "--dtype", "float32", "--ignore-eos"]
    sizes = ["--max-tokens", str(NUM_TOKENS), "--max-model-len", "1000"]
    return [sys.executable, "-m", "coordinator", "chat", *pair, *sizes, *arguments]


class Oracle:
    """The conversation once more, with answers by transformers' own `generate`."""

    def __init__(self, folder: Path, system: str = "", **arguments: object) -> None:
        self.conversation = Conversation(system)
        self._arguments = arguments
        self._template = ChatTemplate.of_model(str(folder), None)
        tokenization = Tokenization.of_model(str(folder), None)
        assert tokenization is not None
        self._tokenization = tokenization
        self._reference = Reference(folder)

    def answer(self, question: str) -> str:
        """What the target says, to its last token."""
        self.conversation.ask(question)
        prompt = self._template.render(self.conversation.messages, self._arguments)
        ids = self._tokenization.encode(prompt, special_tokens=False)
        return self._tokenization.decode(tuple(self._reference.greedy(ids, NUM_TOKENS)))


@pytest.fixture
def slow_chat(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[AtTerminal]:
    """At a terminal, and slow enough for an answer to have a middle."""
    slowly = ("--simulate-target-ms", "30", "--system", SYSTEM, "--target-restarts", "0")
    program = AtTerminal(command(folders, *slowly), tmp_path)
    try:
        program.wait_for("\r\n> ")
        yield program
    finally:
        program.kill()


def asked(program: AtTerminal, question: str, *, stops: bool = False) -> str:
    """The answer as it showed, with Ctrl-C in its middle if it is to be stopped."""
    start = len(program.shown)
    program.type(question + "\n")
    start = program.wait_for(question + "\r\n", start)
    if stops:
        program.wait_for_more(start)
        program.type("\x03")
    end = program.wait_for("\r\n> ", start)
    answer, *rest = ENDS.split(program.shown[start:end])
    assert len(rest) == 1, program.shown[start:end]
    assert ("^C" in answer) == stops
    return answer.replace("^C", "")


def test_ten_turns_at_a_terminal_are_exact_also_behind_answers_that_were_stopped(
    slow_chat: AtTerminal, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    oracle = Oracle(folders[0], SYSTEM)
    for number in range(10):
        question, stops = f"Question {number}?", number in (2, 6)
        answer, whole = asked(slow_chat, question, stops=stops), oracle.answer(question)
        if stops:
            assert whole.startswith(answer)
            assert 0 < len(answer) < len(whole)
        else:
            assert answer == whole
        oracle.conversation.answered(answer)
    start = len(slow_chat.shown)
    slow_chat.type("\x03")
    start = slow_chat.wait_for("\r\n> ", slow_chat.wait_for("Ctrl-C again", start))
    slow_chat.type("\x03")
    assert slow_chat.end() == 0
    assert "error" not in slow_chat.shown
    assert len(slow_chat.nodes) == 2
    assert wait_for(lambda: not slow_chat.left(), 5.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ctrl_c_empties_the_line_and_the_end_of_the_target_ends_the_program(
    slow_chat: AtTerminal,
) -> None:
    slow_chat.type("never sent")
    start = slow_chat.wait_for("never sent")
    slow_chat.type("\x03")
    start = slow_chat.wait_for("\r\n> ", start)
    assert "Ctrl-C again" not in slow_chat.shown
    commands = {pid: command_of(pid) for pid in slow_chat.nodes}
    (target,) = [pid for pid, line in commands.items() if "target_node" in line]
    os.kill(target, signal.SIGKILL)
    assert slow_chat.end() == 1
    (line,) = [line for line in slow_chat.shown[start:].splitlines() if line]
    assert line.startswith("error: the target process was ended by signal 9 (SIGKILL)")
    assert wait_for(lambda: not slow_chat.left(), 5.0)


@pytest.mark.slow
def test_in_a_pipe_every_line_is_a_turn_and_only_answers_go_to_standard_output(
    folders: tuple[Path, Path],
) -> None:
    lines = ["Who?", "/system Be brief.", '"""Two', 'lines"""', "/reset", "Anew."]
    done = subprocess.run(
        command(folders, "--chat-template-kwargs", '{"brief": true}'),
        cwd=ROOT,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    oracle = Oracle(folders[0], brief=True)
    want = [oracle.answer("Who?")]
    oracle.conversation.answered(want[0])
    oracle.conversation.system = "Be brief."
    # The tokenizer knows no line end.
    want.append(oracle.answer("Two\nlines"))
    oracle.conversation.answered(want[1])
    oracle.conversation.reset()
    want.append(oracle.answer("Anew."))
    assert done.stdout.splitlines() == want
    assert "tokens/s" not in done.stderr


def test_a_target_without_a_tokenizer_is_refused_before_anything_is_started(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run(
        command(folders, "--target", str(tmp_path)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} has no tokenizer.json, and a conversation is text; give a target that "
        "has one\n"
    )
