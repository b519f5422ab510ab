"""A testbed says what its source says, and what cannot be made is refused in a line."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from typer.testing import CliRunner

from coordinator.cli.app import EXIT_FAILED, EXIT_USAGE, command_line, run
from lab.testbeds import command as module
from lab.testbeds.shapes import LIKE, Like, Published, num_held, num_read
from proto.installation import MODELS
from tests.tiny_models import make_model

NUM_TOKENS = 128
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, 64 wide."""
    return make_model("llama", tmp_path_factory.mktemp("source"))


def make_bed(monkeypatch: Patch, *arguments: object) -> int:
    """The exit status of the command."""
    monkeypatch.setattr("sys.argv", ["slipstream", "testbed", *map(str, arguments)])
    return run(command_line([module.testbed]))


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """What it writes in float32."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def test_four_times_the_layers_and_twice_the_width_say_the_same(
    source: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    out = tmp_path / "bed"
    sizes = ("--num-hidden-layers", 12, "--hidden-size", 128)
    assert make_bed(monkeypatch, "--target", source, "--out", out, *sizes) == 0
    said = capsys.readouterr().out
    config = json.loads((out / "target" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (12, 128)
    tokens = greedy(out / "target", [3, 4, 5])
    assert tokens == greedy(source, [3, 4, 5])
    assert len(set(tokens)) > 20
    assert f"--target {out}/target" in said
    weights = [load_file(path) for path in (out / "target").glob("*.safetensors")]
    num_parameters = sum(tensor.numel() for file in weights for tensor in file.values())
    assert f"bed/target: {num_parameters / 1e6:.1f} M parameters in float32" in said
    assert "12 layers,\n  128 wide, 4 heads of 16, 2 key and value heads" in said
    assert {path.name for path in out.iterdir()} == {"target"}


@pytest.mark.long
def test_the_embedded_target_says_the_same_in_a_larger_shape(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "bed"
    sizes = ("--num-hidden-layers", 32, "--hidden-size", 768, "--dtype", "float32")
    assert make_bed(monkeypatch, "--out", out, *sizes) == 0
    prompt = hf.AutoTokenizer.from_pretrained(MODELS / "target")(
        "def read_lines(path):\n"
    ).input_ids
    tokens = greedy(out / "target", prompt)
    assert tokens == greedy(MODELS / "target", prompt)


def plan_of(name: Like) -> module.PlannedModel:
    return module._plan(MODELS / "target", Path("/none"), name, module.Sizes(), None)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.23),
        ("llama-3.2-3b", 3.2),
        ("llama-3.1-8b", 7.5),
        ("llama-3.1-70b", 69.5),
        ("llama-3.1-405b", 404),
        ("qwen3-0.6b", 0.596),
        ("qwen3-32b", 32.0),
    ],
)
def test_a_pass_reads_as_much_as_one_of_the_model_that_it_is_like(
    name: Like, billions: float
) -> None:
    """Of a head that is not tied the embeddings are not read."""
    plan = plan_of(name)
    assert plan.num_parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert plan.num_bytes == 2 * plan.num_parameters
    assert plan.making_bytes < (17e9 if billions < 100 else 60e9)
    assert max(map(len, plan.words.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("qwen3-0.6b", 0.596),
        ("qwen3-32b", 32.762),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(
    name: Published, billions: float
) -> None:
    assert num_held(name) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert num_read(name) / 1e9 == pytest.approx(plan_of(name).num_parameters / 1e9, rel=0.02)


def test_a_folder_with_something_in_it_is_left_alone(
    source: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    before = sorted(source.iterdir())
    assert make_bed(monkeypatch, "--like", "llama-3.2-1b", "--out", source) == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"error: --out: {source} exists and is not empty; name another folder\n"
    )
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "give --like (0.5b, llama-3.2-1b"),
        (["--hidden-size", "60"], "hidden_size is 60, but the source has 64: models grow"),
        (["--num-attention-heads", "7"], "num_heads is 7, which is no multiple of num_kv_heads"),
        (["--head-dim", "24"], "head_dim is 24, which is no multiple of the source's 16"),
        (["--like", "gpt-5"], "--like: expected one of 0.5b, llama-3.2-1b, "),
        (["--like", "llama-3.2-1b", "--target", "/none"], "/none: no config.json"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(
    options: list[str],
    why: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    out = tmp_path / "bed"
    assert make_bed(monkeypatch, "--target", source, "--out", out, *options) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert why in line
    assert not out.exists()


def test_what_has_no_room_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable: 900000 kB\n")
    monkeypatch.setattr(module, "MEMORY", memory)
    arguments = ("--like", "llama-3.2-1b", "--out", tmp_path / "bed")
    assert make_bed(monkeypatch, *arguments) == EXIT_USAGE
    shown = capsys.readouterr()
    assert "20 layers (4 of them in place of a larger head)" in shown.out
    assert "of memory, and 0.9 GB are available; choose a smaller shape" in shown.err
    memory.write_text("MemAvailable: 3000000 kB\n")
    warned: list[str] = []
    module.check_room([plan_of("llama-3.2-1b")], tmp_path, warned.append)
    assert len(warned) == 1
    assert warned[0].startswith("warning: 3.1 GB of memory are available here")
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    assert make_bed(monkeypatch, *arguments) == EXIT_USAGE
    assert "2.4 GB are needed and 1.0 GB are free on the disk of" in capsys.readouterr().err
    assert not (tmp_path / "bed").exists()


def test_nothing_is_left_where_writing_fails(
    source: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        sizes = ("--num-hidden-layers", 12)
        status = make_bed(monkeypatch, "--target", source, "--out", tmp_path / "bed", *sizes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path}/bed/target: ")
    assert line.endswith("; is the disk full?")
    assert not (tmp_path / "bed" / "target").exists()


def test_the_help_names_the_shapes() -> None:
    shown = CliRunner().invoke(command_line([module.testbed]), ["testbed", "--help-all"]).output
    assert all(name in " ".join(shown.split()) for name in LIKE)
