"""What the files for `ray up` leave on a host, in a home of its own."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proto.installation import ROOT

NAMES = ("cluster.yaml", "cluster-cloud.yaml")
# A host that puts a Python and a `ray` of its own in front.
BASHRC = "case $- in *i*) ;; *) ;; esac\nexport PATH=$HOME/pyenv:$PATH\n"


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return config


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home with two programs called `ray`."""
    for folder in ("slipstream/.venv/bin", "pyenv"):
        (tmp_path / folder).mkdir(parents=True)
        program = tmp_path / folder / "ray"
        program.write_text(f"#!/bin/sh\necho {folder} $RAY_AUTH_MODE $1\n")
        program.chmod(0o755)
    (tmp_path / ".bashrc").write_text(BASHRC)
    (tmp_path / ".bashrc").chmod(0o600)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    (tmp_path / ".ray" / "auth_token").chmod(0o644)
    return tmp_path


def run(home: Path, command: str) -> str:
    """What a command says in a shell that has read .bashrc."""
    done = subprocess.run(
        ["bash", "-c", f". ~/.bashrc; {command}"],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "10.0.0.1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout


def set_up(home: Path, name: str) -> None:
    for command in read(name)["setup_commands"]:
        if "make setup" not in command:
            run(home, command)


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_s_own_ray_is_started_whatever_else_is_in_front(
    home: Path, name: str
) -> None:
    set_up(home, name)
    config = read(name)
    assert run(home, "ray x") == "pyenv token x\n"
    for role in ("head", "worker"):
        said = [run(home, command) for command in config[f"{role}_start_ray_commands"]]
        assert said == [f"slipstream/.venv/bin token {word}\n" for word in ("stop", "start")]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_how_to_take_away_what_a_set_up_leaves(home: Path, name: str) -> None:
    set_up(home, name)
    set_up(home, name)  # as by a second `ray up`
    lines = (home / ".bashrc").read_text().splitlines()
    assert len(lines) == 2 + len(BASHRC.splitlines())
    assert (home / ".bashrc").stat().st_mode & 0o777 == 0o600, "as it was"
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    page = (ROOT / "docs" / "cluster.md").read_text()
    found = re.search(r"ssh USER@HOST '(.*?)'\n", page, re.DOTALL)
    assert found is not None
    run(home, f"cd; {found[1]}")
    assert (home / ".bashrc").read_text() == BASHRC
    assert sorted(one.name for one in home.iterdir()) == [".bashrc", ".ray", "pyenv"]
    assert not list((home / ".ray").iterdir())


def test_every_command_of_the_page_for_a_host_names_the_environment_s_programs() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    commands = re.findall(r"ray exec (?:--tmux )?deploy/cluster.yaml '(.*?)'", page)
    assert len(commands) == 3
    for command in commands:
        assert re.search(r"\.venv/bin/(python|ray) ", command), command
