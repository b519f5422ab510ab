"""Times the reference and the fused (or compiled) forward in one run, turn by turn.

    taskset -c 0 python -m lab.measure.forwards [--seconds 4] [--context 180] [--compiled]
    taskset -c 0 python -m lab.measure.forwards --lanes

Prints one line per model, type and number of rows: milliseconds of a pass (quartiles; processor
time of the thread, so that other processes count as little as they can) and the ratio of the
medians. The two take turns of some passes each, as they would run, and not pass by pass: then
each would find the other's weights in the cache and its own gone. With `--lanes`: rows per second
of the fused target with one row in each of 1, 2, 4 and 8 lanes, against one lane, in both types;
the aim is 4 x at 8 lanes.
"""

import argparse
import time
from statistics import median

import torch

from engine.checkpoint.model import load_model
from engine.executor import Executor
from engine.layout.slots import NUM_TREE_SLOTS, Feed
from engine.loading import make_executor
from lab.help import Paragraphs
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import spread

PAIR = (("models/target", "bfloat16"), ("models/drafter", "float32"))
ROW_COUNTS = (1, 2, 4, 5, 8, 16)
LANE_COUNTS = (1, 2, 4, 8)
PROGRAMS = (1, 9)  # row counts that the compiled backend compiles, as the target does
TURN = 25
WARM = 5  # passes at the start of a turn that are not counted


def turn(executor: Executor, *feeds: Feed) -> list[float]:
    """Run TURN passes of these rows; return the seconds of those after the first WARM."""
    asks = [range(len(feed.tokens)) for feed in feeds]
    seconds = []
    for _ in range(TURN):
        started = time.thread_time()
        executor.run_together(feeds, asks)
        seconds.append(time.thread_time() - started)
    return seconds[WARM:]


def compare(name: str, dtype: str, context: int, seconds: float, fast: str) -> None:
    """Time one model on the reference and the fast backend, and print a line per number of rows."""
    executors = []
    for backend in ("reference", fast):
        started = time.thread_time()
        loaded = load_model(name, dtype=dtype)
        capacity = loaded.max_model_len + NUM_TREE_SLOTS
        executors.append(make_executor(loaded, capacity, backend=backend, row_counts=PROGRAMS))
        read_up_to(executors[-1], 0, context)
        print(f"{name} {dtype} {backend}: ready in {time.thread_time() - started:.2f} s")
    one_row = [1.0, 1.0]
    for num_rows in ROW_COUNTS:
        feed = chain(num_rows, context)
        spent: list[list[float]] = [[], []]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for executor, times in zip(executors, spent, strict=True):
                times += turn(executor, feed)
        mids = [median(times) for times in spent]
        if num_rows == 1:
            one_row = mids
        cells = [
            f"{spread(times)} = {mid / one:.2f} of 1 row"
            for times, mid, one in zip(spent, mids, one_row, strict=True)
        ]
        ratio = mids[0] / mids[1]
        print(f"  {num_rows:2} rows  reference {cells[0]}  {fast} {cells[1]}  x {ratio:.2f}")


def lanes(name: str, dtype: str, context: int, seconds: float) -> None:
    """Time one model with one row in each of several lanes (texts), and print a line per number."""
    loaded = load_model(name, dtype=dtype)
    capacity = loaded.max_model_len + NUM_TREE_SLOTS
    executor = make_executor(loaded, capacity, num_lanes=max(LANE_COUNTS))
    for lane in range(max(LANE_COUNTS)):
        read_up_to(executor, 0, context + lane, lane)
    spent: dict[int, list[float]] = {count: [] for count in LANE_COUNTS}
    end = time.monotonic() + seconds * len(LANE_COUNTS)
    while time.monotonic() < end:
        for count, times in spent.items():
            times += turn(executor, *(chain(1, context + lane, lane) for lane in range(count)))
    one = median(spent[1])
    for count, times in spent.items():
        mid = median(times)
        print(
            f"{name} {dtype} {count} lanes  {spread(times)} ms  "
            f"{count / mid:5.0f} rows/s  x {count * one / mid:.2f}"
        )


def main() -> None:
    """Compare both models of the embedded pair, or the models that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.forwards",
        description=__doc__,
        formatter_class=Paragraphs,
    )
    parser.add_argument(
        "model", nargs="*", metavar="MODEL:DTYPE", help="a model and its number type"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="N", help="how long each line is timed"
    )
    parser.add_argument(
        "--context", type=int, default=180, metavar="N", help="tokens before the rows"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="time the compiled forward, not the fused"
    )
    parser.add_argument("--lanes", action="store_true", help="time passes of several texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    named = [tuple(item.rsplit(":", 1)) for item in options.model]
    if options.lanes:
        for name, dtype in named or (("models/target", "bfloat16"), ("models/target", "float32")):
            lanes(name, dtype, options.context, options.seconds)
        return
    for name, dtype in named or PAIR:
        fast = "compiled" if options.compiled else "fused"
        compare(name, dtype, options.context, options.seconds, fast)


if __name__ == "__main__":
    main()
