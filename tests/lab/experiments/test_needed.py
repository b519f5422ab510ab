"""An experiment says what it lacks before it computes anything."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab import needed
from lab.experiments import command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the results. It is a failure to measure anything."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(command, "_measure", measured)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["python -m coordinator", "experiment", "policies", *options])
    return run(command_line([command.experiment]))


@pytest.mark.parametrize("package", ["scipy", "matplotlib"])
def test_a_missing_package_is_named_before_anything_is_measured(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == package else find(name)

    monkeypatch.setattr(needed, "find_spec", without)
    assert experiment(monkeypatch) == EXIT_USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: experiment needs the package `{package}`, which comes with ")
    assert said.endswith("or measure with --texts-only and write the tables elsewhere")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("flag", ["--report", "--predict"])
def test_a_flag_for_results_contradicts_texts_only(
    flag: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experiment(monkeypatch, "--texts-only", flag) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said == f"error: --texts-only writes no results, so leave out {flag}\n"
    assert list(folder.iterdir()) == []
