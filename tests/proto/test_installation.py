"""A Python that cannot run Slipstream says so in a line, whichever part of it is started."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from proto import installation
from proto.installation import COORDINATOR, NODE, refusal

ROOT = Path(__file__).resolve().parents[2]
# What an old Python reads before it is asked how old it is.
READ_BEFORE = (
    *("proto/__init__.py", "proto/installation.py", "proto/memory.py"),
    "coordinator/__init__.py",
    *("coordinator/__main__.py", "coordinator/cli/__init__.py", "coordinator/cli/process.py"),
    "coordinator/cli/first_line.py",
    *("node/__init__.py", "node/starting.py", "node/ending.py"),
    *("engine/__init__.py", "engine/leftovers.py"),
    *("target_node/__init__.py", "target_node/__main__.py"),
    *("drafter_node/__init__.py", "drafter_node/__main__.py", "slipstream/__init__.py"),
    *("slipstream/__main__.py", "slipstream/command.py", "slipstream/finding.py"),
)


@pytest.mark.parametrize("program", ["coordinator", "slipstream", "target_node", "drafter_node"])
def test_a_python_without_the_packages_is_told_what_to_type_in_a_line(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", program, "--version"],  # -S: without its packages
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: this Python ({sys.executable}) lacks msgpack, zmq, ty")
    assert done.stderr.endswith(f"use .venv/bin/python -m {program}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "program",
    [
        *("lab.testbeds.inflate", "lab.pictures", "lab.gpu_kit", "lab.gpu_kit.pack"),
        *("lab.measure.placements", "lab.measure.round_files"),
        *("lab.measure.serving", "lab.measure.soak"),
        *("tests.hostile", "tests.simulation", "tests.simulation.pauses"),
    ],
)
def test_every_other_program_says_it_too(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", program, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: this Python ({sys.executable}) lacks msgpack, zmq, ty")
    assert done.stderr.endswith(f"use .venv/bin/python -m {program}\n")
    assert done.stderr.count("\n") == 1


def test_who_imports_a_package_with_programs_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    installation.check_programs(("no_such_package",))  # the test itself is no such program
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "lab.pictures"])
    with pytest.raises(SystemExit):
        installation.check_programs(("no_such_package",))


def test_a_program_of_somebody_else_is_told_it_as_the_reason_of_an_import_error() -> None:
    code = "from slipstream import LLM"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: this Python ({sys.executable}) lacks msgpack, zmq, typer")
    assert last.endswith("use .venv/bin/python")


def test_this_python_can_run_it_and_an_older_one_is_told_which_is_needed() -> None:
    assert refusal("coordinator", COORDINATOR) == refusal("target_node", NODE) == ""
    line = refusal("coordinator", COORDINATOR, (3, 9))
    assert "is version 3.9, and 3.11 or later is needed; " in line


def test_another_system_than_linux_is_refused_in_a_line() -> None:
    line = refusal("coordinator", COORDINATOR, platform="darwin")
    assert line == "Slipstream runs on Linux only, and this system is darwin"


def test_what_lacks_packages_and_is_no_checkout_is_told_to_install_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installation, "IS_CHECKOUT", False)
    monkeypatch.setattr(installation, "_installed_from", lambda: "/there/it is.whl")
    line = refusal("slipstream", ("no_such_package",))
    assert line == (
        f"this Python ({sys.executable}) lacks no_such_package; "
        f"run `{sys.executable} -m pip install '/there/it is.whl'`"
    )
    assert installation.missing("ray", "ray") == (
        "the package `ray`, which comes with the extra `ray`; "
        f"run `{sys.executable} -m pip install '/there/it is.whl[ray]'`"
    )
    monkeypatch.setattr(installation, "_installed_from", str)
    assert installation.missing("ray", "ray") == (
        "the package `ray`, which comes with the extra `ray`; "
        f"run `{sys.executable} -m pip install 'PATH-OR-WHEEL[ray]'` "
        "(PATH-OR-WHEEL: a checkout of Slipstream, or its wheel)"
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ('{"url": "file://HERE/a%20b.whl", "archive_info": {}}', "HERE/a b.whl"),
        ('{"url": "file://HERE/gone.whl", "archive_info": {}}', ""),
        ('{"url": "https://example.org/a%20b.whl", "archive_info": {}}', ""),
        ("no JSON", ""),
        (None, ""),
    ],
)
def test_what_it_was_installed_from_is_named_where_it_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str | None, expected: str
) -> None:
    (tmp_path / "a b.whl").touch()

    class Told:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return stated and stated.replace("HERE", str(tmp_path))

    monkeypatch.setattr(metadata, "distribution", lambda name: {"slipstream": Told()}[name])
    assert installation._installed_from() == expected.replace("HERE", str(tmp_path))


def test_no_message_names_a_package_of_ours_for_pip_alone() -> None:
    """An index may have a stranger's under that name."""
    install = r"(?:pip3? install|pipx (?:install|run)|uv add|uvx)\b"
    bare = re.compile(install + r"[^\n`]*\s['\"`]?slipstream(?:[_-]lab)?(?:\[|==|['\"`\s]|$)")
    hidden = (".", "tests", "results")
    tops = [one for one in ROOT.iterdir() if not one.name.startswith(hidden)]
    inside = [path for top in tops if top.is_dir() for path in top.rglob("*")]
    kinds = (".py", ".md", ".toml", ".yaml", ".service", ".js", ".html", "")
    files = [one for one in (*tops, *inside) if one.suffix in kinds and one.is_file()]
    assert len(files) > 400
    found = [bare.search(one.read_text("utf-8", errors="replace")) for one in files]
    assert [one.group(0) for one in found if one] == []
    for command in (
        "pip install slipstream",
        "`pip install -U 'slipstream[serve]'`",
        "uvx slipstream",
    ):
        assert bare.search(command), command


def test_the_setup_is_asked_for_where_there_has_been_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    line = refusal("coordinator", ("no_such_package",))
    assert "lacks no_such_package; run `make setup` in " in line
    assert line.endswith(f", then use {tmp_path}/.venv/bin/python -m coordinator")
    monkeypatch.chdir(tmp_path)
    line = refusal("coordinator", ("no_such_package",))
    assert line.endswith("; run `make setup`, then use .venv/bin/python -m coordinator")
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    line = refusal("coordinator", ("no_such_package",))
    assert line.endswith("no_such_package; use .venv/bin/python -m coordinator")
    monkeypatch.setattr(sys, "prefix", str(own.parents[1]))  # a setup that was cut short
    assert "run `make setup`, then" in refusal("coordinator", ("no_such_package",))


@pytest.mark.parametrize("name", READ_BEFORE)
def test_an_old_python_can_read_what_it_reads_before_it_is_asked(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(), feature_version=(3, 6))
    # Syntax that was there before what it does: such a type is made when the file is read.
    annotations = [
        *(node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)),
        *(node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)),
    ]
    assert tree.body
    named = ("finding", "installation", "process", "memory", "starting", "ending", "leftovers")
    if any(read in name for read in named):
        assert not any(isinstance(one, ast.BinOp | ast.Subscript) for one in annotations)


def test_all_that_is_looked_for_is_among_the_dependencies() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[^a-z0-9-]", one.lower())[0] for one in stated}
    owners = packages_distributions()
    for package in (*COORDINATOR, *NODE):
        assert {owner.lower().replace("_", "-") for owner in owners[package]} & names, package


# -- the program's name ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "program", "node"),
    [
        (
            ["python", "-m", "coordinator", "status"],
            "python -m coordinator",
            "python -m target_node",
        ),
        (
            [".venv/bin/python", "-X", "dev", "-m", "coordinator", "-m", "a"],
            ".venv/bin/python -m coordinator",
            ".venv/bin/python -m target_node",
        ),
        (["python3", "-m", "slipstream"], "python3 -m slipstream", "python3 -m target_node"),
        (
            ["/elsewhere/python", "-m", "coordinator"],
            "python -m coordinator",
            "python -m target_node",
        ),
        (
            [f"{ROOT}/.venv/bin/python", "-m", "lab.experiments", "experiment"],
            ".venv/bin/python -m lab.experiments",
            ".venv/bin/python -m target_node",
        ),
        (["python", "-m", "target_node"], "python -m coordinator", "python -m target_node"),
        (["python", "-m", "pytest"], "python -m coordinator", "python -m target_node"),
        (["python", "script.py", "-m", "x"], "python -m coordinator", "python -m target_node"),
        (["python", "-c", "pass"], "python -m coordinator", "python -m target_node"),
        ([], "python -m coordinator", "python -m target_node"),
        (["/v/python", "/found/slipstream", "chat", "-m", "a"], "slipstream", "slipstream-target"),
        (["/v/python", "/found/slipstream-drafter"], "slipstream", "slipstream-target"),
        (
            ["/v/python", ".venv/bin/slipstream", "chat"],
            ".venv/bin/slipstream",
            ".venv/bin/slipstream-target",
        ),
        (["/v/python", "/other/slipstream"], "slipstream", "slipstream-target"),
    ],
)
def test_the_program_is_named_as_it_was_called(
    called: list[str], program: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "orig_argv", called)
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/found/{name}")
    assert installation.program() == program
    assert installation.node_program("target") == node


def test_where_a_wheel_is_installed_the_program_is_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installation, "IS_CHECKOUT", False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "my_program.py"])
    assert installation.program() == "slipstream"
    assert installation.node_program("drafter") == "slipstream-drafter"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "slipstream", "serve"])
    assert installation.program() == "python -m slipstream"
    assert installation.node_program("drafter") == "slipstream-drafter"


DOCUMENTED = ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


def test_no_message_names_the_program_by_itself() -> None:
    """What people read asks `installation.program`; only docstrings and comments may name it."""
    for package in ("coordinator", "proto", "node", "rehearsal", "deploy", "lab", "engine"):
        for path in (ROOT / package).rglob("*.py"):
            if path == Path(installation.__file__):
                continue
            tree = ast.parse(path.read_text("utf-8"))
            docstrings = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
            }
            said = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
                and re.search(
                    r"python3? -m (coordinator|target_node|drafter_node)\b(?!\.)", node.value
                )
            ]
            assert said == [], path
