"""Runs the measurements in the kit's plan, with a Python that has all packages that they need.

    python3 lab/gpu_kit/start.py [--part N]... [--limit-s S] [--small] [--out FOLDER]

is what a bare machine runs: `start.py` first makes such a Python. The same command run again
resumes with the steps that are left.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from lab.gpu_kit.driver import RESULTS, Settings, run, words, write_report
from lab.gpu_kit.plan import CALL_LIMIT_S, PARTS
from proto.errors import SlipstreamError
from proto.installation import ROOT

KIT = "gpu-kit"
SHIPPED = ROOT / "lab" / "experiments" / "prompts.jsonl"


def settings_of(options: argparse.Namespace, started: float) -> Settings:
    """Return the settings of the command line; results go to --out, or $OUT, or a default."""
    usual = ROOT / (f"{RESULTS}-small" if options.small else RESULTS)
    out = options.out or Path(os.environ.get("OUT") or usual)
    device = options.device or ("cpu" if options.small else "cuda:0")
    kept = options.work.absolute() / usual.name
    brought = next(options.kit.glob("prompts.*"), SHIPPED)
    return Settings(
        parts=frozenset(options.part or ()),
        out=out.absolute(),
        work=options.work.absolute(),
        device=device,
        is_small=options.small,
        prompts=(options.prompts or brought).absolute(),
        limit_s=options.limit_s,
        started=started,
        earlier=(usual.absolute(), kept),
        kept=kept,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="lab/gpu_kit/start.py", description="The measurements of a GPU machine."
    )
    found.add_argument(
        *("--part", "-p"),
        type=int,
        choices=PARTS,
        action="append",
        help="only this part; may be given several times",
    )
    found.add_argument(
        "--limit-s", type=float, default=CALL_LIMIT_S, help="of this call (default %(default)s)"
    )
    found.add_argument("--out", type=Path, help=f"of the results; default: $OUT, or {RESULTS}")
    found.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "slipstream-gpu-kit",
        help="of models and the like, 18 GB (default %(default)s)",
    )
    found.add_argument("--device", help="default: cuda:0; with --small: cpu")
    found.add_argument("--small", action="store_true", help="rehearse on a CPU, all tiny")
    found.add_argument(
        *("--prompt-file", "--prompts"),
        dest="prompts",
        type=Path,
        help="default: what the kit brings",
    )
    found.add_argument("--kit", type=Path, default=ROOT / KIT, help="what `make gpu-kit` made")
    found.add_argument("--report-only", action="store_true", help="measure nothing")
    return found


def main() -> int:
    """Run the kit; return the exit status.

    0: all is done; 1: a step failed or is left; 2: something that was given is wrong.
    """
    started = time.monotonic()
    options = parser().parse_args()
    settings = settings_of(options, started)
    try:
        if options.report_only:
            sys.stdout.write(write_report(settings.out))
            return 0
        outcome = run(settings, _say)
        _say("\n" + write_report(settings.out))
    except SlipstreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    command = ["python3", "lab/gpu_kit/start.py", *sys.argv[1:]]
    _say(words(outcome, settings, command))
    return 1 if outcome.failed or outcome.left else 0


def _say(text: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
