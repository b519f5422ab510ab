"""Script D: the largest surprises among the rows, and the kernels of one pass of each model."""

import gzip
import json
import sys

import torch
from torch.profiler import ProfilerActivity

from engine.checkpoint.model import load_model
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import make_executor
from lab.gpu_kit.kit import ROWS, Kit, run
from lab.gpu_kit.passes import pass_seconds
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import free_memory

NUM_ROWS = {"target": 5, "drafter": 1}
CONTEXT, CONTEXT_SMALL = 700, 60
NUM_KERNELS, NUM_SURPRISES, NAME_LEN = 14, 5, 48


def measure(kit: Kit) -> None:
    """Say what surprises, then look at kernels. Raises ModelError, ValueError."""
    for line in surprises(kit):
        kit.say(line)
    for role in NUM_ROWS:
        kernels(kit, role)
        free_memory()


def surprises(kit: Kit) -> list[str]:
    """Return the rows that are furthest from what was expected, a line each."""
    if not (kit.out / ROWS).exists():
        return []
    found = []
    for line in (kit.out / ROWS).read_text().splitlines():
        row = json.loads(line)
        for name, expected in row.get("expected", {}).items():
            ratio = row["figures"][name] / expected
            found.append((max(ratio, 1 / ratio), f"{row['what']}: {name} {ratio:.2f} of expected"))
    return [words for _, words in sorted(found, reverse=True)[:NUM_SURPRISES]]


def kernels(kit: Kit, role: str) -> None:
    """Profile one pass; write a row for each of its longest kernels, and keep the trace."""
    context, num_rows = CONTEXT_SMALL if kit.is_small else CONTEXT, NUM_ROWS[role]
    loaded = load_model(str(kit.model(role)), device=kit.device)
    executor = make_executor(loaded, context + NUM_TREE_SLOTS, row_counts=(num_rows,))
    read_up_to(executor, 0, context)
    _, pass_s = pass_seconds(executor, context, num_rows)
    feed = chain(num_rows, context)
    kind = ProfilerActivity.CUDA if kit.is_on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        executor.run(feed, range(num_rows)).argmax(-1).cpu()
    name = "self_device_time_total" if kit.is_on_gpu else "self_cpu_time_total"
    taken = sorted(((getattr(one, name), one) for one in profiler.key_averages()), key=_longest)
    total_us = sum(us for us, _ in taken)
    kit.row(f"{role}, {num_rows} rows: all kernels", us=total_us, pass_us=1e6 * pass_s)
    for us, event in taken[:NUM_KERNELS]:
        kit.row(f"{role}: {event.key[:NAME_LEN]}", us=us, calls=event.count)
    plain = kit.out / f"{role}.trace.json"
    profiler.export_chrome_trace(str(plain))
    with gzip.open(f"{plain}.gz", "wb") as packed:
        packed.write(plain.read_bytes())
    plain.unlink()
    executor.free()


def _longest(one: tuple[float, object]) -> float:
    return -one[0]


if __name__ == "__main__":
    sys.exit(run("looks", measure))
