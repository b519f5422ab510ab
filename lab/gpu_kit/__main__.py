"""Runs the four scripts of the GPU kit one after another, each as a process with a time limit.

    python3 lab/gpu_kit/start.py [--script NAME]... [--limit-s S] [--small] [--out FOLDER]

is what a bare machine runs: `start.py` first makes a Python with all packages.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from proto.installation import ROOT

KIT = "gpu-kit"
SHIPPED = ROOT / "lab" / "experiments" / "prompts.jsonl"
# Seconds that a script may take at most; what is left of a call goes to the next one.
SCRIPTS = {"pairs": 330.0, "passes": 150.0, "checks": 240.0, "looks": 60.0}
LIMIT_S = 540.0  # of a call
END_S = 15.0
# Nothing in the kit may use the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="lab/gpu_kit/start.py", description="The measurements of a GPU machine."
    )
    found.add_argument(
        "--script", choices=SCRIPTS, action="append", help="only this one; may be repeated"
    )
    found.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="of this call (default %(default)s)"
    )
    found.add_argument("--out", type=Path, help="of the results; default: $OUT, or gpu-results")
    work = Path(tempfile.gettempdir()) / "slipstream-gpu-kit"
    found.add_argument(
        "--work", type=Path, default=work, help="of the models, 20 GB (default %(default)s)"
    )
    found.add_argument("--device", help="default: cuda:0; with --small: cpu")
    found.add_argument("--small", action="store_true", help="rehearse on a CPU, all tiny")
    found.add_argument("--prompt-file", type=Path, help="default: what the kit brings")
    found.add_argument("--kit", type=Path, default=ROOT / KIT, help="what `make gpu-kit` made")
    return found


def command_of(script: str, options: argparse.Namespace, out: Path, limit_s: float) -> list[str]:
    """Return the command that runs a script."""
    brought = next(options.kit.glob("prompts.*"), SHIPPED)
    return [
        *(sys.executable, "-m", f"lab.gpu_kit.{script}", "--out", str(out)),
        *("--work", str(options.work.absolute()), "--limit-s", f"{limit_s:.0f}"),
        *("--device", options.device or ("cpu" if options.small else "cuda:0")),
        *("--prompt-file", str((options.prompt_file or brought).absolute())),
        *(["--small"] if options.small else []),
    ]


def run(command: list[str], log: Path, limit_s: float) -> str:
    """Run a script with all that it starts; return what went wrong in one line, or ""."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **OFFLINE, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # so that it can be ended with all that it has started
        )
        try:
            status = process.wait(limit_s + END_S)
        except subprocess.TimeoutExpired:
            end(process)
            return f"ended after {limit_s + END_S:.0f} s; its rows are kept"
        except BaseException:
            end(process)
            raise
    lines = log.read_text(errors="replace").strip().splitlines()
    return "" if status == 0 else (lines or [f"status {status}"])[-1]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a script with all processes that it started: SIGTERM first, SIGKILL after END_S."""
    for insist in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, insist)
            process.wait(END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    """Run the scripts; return the exit status: 0 if each has ended well."""
    options, began_s = parser().parse_args(), time.monotonic()
    usual = ROOT / ("gpu-results-small" if options.small else "gpu-results")
    out = (options.out or Path(os.environ.get("OUT") or usual)).absolute()
    failed: list[str] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for script in options.script or SCRIPTS:
            left_s = options.limit_s - (time.monotonic() - began_s) - END_S
            if left_s < END_S:
                failed.append(f"{script}: no time was left")
                continue
            limit_s = min(SCRIPTS[script], left_s)
            sys.stdout.write(f"\n== {script}, at most {limit_s:.0f} s\n")
            sys.stdout.flush()
            if problem := run(command_of(script, options, out, limit_s), out / "log.txt", limit_s):
                failed.append(f"{script}: {problem}")
    except OSError as error:
        sys.stderr.write(f"error: {out} cannot be written ({error.strerror}); use --out\n")
        return 2
    sys.stdout.write("\n".join(["", *failed, f"rows and log: {out}"]) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
