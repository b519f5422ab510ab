"""The benchmark: what it takes of a file, and what it refuses before anything is started."""

import sys
from pathlib import Path

import pytest

from coordinator.cli.app import EXIT_USAGE, command_line, run
from deploy.experiments.arms import spread
from deploy.experiments.bench import bench


def test_prompts_are_taken_from_all_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{number}\n" for number in range(10)))
    assert spread(path, 3) == ["0", "3", "6"]
    assert spread(path, 10) == spread(path, 99) == [str(number) for number in range(10)]


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        (
            b"\xff",
            ["--num-prompts", "0"],
            "error: Invalid value for '--num-prompts': Input should be greater",
        ),
        (
            b"\xff",
            ["--max-tokens", "0"],
            "error: Invalid value for '--max-tokens': Input should be greater",
        ),
        (
            b"\xff",
            ["--repetitions", "0"],
            "error: Invalid value for '--repetitions': Input should be greater",
        ),
        (
            b"\xff",
            ["--temperature", "-1"],
            "error: --temperature: Input should be greater than or equal",
        ),
        (b"\xff", [], "error: {path} is not UTF-8 (byte 0)"),
        (b"a\nb\n", ["--num-prompts", "3"], "error: {path} has 2 prompts, 3 are wanted"),
    ],
)
def test_a_benchmark_that_cannot_work_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes,
    options: list[str],
    line: str,
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "--prompt-file", str(path), *options])
    assert run(command_line([bench])) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(line.format(path=path))
