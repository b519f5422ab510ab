"""Every command of the README and of the page on choosing a pair works as it stands there.

What the toy models write in README's example reads well, too, and comes with fewer passes than
tokens.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

pytestmark = [pytest.mark.process, pytest.mark.long]

PAGES = ("README.md", "docs/choosing.md")
PYTHON = ".venv/bin/python"
# What a reader puts there.
PLACES = {"LARGE": "models/target", "SMALL": "models/drafter"}
PROMPTS = "lab/experiments/prompts.jsonl"
# To make it short, by command; what a person types into it.
SHORTER = {
    "generate": ("--max-tokens", "8"),
    "chat": ("--max-tokens", "8"),
    "experiment": ("--limit", "1", "--repetitions", "1", "--set", "max_tokens=8"),
}
TYPED = {"chat": "Hello\n"}
# Minutes; in CI `test_lossless` checks a pair, and tests/lab/pair measures one.
SLOW = ("experiment", "verify-lossless", "measure")
TESTBEDS = "testbeds/"  # the folder of what one command makes and another uses: 0.9 GB
LIMIT_S = 900


@pytest.fixture(scope="module")
def made_beds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are made here."""
    return tmp_path_factory.mktemp("testbeds")


def commands() -> list[str]:
    """All that is indented and begins like a command."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found += re.findall(rf"^    ((?:{re.escape(PYTHON)}|make) [^\n]*)$", text, re.MULTILINE)
    return list(dict.fromkeys(line.split("  #")[0].rstrip() for line in found))


def marked(line: str) -> object:
    is_slow = any(f"coordinator {name}" in line for name in SLOW) or TESTBEDS in line
    return pytest.param(line, marks=pytest.mark.slow if is_slow else ())


def test_there_are_commands() -> None:
    assert any(line.startswith("make ") for line in commands())
    assert sum(PYTHON in line for line in commands()) >= 6


@pytest.mark.parametrize("line", [marked(line) for line in commands()])
def test_a_command_of_the_documentation_works(line: str, tmp_path: Path, made_beds: Path) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        check_recipe(words[1])
        return
    for name, instead in PLACES.items():
        words = [re.sub(rf"\b{name}\b", str(ROOT / instead), word) for word in words]
    words = [re.sub(f"^{TESTBEDS}", f"{made_beds}/", word) for word in words]
    words = [str(ROOT / PROMPTS) if word == "PROMPTS.jsonl" else word for word in words]
    assert words[:3] == [PYTHON, "-m", "coordinator"]
    name = words[3]
    arguments = [*words[1:], *SHORTER.get(name, ())]
    if name == "experiment":
        arguments += ["--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        input=TYPED.get(name, ""),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_toys_text_in_the_readme_reads_well_and_gains() -> None:
    """It ends by itself and no line comes twice; drafts are accepted."""
    words = shlex.split(next(line for line in commands() if " --target toy " in line))
    done = subprocess.run(
        [sys.executable, *words[1:], "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    text = json.loads(done.stdout)
    assert text["finish_reason"] == "stop"
    said = [line for line in text["text"].splitlines() if len(line.strip()) > 8]
    assert len(said) >= 8
    assert len(set(said)) == len(said)
    metrics = text["metrics"]
    assert metrics["num_tokens"] > 2 * metrics["num_target_passes"]
    assert metrics["acceptance_rate"] > 0.35  # .57 on idle cores, and less on busy ones


def check_recipe(name: str) -> None:
    """`make` knows it, and it would run modules that are there."""
    done = subprocess.run(
        ["make", "-n", name], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    modules = re.findall(r"-m (\w[\w.]*)", done.stdout)
    ours = [module for module in modules if (ROOT / module.replace(".", "/")).exists()]
    assert ours or "pytest" in modules, done.stdout
