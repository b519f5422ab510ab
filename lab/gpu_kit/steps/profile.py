"""Profiles one pass of a model: which kernels run, how often, and how long.

The trace itself is kept beside the rows, for a trace viewer.
"""

import gzip
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from engine.checkpoint.model import load_model
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import make_executor
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.gpu_kit.steps.models import models_in
from lab.gpu_kit.steps.passes import pass_seconds
from lab.measure.passes import chain, read_up_to

NUM_ROWS = {"target": 5, "drafter": 1}
LENGTH, LENGTH_SMALL = 500, 100
NUM_KERNELS, NAME_LEN = 14, 38


def measure(context: Context) -> None:
    """Profile one pass on the backend that a node would choose, and write a row per kernel.

    Raises ValueError if the profiler has seen nothing of the device.
    """
    models = models_in(context)
    folder = models.target if context.which == "target" else models.drafter
    length, num_rows = LENGTH_SMALL if context.is_small else LENGTH, NUM_ROWS[context.which]
    loaded = load_model(str(folder), device=context.device)
    executor = make_executor(loaded, length + NUM_TREE_SLOTS, row_counts=(num_rows,))
    read_up_to(executor, 0, length)
    _, pass_s = pass_seconds(executor, length, num_rows)
    feed = chain(num_rows, length)
    is_gpu = context.is_on_gpu
    kinds = [ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        executor.run(feed, range(num_rows)).argmax(-1).cpu()
        if is_gpu:
            torch.cuda.synchronize()
    taken = [(_us(event, is_gpu=is_gpu), event) for event in profiler.key_averages()]
    taken = sorted(((us, event) for us, event in taken if us > 0), key=lambda one: -one[0])
    if not taken:
        raise ValueError("the profiler has seen nothing of the device")
    total_us = sum(us for us, _ in taken)
    context.record.measured(
        "whole pass",
        us=total_us,
        calls=float(sum(event.count for _, event in taken)),
        wall_us=pass_s * 1e6,
        share=1.0,
    )
    for us, event in taken[:NUM_KERNELS]:
        name = short(event.key)
        share = us / total_us
        context.record.measured(name, us=us, calls=float(event.count), share=share)
        say(f"{share:5.0%} {us:9.0f} us {event.count:5} x {name}")
    say(f"{executor.backend}: {total_us:.0f} us of work in a pass of {pass_s * 1e6:.0f} us")
    _keep_trace(profiler, context.out / f"{context.which}.trace.json.gz")
    executor.free()


def _us(event: object, *, is_gpu: bool) -> float:
    """Return the microseconds of an event on the device itself (on the CPU, for a rehearsal).

    Several field names are tried, because torch has renamed the field once.
    """
    on_gpu = ["self_device_time_total", "self_cuda_time_total"]
    names = on_gpu if is_gpu else ["self_cpu_time_total"]
    return float(next((getattr(event, name) for name in names if hasattr(event, name)), 0.0))


def short(name: str) -> str:
    """Return the name of a kernel without template arguments, but with a number for them."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    rest = name[len(plain) :] if plain != name else ""
    mark = f" #{abs(hash_of(rest)) % 1000:03}" if rest else ""
    return plain[-(NAME_LEN - len(mark)) :] + mark


def hash_of(text: str) -> int:
    """Return a hash that is the same in every process, unlike `hash`."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(text))


def _keep_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace as a gzipped file."""
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with gzip.open(path, "wb") as packed:
        packed.write(plain.read_bytes())
    plain.unlink()


if __name__ == "__main__":
    sys.exit(run_step(measure))
