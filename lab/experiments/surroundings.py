"""Describes what an experiment runs on: machine, versions, commit, load by other processes."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from coordinator.launching.load import Load
from proto.installation import IS_CHECKOUT, ROOT

PACKAGES = ("torch", "transformers", "pyzmq", "ray", "numpy", "vllm")
GIT_LIMIT_S, GPU_LIMIT_S = 5.0, 10.0
# Load (cores) below which the machine is quiet; how long to wait for that; time of one sample.
QUIET, QUIET_LIMIT_S, SAMPLE_S = 0.1, 30.0, 0.5


def machine() -> str:
    """Return one line about the hardware and operating system: cores, CPU, GPUs, kernel."""
    lines = _read("/proc/cpuinfo").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    gpus = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], GPU_LIMIT_S)
    parts = [f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else 'unknown kind'}"]
    parts += gpus.splitlines()
    parts.append(f"{platform.system()} {platform.release()}")
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Return the versions of Python and of those PACKAGES that are installed, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the code's git commit, with " with changes" if files differ; "" if not known.

    What was installed may lie in somebody else's repository, whose commit says nothing.
    """
    if not IS_CHECKOUT:
        return ""
    name = _said(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], GIT_LIMIT_S)
    changed = _said(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], GIT_LIMIT_S)
    return f"{name} with changes" if changed else name


def wait_for_quiet(say: Callable[[str], None]) -> float:
    """Wait until other processes are quiet, at most 30 s; return how many CPU cores they use.

    say  called with a line of text if it has to wait
    """
    deadline = time.monotonic() + QUIET_LIMIT_S
    has_said = False
    while True:
        load = Load()
        time.sleep(SAMPLE_S)
        cores = load.cores()
        if cores < QUIET or time.monotonic() > deadline:
            return cores
        if not has_said:
            say(f"others use {cores:.1f} cores; waiting up to {QUIET_LIMIT_S:.0f} s for quiet")
            has_said = True


def _read(path: str) -> str:
    """Return the text of a file of the system; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _said(command: list[str], limit_s: float) -> str:
    """Return the standard output of a program; "" if it fails or takes too long."""
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return made.stdout.strip() if made.returncode == 0 else ""
