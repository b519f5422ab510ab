"""What runs first on a bare machine, with nothing but the standard library."""

import subprocess
import sys
from pathlib import Path

from lab.gpu_kit.start import ROOT, option, without
from tests.architecture.imports import imports
from tests.architecture.sources import sources

START = ROOT / "lab" / "gpu_kit" / "start.py"


def test_it_imports_the_standard_library_alone() -> None:
    (file,) = [one for one in sources("lab") if ROOT / one.path == START]
    assert {one.top for one in imports(file)} <= sys.stdlib_module_names


def test_options_are_found_in_both_forms_and_taken_out() -> None:
    arguments = ["--part", "1", "--torch", "/there", "--work=/tmp/w"]
    assert option(arguments, "--torch", "") == "/there"
    assert option(arguments, "--work", "") == "/tmp/w"
    assert option(arguments, "--kit", "here") == "here"
    assert without(arguments, "--torch") == ["--part", "1", "--work=/tmp/w"]
    assert without(["--torch=/there", "--small"], "--torch") == ["--small"]


def test_without_a_kit_one_line_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(START), "--kit", str(tmp_path), "--work", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: {tmp_path} is no kit; run `make gpu-kit` where there is a network, and bring it\n"
    )
