"""Lists the files that one round of speculation runs through.

    python -m lab.measure.round_files

A round is the time from one verdict of the target to its next. The three processes write a text of
the embedded pair under the policy `tree`, greedy; each notes when a function of which project file
was called. A file counts if one of its functions ran, in any process, between two verdicts.

Functions of no file of the project, and what runs while a module is imported, do not count.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
NOTES = "SLIPSTREAM_ROUND_FILES"  # environment variable: folder for the notes of every process
TARGET, ON_VERDICT = "target_node/", "computed"  # folder and function that runs once per verdict
IMPORTING = "<module>"
LIMIT_S = 300.0
WARM_UP = 0.25  # share of the rounds that is left out, because costs are still being measured
USUAL = 0.5  # a file that runs in at least this share of the rounds counts as usual
STARTER = "import {module}; {module}.take_notes()"

Calls = Mapping[str, list[int]]


def take_notes() -> None:
    """Log each function call of this process from now on, if NOTES names a folder for logs."""
    folder = os.environ.get(NOTES)
    if not folder:
        return
    file = (Path(folder) / f"{os.getpid()}.txt").open("a", buffering=1, encoding="utf-8")
    root, known = f"{ROOT}/", dict[str, str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        path = known.get(code.co_filename)
        if path is None:
            path = code.co_filename.removeprefix(root)
            known[code.co_filename] = path = "" if path == code.co_filename else path
        if path and not path.startswith(".venv"):
            file.write(f"{time.monotonic_ns()} {path} {code.co_name}\n")

    threading.setprofile(note)
    sys.setprofile(note)


def rounds(lines: Iterable[str]) -> list[set[str]]:
    """Return the set of files of each round, in order of time, from the notes of all processes."""
    times: defaultdict[str, list[int]] = defaultdict(list)
    verdicts: list[int] = []
    for line in lines:
        words = line.split()
        if len(words) != 3 or words[2] == IMPORTING:
            continue
        when, path, function = int(words[0]), words[1], words[2]
        times[path].append(when)
        if path.startswith(TARGET) and function == ON_VERDICT:
            verdicts.append(when)
    for of_file in times.values():
        of_file.sort()
    verdicts.sort()
    return [_between(times, start, end) for start, end in pairwise(verdicts)]


def _between(times: Calls, start: int, end: int) -> set[str]:
    """Return the files of which a function was called from `start` to `end` (ns)."""
    return {
        path
        for path, of_file in times.items()
        if bisect_left(of_file, start) < bisect_right(of_file, end)
    }


def _noted(policy: str, num_tokens: int) -> list[str]:
    """Generate a text and return the notes (lines) of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        start.mkdir()
        # Python runs a module called sitecustomize before anything else, in each process.
        module = "round_files_notes"
        own = Path(__file__).read_text(encoding="utf-8")
        own = own.replace("Path(__file__).resolve().parents[2]", f"Path({str(ROOT)!r})")
        (start / f"{module}.py").write_text(own, encoding="utf-8")
        (start / "sitecustomize.py").write_text(STARTER.format(module=module), encoding="utf-8")
        notes = Path(folder) / "notes"
        notes.mkdir()
        found = subprocess.run(
            [
                *(sys.executable, "-m", "coordinator", "generate", "def read_lines(path):\n"),
                *("--target", "toy", "--drafter", "toy", "--policy", policy),
                *("--temperature", "0", "--max-tokens", str(num_tokens)),
                *("--json",),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(start), NOTES: str(notes)},
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        if found.returncode:
            raise SystemExit(f"the text was not written: status {found.returncode}")
        return [
            line
            for file in sorted(notes.iterdir())
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        ]


def main() -> int:
    """Print how many files a round runs through, and which; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.round_files", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--policy", default="tree", metavar="NAME", help="the policy (default tree)"
    )
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="tokens of the text (default 96)"
    )
    asked = parser.parse_args()
    found = rounds(_noted(asked.policy, asked.tokens))
    steady = found[int(len(found) * WARM_UP) :]
    if not steady:
        print("no two verdicts were seen", file=sys.stderr)
        return 1
    sizes = [len(files) for files in steady]
    shares = {
        path: sum(path in files for files in steady) / len(steady)
        for path in sorted(set().union(*steady))
    }
    usual = [path for path, share in shares.items() if share >= USUAL]
    print(f"{len(steady)} rounds under {asked.policy}, greedy, embedded pair")
    print(f"files in a round: median {statistics.median(sizes):g}, at most {max(sizes)}")
    print(f"in at least {USUAL:.0%} of the rounds: {len(usual)} files")
    for path, share in shares.items():
        print(f"  {share:4.0%}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
