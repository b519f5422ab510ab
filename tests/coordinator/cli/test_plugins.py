"""Commands that other distributions bring: they are there, or one line says what to do."""

import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import plugins
from coordinator.cli.app import EXIT_USAGE, command_line, run
from coordinator.cli.plugins import COMMAND_GROUP, COMMANDS, LAB, Absent
from coordinator.launching.launcher import Wanted
from proto.errors import ConfigurationError
from proto.installation import ROOT, program

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
OF_LAB = [name for name, brought_by in COMMANDS.items() if brought_by == LAB]


def installed(patch: Patch, **given: Any) -> None:
    """Only these distributions are there: by name, with `_` for `-`, version and entry points."""

    def find(name: str) -> SimpleNamespace:
        found = given.get(name.replace("-", "_"))
        if found is None:
            raise PackageNotFoundError(name)
        version, points = found
        made = [EntryPoint(name, value, COMMAND_GROUP) for name, value in points.items()]
        return SimpleNamespace(version=version, entry_points=EntryPoints(made))

    patch.setattr(plugins, "distribution", find)


def said(patch: Patch, capture: Capture, *arguments: str) -> str:
    """What a command line that is refused says: one line."""
    patch.setattr(sys, "argv", ["coordinator", *arguments])
    assert run(command_line(plugins.commands()), plugins.connect_ray) == EXIT_USAGE
    out, err = capture.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return str(line)


def module(patch: Patch, folder: Path, text: str) -> dict[str, str]:
    """The entry points of a lab whose module is this text."""
    (folder / "a_lab_of_tests.py").write_text(text)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, "a_lab_of_tests", raising=False)
    return dict.fromkeys(OF_LAB, "a_lab_of_tests:command")


# -- where all is installed ------------------------------------------------------------------------


def test_every_command_of_the_table_is_there_and_named_like_its_function() -> None:
    found = plugins.commands()
    names = [one.__name__.replace("_", "-") for one in found if not isinstance(one, Absent)]
    assert names == list(COMMANDS)


def test_the_projects_state_the_entry_points_of_the_table() -> None:
    stated = {
        name: project["name"]
        for path in ("pyproject.toml", "lab/pyproject.toml")
        for project in [tomllib.loads((ROOT / path).read_text())["project"]]
        for name in project["entry-points"][COMMAND_GROUP]
    }
    assert stated == COMMANDS
    assert len(OF_LAB) == 7


# -- where something is not ------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--like", "a", "-x", "b", "--", "c")])
@pytest.mark.parametrize("name", OF_LAB)
def test_without_the_lab_each_of_its_commands_says_what_brings_it(
    monkeypatch: Patch, capsys: Capture, name: str, arguments: tuple[str, ...]
) -> None:
    installed(monkeypatch, slipstream=("1.2", {}))
    assert said(monkeypatch, capsys, name, *arguments) == (
        f"error: `{name}` comes with slipstream-lab, which is not here; run `make setup`"
    )
    monkeypatch.setattr(plugins, "IS_CHECKOUT", False)
    assert said(monkeypatch, capsys, name, *arguments) == (
        f"error: `{name}` comes with slipstream-lab, which is not here; "
        f"run `{sys.executable} -m pip install 'WHEEL'` "
        "(WHEEL: the path of the wheel of slipstream-lab 1.2)"
    )


def test_a_lab_of_another_version_is_not_run(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    points = module(monkeypatch, tmp_path, "raise AssertionError('it was loaded')")
    installed(monkeypatch, slipstream=("1.2", {}), slipstream_lab=("1.1", points))
    assert said(monkeypatch, capsys, "plan") == (
        "error: `plan`: slipstream-lab 1.1 is here beside slipstream 1.2; run `make setup`"
    )


def test_an_older_installation_that_lacks_a_command_says_so(
    monkeypatch: Patch, capsys: Capture
) -> None:
    installed(monkeypatch, slipstream=("1.2", {}), slipstream_lab=("1.2", {}))
    assert said(monkeypatch, capsys, "measure") == (
        "error: `measure` is not in the slipstream-lab that is here; run `make setup`"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("command = ", "SyntaxError: invalid syntax (a_lab_of_tests.py, line 1)"),
        ("raise RuntimeError('in two\\nlines')", "RuntimeError: in two lines"),
        ("", "AttributeError: module 'a_lab_of_tests' has no attribute 'command'"),
    ],
)
def test_a_lab_that_cannot_be_loaded_takes_nothing_else_away(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, text: str, why: str
) -> None:
    points = module(monkeypatch, tmp_path, text)
    installed(monkeypatch, slipstream=("1.2", {}), slipstream_lab=("1.2", points))
    assert said(monkeypatch, capsys, "plan") == (
        f"error: `plan` of slipstream-lab cannot be loaded ({why}); run `make setup`"
    )
    shown = CliRunner().invoke(command_line(plugins.commands()), ["generate", "--help"])
    assert shown.exit_code == 0


def test_lack_of_memory_is_no_fault_of_a_plugin(monkeypatch: Patch, tmp_path: Path) -> None:
    points = module(monkeypatch, tmp_path, "raise MemoryError")
    installed(monkeypatch, slipstream=("1.2", {}), slipstream_lab=("1.2", points))
    with pytest.raises(MemoryError):
        plugins.commands()


def test_where_nothing_was_installed_the_setup_is_asked_for(
    monkeypatch: Patch, capsys: Capture
) -> None:
    installed(monkeypatch)
    for name in COMMANDS:
        assert said(monkeypatch, capsys, name) == (
            f"error: `{name}` is found only where Slipstream is installed; run `make setup`"
        )
    with pytest.raises(ConfigurationError, match=r"^--ray is found only where .*`make setup`$"):
        plugins.connect_ray(Wanted("auto", {}))
    assert plugins.version() == "unknown"


# -- the help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_help_lists_what_is_there_and_says_below_what_brings_the_others(
    monkeypatch: Patch, width: int
) -> None:
    shown = help_of(width)
    assert "More commands" not in shown
    assert all(f"│ {name} " in shown for name in COMMANDS)
    own = {"verify-lossless": "rehearsal.lossless.command:verify_lossless"}
    installed(monkeypatch, slipstream=("1.2", own))
    shown = help_of(width)
    assert max(map(len, shown.splitlines())) <= width
    listed, _, closing = shown.rpartition("╯")
    assert not any(f"│ {name} " in listed for name in OF_LAB)
    assert "│ verify-lossless " in listed
    assert " ".join(closing.split()) == f"More commands come with {LAB}: {', '.join(OF_LAB)}."


def help_of(width: int) -> str:
    """The help of the program at this width of the terminal."""
    app = command_line(plugins.commands())
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": str(width)}, prog_name=program())
    assert done.exit_code == 0
    return done.output


def test_a_misspelt_command_of_the_lab_is_answered_with_its_name(
    monkeypatch: Patch, capsys: Capture
) -> None:
    installed(monkeypatch, slipstream=("1.2", {}))
    assert "did you mean experiment?" in said(monkeypatch, capsys, "experimant")


def test_the_version_is_that_of_the_product(monkeypatch: Patch) -> None:
    installed(monkeypatch, slipstream=("1.2", {}), slipstream_lab=("1.1", {}))
    assert plugins.version() == "1.2"
