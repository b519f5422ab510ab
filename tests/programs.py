"""Runs a small program in a process of its own, in the root of the repository."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(program: str, *arguments: str, **more: object) -> "subprocess.CompletedProcess[str]":
    """Run it to its end, for a minute at most. `more`: as `subprocess.run` takes it."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,  # type: ignore[call-overload]
    )
