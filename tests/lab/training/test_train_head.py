"""`train-head`: a head better than chance in seconds, the same after a kill, in published files."""

import json
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coordinator.api.prompts import Tokenization
from coordinator.cli.app import EXIT_FAILED, EXIT_USAGE, command_line, run
from engine.heads.dflash_executor import DFlashExecutor
from engine.heads.eagle import EagleExecutor
from engine.heads.head_loading import load_head as load_for_engine
from engine.heads.medusa_executor import MedusaExecutor
from engine.layout.slots import Feed
from lab.training import command, files, head_texts, train_heads
from lab.training.first_choices import Quality, Watched
from lab.training.head_texts import Texts
from lab.training.heads import load_head, new_head, write_head
from lab.training.teacher import ENDED, load_teacher
from lab.training.train_heads import LAST, Lessons
from proto.head_kinds import HeadKind
from tests.tiny_models import make_model
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
PROMPTS = "\n".join(f"the cat number {i} says {i * 7919 % 1000} to the dog" for i in range(80))
KINDS = [HeadKind.EAGLE3, HeadKind.EAGLE, HeadKind.MEDUSA, HeadKind.DFLASH]
IN_SECONDS = KINDS[:3]  # a block learns far more slowly


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, 64 wide, that reads bytes."""
    folder = tmp_path_factory.mktemp("target")
    make_model("llama", folder, vocab=VOCAB_SIZE, scale=0.5)  # one that can be learned in seconds
    save_bytewise_tokenizer(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A prompt in each line."""
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return path


@pytest.fixture(autouse=True)
def _short(monkeypatch: Patch) -> None:
    """Runs of seconds: short texts, few at once, a checkpoint after each step."""
    monkeypatch.setattr(train_heads, "WINDOW", 48)
    monkeypatch.setattr(train_heads, "WRITTEN_AT_ONCE", 8)
    monkeypatch.setattr(train_heads, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(command, "NUM_HELD_OUT", 4)
    monkeypatch.setattr(command, "writer", lambda *_, **__: None)


def call(monkeypatch: Patch, *arguments: object) -> int:
    """The exit status of the command."""
    monkeypatch.setattr("sys.argv", ["slipstream", "train-head", *map(str, arguments)])
    return run(command_line([command.train_head]))


def line_of(monkeypatch: Patch, capsys: Capture, *arguments: object) -> str:
    """The line of the error."""
    assert call(monkeypatch, *arguments) in (EXIT_USAGE, EXIT_FAILED)
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def arguments_of(target: Path, texts: Path, kind: HeadKind, out: Path) -> list[object]:
    """The usual arguments, but the length of the run."""
    return ["--target", target, "--prompt-file", texts, "--kind", kind.value, "--out", out]


@pytest.mark.parametrize("kind", IN_SECONDS)
def test_some_seconds_make_the_first_choice_better_than_chance(
    kind: HeadKind, target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    out = tmp_path / "head"
    usual = arguments_of(target, texts, kind, out)
    length = ("--num-texts", 32, "--num-steps", 30)
    monkeypatch.setattr(train_heads, "CHECKPOINT_S", 1e9)
    monkeypatch.setattr(train_heads, "LR_MAX", {kind: 1e-2})
    monkeypatch.setattr(command, "NUM_HELD_OUT", 8)
    assert call(monkeypatch, *usual, *length, "--drafter", target) == 0
    figures = json.loads((out / command.DONE).read_text())["figures"]
    assert figures["head"]["1"][0] > 0.2  # chance is 1 in 257
    assert (
        figures["drafter"]["1"][0] > 0.9
    )  # it is the target itself, in bfloat16 where that is fast
    assert f"--drafter {out}" in capsys.readouterr().out
    names = {"config.json", "training.json", load_name(kind)}
    assert {path.name for path in out.iterdir()} == names
    assert call(monkeypatch, *usual, *length) == 0
    assert "this head is finished" in capsys.readouterr().err


@pytest.mark.parametrize("kind", IN_SECONDS)
def test_a_head_that_was_trained_before_is_what_another_run_starts_from(
    kind: HeadKind, target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    first, second, new = (tmp_path / name for name in ("first", "second", "new"))
    length = ("--num-texts", 16, "--num-steps", 3)
    monkeypatch.setattr(train_heads, "LR_MAX", {kind: 1e-2})
    assert call(monkeypatch, *arguments_of(target, texts, kind, first), *length) == 0
    monkeypatch.setattr(train_heads, "LR_MAX", {kind: 1e-6})
    on = ("--start-from", first)
    assert call(monkeypatch, *arguments_of(target, texts, kind, second), *length, *on) == 0
    assert call(monkeypatch, *arguments_of(target, texts, kind, new), *length) == 0
    before, after, other = (load_file(one / load_name(kind)) for one in (first, second, new))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.allclose(after[name].float(), tensor.float(), rtol=0.02, atol=1e-3), name
    assert any(not torch.allclose(other[name].float(), before[name].float()) for name in before)
    capsys.readouterr()
    wrong = arguments_of(target, texts, kind, tmp_path / "fourth")
    line = line_of(monkeypatch, capsys, *wrong, "--start-from", tmp_path)
    assert line.startswith(f"--start-from: {tmp_path} holds no {kind} head of ")
    if kind is HeadKind.EAGLE3:
        line = line_of(monkeypatch, capsys, *wrong, *on, "--draft-vocab-size", 50)
        assert line.startswith("--start-from: the head keeps its vocabulary")


def load_name(kind: HeadKind) -> str:
    """The name of its file of tensors."""
    return "medusa_lm_head.safetensors" if kind is HeadKind.MEDUSA else "model.safetensors"


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def killing(monkeypatch: Patch, number: int) -> None:
    """Let the process die just before or just after the number-th file is in its place."""
    usual: Callable[..., None] = files.os.replace
    count = 0

    def replaced(source: Path, destination: Path) -> None:
        nonlocal count
        count += 1
        if count == number and number % 2:
            raise Killed
        usual(source, destination)
        if count == number:
            raise Killed

    monkeypatch.setattr(files.os, "replace", replaced)


def test_a_run_that_is_killed_at_any_file_ends_with_the_weights_of_an_unbroken_one(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    length = ("--num-texts", 16, "--num-steps", 5)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert call(monkeypatch, *arguments_of(target, texts, HeadKind.EAGLE3, whole), *length) == 0
    again, number = arguments_of(target, texts, HeadKind.EAGLE3, broken), 0
    while True:
        number += 1  # each run gets one file further than the one before it
        with monkeypatch.context() as patch:
            killing(patch, number)
            try:
                assert call(patch, *again, *length) == 0
            except Killed:
                continue
        break
    assert number == 6
    for path in sorted(whole.iterdir()):
        assert (broken / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in broken.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_has_in_the_engine_the_logits_of_the_plain_implementation(
    kind: HeadKind, target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "head"
    usual = arguments_of(target, texts, kind, out)
    assert call(monkeypatch, *usual, "--num-texts", 8, "--num-steps", 8) == 0
    teacher = load_teacher(str(target), None, kind, dtype="float32", device="cpu")
    plain = load_head(kind, teacher.shared, out)
    loaded = load_for_engine(str(out), target=str(target), dtype="float32")
    assert (loaded.kind, loaded.layers) == (kind, teacher.shared.layers)
    text = torch.randint(VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        features, _ = teacher.read(text, teacher.shared.layers)
        states = plain.states(features, text, 3)
        wanted = [
            plain.of_target(plain.factors(s, at).logits()[0, -1]) for at, s in enumerate(states)
        ]
    # The last row of the plain head holds token 9 at step 0: it and those before it have features.
    given = [b"", *(row.numpy().tobytes() for row in features[0, :9])]
    others: Mapping[HeadKind, Any] = {
        HeadKind.MEDUSA: MedusaExecutor,
        HeadKind.DFLASH: DFlashExecutor,
    }
    executor = others.get(kind, EagleExecutor)(loaded, 64)
    tokens = text[0, :12].tolist()
    found = [executor.run(feed_of(tokens[:10], 0, given), (9,))[0]]
    for at in (10, 11):
        found.append(executor.run(feed_of(tokens[at : at + 1], at, [b""]), (0,))[0])
    for one, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-4)


def feed_of(tokens: list[int], start: int, features: list[bytes]) -> Feed:
    """Rows of a text from token `start` on."""
    places = tuple(range(start, start + len(tokens)))
    return Feed(
        tuple(tokens),
        places,
        places,
        start,
        (1,) if start else None,
        before=tuple(place - 1 for place in places),
        features=tuple(features),
    )


def test_bad_input_is_refused_in_a_line_before_anything_is_loaded(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(command, "_trained", None)
    usual = arguments_of(target, texts, HeadKind.EAGLE3, tmp_path / "head")

    def said(*more: object) -> str:
        return line_of(monkeypatch, capsys, *usual, *more)

    empty, binary, short = (tmp_path / name for name in ("empty.txt", "binary.txt", "short.txt"))
    empty.write_text("\n \n")
    binary.write_bytes(b"GIF8\0\0")
    short.write_text("one\ntwo\n")
    assert said("--prompt-file", empty) == f"--prompt-file: {empty} is empty; give a file with text"
    assert said("--prompt-file", binary) == f"--prompt-file: {binary} is no text (character 4)"
    binary.write_bytes(b"\xff\xfe")
    assert said("--prompt-file", binary) == f"{binary} is not UTF-8 (byte 0)"
    assert said("--prompt-file", short).startswith(
        f"--prompt-file: {short} has 6 tokens, and at least 64 are"
    )
    assert said("--prompt-file", tmp_path / "none").startswith(
        f"cannot read {tmp_path / 'none'}: No such"
    )
    assert said("--target", tmp_path / "none").startswith(f"{tmp_path / 'none'}: no such folder")
    assert said("--drafter", "models/drafter").startswith("--drafter: models/drafter has another")
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    elsewhere = "holds something else; name a new or empty folder"
    assert said("--out", other) == f"--out: {other} {elsewhere}"
    (other / command.DONE).write_text('{"epochs": 3}')  # another program's file of this name
    assert said("--out", other) == f"--out: {other} {elsewhere}"
    assert said("--out", short) == f"--out: {short} {elsewhere}"
    usage = command.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    assert " are needed and 0.0 GB are free on the disk of" in said()
    assert not (tmp_path / "head").exists()


def unfinished(
    monkeypatch: Patch, target: Path, texts: Path, kind: HeadKind, out: Path
) -> tuple[object, ...]:
    """Begin a short run and let it die; return the arguments with which it goes on."""
    usual = (*arguments_of(target, texts, kind, out), "--num-texts", 8, "--num-steps", 2)
    with monkeypatch.context() as patch:
        killing(patch, 3)
        with pytest.raises(Killed):
            call(patch, *usual)
    return usual


def test_room_that_an_unfinished_run_has_taken_is_not_asked_for_again(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "head"
    usual = unfinished(monkeypatch, target, texts, HeadKind.EAGLE3, out)
    (out / command.WORK / "more").write_bytes(bytes(5_000_000))
    usage = command.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage._replace(free=10))
    assert call(monkeypatch, *usual) == 0


def test_a_target_with_too_few_layers_has_no_features_for_eagle3(
    tmp_path: Path, target: Path, texts: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for path in target.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(command.folders.Checkpoint, "check_weights", lambda _: None)
    line = line_of(monkeypatch, capsys, *arguments_of(folder, texts, KINDS[0], tmp_path / "head"))
    assert line == f"{folder}: EAGLE-3 reads three layers, and it has 2; use --kind eagle"


def test_another_run_in_the_folder_is_named_and_left_alone(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    out = tmp_path / "head"
    usual = unfinished(monkeypatch, target, texts, HeadKind.EAGLE, out)
    line = line_of(monkeypatch, capsys, *usual, "--kind", "medusa")
    assert line == f"--out: {out} holds a run with another --kind; name another folder"
    assert call(monkeypatch, *usual) == 0
    capsys.readouterr()
    line = line_of(monkeypatch, capsys, *usual, "--as-is")
    assert line.startswith(f"--out: {out} holds a run with another --")


def test_a_full_disk_is_said_in_a_line_and_the_run_goes_on_later(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    out = tmp_path / "head"
    usual = arguments_of(target, texts, HeadKind.EAGLE3, out)
    usual = (*usual, "--num-texts", 8, "--num-steps", 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        line = line_of(monkeypatch, capsys, *usual)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == (
        f"cannot write {out / command.WORK}/checkpoint.safetensors: File too large; "
        "raise the limit of how long files may be (ulimit -f); then the same command goes on"
    )
    names = sorted(path.name for path in (out / command.WORK).iterdir())
    assert names == ["run.json", "texts-00000.safetensors"]
    assert call(monkeypatch, *usual) == 0


def test_texts_may_be_learned_as_they_are(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(train_heads, "writes", lambda _: lambda *_: written.append(1))
    usual = arguments_of(target, texts, HeadKind.EAGLE3, tmp_path / "head")
    assert call(monkeypatch, *usual, "--as-is", "--num-steps", 2) == 0
    assert not written


def test_a_prompt_is_a_short_text_or_a_piece_of_a_long_one_and_each_comes_once() -> None:
    short = [np.arange(5) + 10 * i for i in range(3)]
    long = np.arange(1000, 1400)
    texts = head_texts.Texts([*short, long], [short[0]], np.array([7]), None, "")
    num_units = 3 + len(long) // 100
    found = [texts.prompt(at, 101) for at in range(num_units)]
    assert sorted(len(one) for one in found) == [6] * 3 + [head_texts.PROMPT_LEN + 1] * 4
    assert all(one[0] == 7 for one in found)
    assert {one[1] // 1000 for one in found} == {0, 1}
    assert len({tuple(one) for one in found}) == num_units
    assert texts.prompt(3, 101, held_out=True).tolist() == [7, 0, 1, 2, 3, 4]


class Reached(Exception):
    """Training would begin now."""


def prompts_of(monkeypatch: Patch, *arguments: object) -> list[str]:
    """The first prompts that the command would have the target continue."""
    found: list[str] = []

    def trained(target: str, _revision: None, _plan: object, read: Texts, *_: object, **__: object):
        tokenization = Tokenization.of_model(target, None)
        assert tokenization is not None
        prompts = [read.prompt(at, 96).tolist() for at in range(4)]
        found.extend(tokenization.raw.decode(one, skip_special_tokens=False) for one in prompts)
        raise Reached

    with monkeypatch.context() as patch:
        patch.setattr(command, "_trained", trained)
        with pytest.raises(Reached):
            call(patch, *arguments)
    return found


def chatty(target: Path, folder: Path, template: str) -> Path:
    """A copy of the target that has a chat template."""
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_target_with_a_chat_template_answers_each_prompt_as_a_users_message(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    form = "<{{ messages[0].role }}>{{ messages[0].content | trim }}<assistant>"
    chat = chatty(target, tmp_path / "chat", form)
    usual = arguments_of(chat, texts, HeadKind.EAGLE, tmp_path / "head")
    bare = prompts_of(monkeypatch, *usual, "--no-chat-template", "--out", tmp_path / "bare")
    assert set(bare) < set(PROMPTS.split("\n"))
    assert prompts_of(monkeypatch, *usual) == [f"<user>{one}<assistant>" for one in bare]
    as_is = prompts_of(monkeypatch, *usual, "--as-is", "--out", tmp_path / "as-is")
    assert all(one in PROMPTS for one in as_is)
    # Of a prompt that does not fit a piece does; cut characters take more tokens than they had.
    texts.write_text("\n".join("é" * 200 + str(at) for at in range(80)))
    for one in prompts_of(monkeypatch, *usual, "--out", tmp_path / "long"):
        assert one.startswith("<user>")
        assert one.endswith("<assistant>")
        assert len(one.encode()) <= 96


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{{ raise_exception('begin with a system message') }}", "begin with a system message"),
        ("rule " * 30, "its chat template is 149 tokens long, and at most 96 fit"),
    ],
)
def test_a_chat_template_that_takes_no_prompt_is_named_with_the_flag_that_leaves_it_out(
    template: str,
    wrong: str,
    target: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    chat = chatty(target, tmp_path / "chat", template)
    usual = arguments_of(chat, texts, HeadKind.EAGLE, tmp_path / "head")
    line = line_of(monkeypatch, capsys, *usual)
    assert line.endswith(f": {wrong}; add --no-chat-template")
    assert not (tmp_path / "head").exists()
    assert len(prompts_of(monkeypatch, *usual, "--no-chat-template")) == 4


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "qwen3_moe", "gemma2", "cohere"])
def test_a_head_for_a_target_of_another_family_has_a_layer_of_a_llama(
    architecture: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    make_model(architecture, target, vocab=VOCAB_SIZE, scale=2.0)
    teacher = load_teacher(str(target), None, HeadKind.EAGLE3, dtype="float32", device="cpu")
    ids = torch.arange(teacher.shared.num_draft_tokens)
    head = new_head(HeadKind.EAGLE3, teacher.shared, ids)
    write_head(head, HeadKind.EAGLE3, teacher.shared, tmp_path)
    assert load_for_engine(str(tmp_path), target=str(target)).kind is HeadKind.EAGLE3
    with torch.inference_mode():
        text = teacher.write([np.array([5, 6, 7]), np.array([8, 9])], 8, teacher.noise([0, 1], 1))
        assert text.shape == (2, 8)
        various = torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
        lessons = Lessons(teacher, various)
    assert lessons.batch(np.array([0, 1]))[1].shape == (2, 12, 3 * 64)


def test_short_texts_are_read_as_far_as_they_go(target: Path) -> None:
    teacher = load_teacher(str(target), None, HeadKind.EAGLE3, dtype="float32", device="cpu")
    text = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    text[0, 20:], text[1, 28:] = ENDED, ENDED
    lessons = Lessons(teacher, text)
    for _ in range(2):  # read, and kept
        ids, features, p, counts = lessons.batch(np.array([0, 1]))
        shape = 2, 28 + train_heads.NUM_STEPS  # with room for the last token's chain
        assert ids.shape == p.shape[:2] == features.shape[:2] == counts.shape == shape
        assert counts.sum(dim=1).tolist() == [19, 27]
        alone = lessons.batch(np.array([0]))
        assert torch.equal(features[:1, :20], alone[1][:, :20])
        assert torch.equal(ids[:1, :20], alone[0][:, :20])
        with torch.no_grad():
            whole = teacher.read(text[1:, :28], (LAST,))[1].softmax(dim=-1)
        torch.testing.assert_close(p[1:, :28], whole, rtol=0.1, atol=1e-3)


def test_what_is_kept_in_memory_says_what_the_target_would_say_again(target: Path) -> None:
    teacher = load_teacher(str(target), None, HeadKind.EAGLE3, dtype="float32", device="cpu")
    text = torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = teacher.read(text, (LAST,))[1].softmax(dim=-1)
    # One whose logits do not follow from its features, as where a model scales them.
    scaled = replace(teacher, shared=replace(teacher.shared, output=3 * teacher.shared.output))
    for one, is_linear in ((teacher, True), (scaled, False)):
        lessons = Lessons(one, text)
        assert lessons.is_linear == is_linear
        some = Lessons(one, text, ids=torch.tensor([3, 5, 200]))
        for rows in ([0, 1], [0, 1], [1, 2]):
            _, features, p, _ = lessons.batch(np.array(rows))
            torch.testing.assert_close(p, want[rows], rtol=0.1, atol=1e-3)
            torch.testing.assert_close(some.batch(np.array(rows))[2], p[..., some.ids])
        assert sorted(lessons.kept) == ([0, 1, 2] if is_linear else [])
        assert torch.equal(features, Lessons(one, text).batch(np.array([2, 1]))[1].flip(0))


def test_a_head_can_be_used_whenever_a_run_is_stopped_and_is_looked_at_meanwhile(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    out, usual_advance, num_steps = tmp_path / "head", train_heads.Run.advance, 0

    def advance(self: train_heads.Run, *arguments: object) -> float:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise KeyboardInterrupt
        return usual_advance(self, *arguments)

    usual = arguments_of(target, texts, HeadKind.EAGLE3, out)
    usual = [*usual, "--num-texts", 16, "--num-steps", 5, "--draft-vocab-size", 40]
    with monkeypatch.context() as patch:
        patch.setattr(train_heads.Run, "advance", advance)
        patch.setattr(train_heads, "CHECKPOINT_S", 1e9)
        patch.setattr(train_heads, "WATCH_S", 0.0)
        assert call(patch, *usual) != 0
    said = capsys.readouterr().err
    assert f"{out} holds the head as far as it was trained, and can be used" in said
    assert said.count("% of first drafts right") == 3
    head = load_for_engine(str(out), target=str(target))
    assert (head.kind, head.vocab_size) == (HeadKind.EAGLE3, VOCAB_SIZE)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 40
    assert call(monkeypatch, *usual) == 0, "the same command goes on"
    assert (out / command.DONE).exists()


def test_only_eagle3_has_fewer_tokens_than_its_target(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    usual = arguments_of(target, texts, HeadKind.MEDUSA, tmp_path / "head")
    line = line_of(monkeypatch, capsys, *usual, "--draft-vocab-size", 40)
    assert line.startswith("--draft-vocab-size: a head of the kind medusa can draft every token")


def test_how_good_a_head_is_counts_drafts_that_are_right_in_a_row(target: Path) -> None:
    teacher = load_teacher(str(target), None, HeadKind.EAGLE3, dtype="float32", device="cpu")
    prompts = [np.array([5, 6, 7]), np.array([8, 9])]
    watched = Watched(teacher, prompts, 24)
    written = watched._text

    class Knows:
        """A head whose first three drafts are right, and whose fourth never is."""

        def states(self, features: torch.Tensor, text: torch.Tensor, num_steps: int) -> Any:
            return list(range(num_steps)) and [
                text[:, 2 + step : 2 + step + text.shape[1] - num_steps]
                for step in range(num_steps)
            ]

        def factors(self, state: torch.Tensor, step: int) -> Any:
            said = torch.nn.functional.one_hot((state + (step == 3)) % VOCAB_SIZE, VOCAB_SIZE)
            return SimpleNamespace(logits=lambda: said.float())

        def of_target(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

    assert written.shape == (2, 24)
    assert watched.quality(Knows()) == Quality(1.0, 4.0)  # type: ignore[arg-type]


def test_no_step_is_made_of_numbers_that_are_not_finite(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(train_heads, "chain_loss", lambda *_: torch.tensor(float("nan")))
    usual = arguments_of(target, texts, HeadKind.EAGLE3, tmp_path / "head")
    line = line_of(monkeypatch, capsys, *usual, "--num-texts", 8, "--num-steps", 2)
    assert line == "step 0: the loss is not finite; try --dtype float32"


def test_a_target_that_takes_too_few_tokens_is_refused(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(train_heads, "WINDOW", 2048)
    usual = arguments_of(target, texts, HeadKind.EAGLE3, tmp_path / "head")
    line = line_of(monkeypatch, capsys, *usual)
    assert line == f"{target}: it takes 1024 tokens, and training needs 2048; use another target"
    assert not (tmp_path / "head").exists()


def test_a_lack_of_memory_is_said_in_a_line(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_heads, "chain_loss", too_much)
    usual = arguments_of(target, texts, HeadKind.EAGLE3, tmp_path / "head")
    line = line_of(monkeypatch, capsys, *usual, "--num-texts", 8, "--num-steps", 2)
    assert line.startswith(f"{target}: not enough memory on cpu to train this head; ")


def test_without_a_terminal_a_line_now_and_then_says_what_is_left(
    monkeypatch: Patch, capsys: Capture
) -> None:
    clock = iter((0.0, 60.0, 120.0, 180.0))
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    screen = command.Screen(command.Console(stderr=True, force_terminal=False))
    screen.say(train_heads.Report("steps", 10, 0.25, 5.0))
    screen.say(train_heads.Report("steps", 20, 0.5, 4.0))
    screen.say(train_heads.Report("steps", 41, 1.01, 3.0))
    assert capsys.readouterr().err.splitlines() == [
        "10 steps, loss 5.00",
        "20 steps, loss 4.00, about 2.0 minutes left of this part",
        "41 steps, loss 3.00, about 0.0 minutes left of this part",
    ]
