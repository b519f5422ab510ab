"""What a newcomer sees first: `make demo`, and what `generate` says around a text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process, pytest.mark.really, pytest.mark.long]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_demo_ends_with_what_drafts_brought_and_that_the_text_is_the_same() -> None:
    done = run("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d x plain, text identical", lines[-1])
    assert "\x1b" not in done.stdout
    alone, drafted = done.stdout.split("The same with drafts")
    # Whatever the timing, some of the first tokens are the target's own.
    assert "{+" in drafted
    shown = re.sub(r"\[-.*?-\]|\{\+|⏎?\+\}", "", drafted)
    text = alone[alone.index("def ") : alone.rindex("]") + 1]
    assert text.startswith("def parse_header(line):")
    assert text in shown
    # Who takes long to load says so in between.
    ready = [line.split()[0] for line in done.stderr.splitlines() if "ready after" in line]
    assert ready == ["target", "drafter"]


def test_a_text_has_a_few_lines_of_figures_and_all_of_them_with_verbose() -> None:
    arguments = ("generate", "--temperature", "0.8", "--seed", "7", "--max-tokens", "24", "import")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    first, second, *doubts, third, fourth = lines[lines.index("") + 1 :]
    # Whether drafts paid, and whether other programs run, is not known here.
    assert all(re.match("drafts did not pay|the drafter rested|other pro", one) for one in doubts)
    assert re.match(r"24 tokens, [\d.]+ tokens/s, .*seed 7$", first)
    assert re.match(r"prompt: \d+ tokens? in \d+ ms \(.* tokens/s\), text: \d+ passes in ", second)
    assert third.startswith("target: fused, float32, ")
    assert fourth.startswith("plain: the target alone, float32, on ")
    verbose = run(*arguments, "--verbose").stderr.splitlines()
    assert any("policy auto" in line for line in verbose)
    assert any(line.startswith("target: fused") for line in verbose)
    assert any(line.startswith("target computed by ") for line in verbose)
    assert max(map(len, verbose)) <= 80
