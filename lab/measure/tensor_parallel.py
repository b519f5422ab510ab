"""Times the passes of a model on several devices against those on one.

    python -m coordinator testbed --like 0.5b --out FOLDER
    python -m lab.measure.tensor_parallel FOLDER/target --devices cpu:0 cpu:0,cpu:1
    python -m lab.measure.tensor_parallel FOLDER/target --devices cuda:0 cuda:0-1 cuda:0-3

Prints one line per devices and number of rows: milliseconds of a pass until one of its numbers is
on the host (quartiles) and the ratio to the first devices' median. The devices take turns, a
process each time, so that each has the weights where it wants them.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from engine.executor import Executor
from engine.loading import load_engine
from lab.help import Paragraphs
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import spread

ROW_COUNTS = (1, 5, 9)
WARM = 3
TURN_LIMIT_S = 3600.0


def passes(executor: Executor, num_rows: int, context: int, seconds: float) -> list[float]:
    """Return the seconds of passes of `num_rows` rows (a chain) after `context` tokens of text."""
    feed = chain(num_rows, context)
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 2 * WARM:
        started = time.perf_counter()
        executor.run(feed, range(num_rows))[0, 0].item()
        taken.append(time.perf_counter() - started)
    return taken[WARM:]


def turn(options: argparse.Namespace, device: str) -> dict[int, list[float]]:
    """Load the model on these devices and time it; return seconds of passes by number of rows."""
    engine = load_engine(
        options.model,
        revision=None,
        dtype=options.dtype,
        device=device,
        max_len=options.context + max(ROW_COUNTS),
        fixed_rows=None,
        warm_rows=ROW_COUNTS,
        say=lambda _: None,
        backend=options.backend,
        row_counts={"graphs": ROW_COUNTS},
    )
    read_up_to(engine.executor, 0, options.context)
    taken = {
        count: passes(engine.executor, count, options.context, options.seconds)
        for count in ROW_COUNTS
    }
    if engine.loaded.rank is not None and engine.loaded.rank.followers is not None:
        engine.loaded.rank.followers.close()
    return taken


def in_a_process(arguments: Sequence[str], device: str) -> dict[int, list[float]]:
    """Call `turn` in a new process, and return its result."""
    command = [sys.executable, "-m", "lab.measure.tensor_parallel", *arguments]
    done = subprocess.run(
        [*command, "--one", device], stdout=subprocess.PIPE, check=True, timeout=TURN_LIMIT_S
    )
    return {int(count): taken for count, taken in json.loads(done.stdout).items()}


def main() -> None:
    """Compare the devices that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.tensor_parallel",
        description=__doc__,
        formatter_class=Paragraphs,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, or name on the hub")
    parser.add_argument(
        "--devices",
        nargs="+",
        default=["cpu:0", "cpu:0,cpu:1"],
        metavar="DEVICES",
        help="what to compare, each as for --target-device",
    )
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="number type")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="which forward pass")
    parser.add_argument(
        "--context", type=int, default=200, metavar="N", help="tokens before the rows"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        metavar="N",
        help="how long a line is timed in each turn",
    )
    parser.add_argument(
        "--turns", type=int, default=2, metavar="N", help="how many turns (default 2)"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(turn(options, options.one)))
        return
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(options.turns):
        for device in options.devices:
            for count, times in in_a_process(sys.argv[1:], device).items():
                taken[device, count] += times
    for count in ROW_COUNTS:
        first = median(taken[options.devices[0], count])
        for device in options.devices:
            times = taken[device, count]
            print(
                f"{device:>16} {count:2} rows  {spread(times)} ms  "
                f"{first / median(times):.2f} x {options.devices[0]}"
            )


if __name__ == "__main__":
    main()
