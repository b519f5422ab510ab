"""What a GPU can do: an 8 B target and a 0.5 B drafter, made of the embedded pair, on each backend.

    python -m lab.measure.gpu --work FOLDER [--only a,b]

The two are the embedded models in larger shapes (`inflate`): they say what the small ones say, and
cost what large ones cost. They are made in FOLDER (17 GB), if they are not there yet.

    a  how many bytes a second the device copies: what a pass could reach at best
    b  the time of a target pass and of a draft step, on every backend that the device takes

Tokens a second are the matter of `python -m coordinator experiment gpu`. `--small` makes both
models tiny: all parts run in about a minute on a CPU (`--device cpu`).
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from coordinator.api.config import MODELS
from engine.checkpoint.model import LoadedModel, load_model
from engine.device import torch_device
from engine.errors import EngineError, ModelError
from engine.executor import Executor
from engine.layout.slots import NUM_TREE_SLOTS, Feed
from engine.loading import BACKENDS, make_executor
from lab.experiments.surroundings import machine
from lab.testbeds.inflate import Shape, inflate
from proto.errors import SlipstreamError

PARTS = ("a", "b")
NOT_TIMED = ("auto", "compiled")  # a name for another one; for CPUs, and it takes a minute to load
ROW_COUNTS = (1, 2, 5, 9, 17)
CONTEXT = 200  # tokens before the rows
WARM, TIMED = 5, 40  # passes
COPIES = 20
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is."""

    target: Shape
    drafter: Shape
    copied_bytes: int


# 37 layers: the usual 32 of this shape and what makes up for a vocabulary of 4,096 tokens.
LARGE = Scale(
    target=Shape(4096, 14336, 37, 32, 8, 128),
    drafter=Shape(1024, 8192, 16, 16, 8, 64),
    copied_bytes=4 << 30,
)
SMALL = Scale(
    target=Shape(512, 1536, 10, 8, 4, 128),
    drafter=Shape(256, 512, 3, 8, 4, 64),
    copied_bytes=1 << 28,
)


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the two."""

    target: Path
    drafter: Path


def say(text: str) -> None:
    """Print at once: a run that is cut off has said what it found."""
    print(text, flush=True)


def make_models(work: Path, scale: Scale, device: str) -> Models:
    """Inflate what is not there yet. Raises ValueError."""
    folders = {}
    for role, shape in (("target", scale.target), ("drafter", scale.drafter)):
        folder = work / f"{role}-{shape.hidden_size}x{shape.num_layers}"
        if not (folder / "config.json").exists():
            started = time.monotonic()
            inflate(MODELS / role, folder, shape, device=str(torch_device(device)))
            say(f"{folder} made in {time.monotonic() - started:.0f} s")
        folders[role] = folder
    return Models(**folders)


def describe(device: str) -> str:
    """The machine, and the GPU if it is one."""
    lines = [f"machine: {machine()}"]
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        lines.append(
            f"GPU: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, driver {_driver()}, "
            f"CUDA {torch.version.cuda}"
        )
    return "\n".join(lines)


def _driver() -> str:
    try:
        found = re.search(r"\d{3,}\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        found = None
    return found[0] if found else "unknown"


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes a second, read and written, of a copy of `num_bytes`: the median of several."""
    where = torch_device(device)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=where)
    copy = torch.empty_like(source)
    seconds = [_seconds(lambda: copy.copy_(source), where) for _ in range(WARM + COPIES)]
    return 2 * num_bytes / median(seconds[WARM:])


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long it takes until the device is done."""
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Give back what is garbage, so that node processes and the next model find room."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Timed:
    """What one backend takes for a model.

    weight_bytes  that a pass reads
    pass_s        median seconds of a pass, by its number of rows
    """

    num_parameters: int
    dtype: torch.dtype
    weight_bytes: int
    pass_s: dict[int, float]


def time_backends(folder: Path, device: str, row_counts: Sequence[int]) -> dict[str, Timed]:
    """Time a model on every backend that takes it, one after another in the same memory."""
    timed = {}
    for backend in BACKENDS:
        if backend in NOT_TIMED:
            continue
        try:
            timed[backend] = _time_backend(folder, device, backend, row_counts)
        except ModelError as error:
            say(f"{backend} is left out: {error}")
        free_memory()
    return timed


def _time_backend(folder: Path, device: str, backend: str, row_counts: Sequence[int]) -> Timed:
    """Raises ModelError. Whatever was loaded is garbage afterwards."""
    loaded = load_model(str(folder), device=device)
    num_bytes = _weight_bytes(loaded)
    capacity = loaded.max_model_len + NUM_TREE_SLOTS
    executor = make_executor(loaded, capacity, backend=backend, row_counts=row_counts)
    where = tuple(range(CONTEXT))
    executor.run(Feed(_text(0, CONTEXT), where, where, 0, None), ())
    pass_s = {num_rows: _pass_seconds(executor, num_rows) for num_rows in row_counts}
    executor.free()
    return Timed(loaded.num_parameters, loaded.dtype, num_bytes, pass_s)


def _weight_bytes(loaded: LoadedModel) -> int:
    """Of all matrices and norms; of embeddings only if they are the head as well."""
    embeddings = loaded.model.get_input_embeddings().weight
    is_tied = embeddings is loaded.model.get_output_embeddings().weight
    num_read = loaded.num_parameters - (0 if is_tied else embeddings.numel())
    return num_read * loaded.dtype.itemsize


def _pass_seconds(executor: Executor, num_rows: int) -> float:
    """Median of passes over a chain, until the largest logit of each row is on the CPU."""
    where = tuple(range(CONTEXT, CONTEXT + num_rows))
    masks = tuple((2 << i) - 1 for i in range(num_rows))
    feed = Feed(_text(CONTEXT, num_rows), where, where, CONTEXT, masks)

    def run() -> torch.Tensor:
        return executor.run(feed, range(num_rows)).argmax(-1).cpu()

    seconds = [_seconds(run, executor.loaded.device) for _ in range(WARM + TIMED)]
    return median(seconds[WARM:])


def _text(start: int, count: int) -> tuple[int, ...]:
    """Some tokens that do not repeat themselves."""
    return tuple(position * position % 4093 for position in range(start, start + count))


def pass_table(title: str, timed: dict[str, Timed], bandwidth: float) -> str:
    """A line per backend: milliseconds, and the share of the copy bandwidth."""
    if not timed:
        return f"{title}: no backend takes it"
    first = next(iter(timed.values()))
    lines = [
        f"{title}: {first.num_parameters / 1e6:,.0f} M parameters, {str(first.dtype)[6:]}, "
        f"{first.weight_bytes / 1e9:.3g} GB read in a pass; ms (share of the copy bandwidth)",
        f"{'rows':<12}" + "".join(f"{num_rows:>16}" for num_rows in first.pass_s),
    ]
    for backend, one in timed.items():
        cells = [
            f"{seconds * 1e3:.2f} ({one.weight_bytes / seconds / bandwidth:.0%})"
            for seconds in one.pass_s.values()
        ]
        lines.append(f"{backend:<12}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Run the parts that are wanted. Raises ValueError, EngineError, SlipstreamError."""
    scale, device = SMALL if options.small else LARGE, options.device
    torch_device(device)
    say(describe(device))
    models = make_models(options.work, scale, device)
    bandwidth = float("nan")
    if {"a", "b"} & options.only:  # shares in b are of a
        bandwidth = copy_bandwidth(device, scale.copied_bytes)
        say(
            f"\na. {device} copies {bandwidth / 1e9:,.0f} GB/s, read and written "
            f"({scale.copied_bytes / 1e9:.2f} GB, median of {COPIES})"
        )
        free_memory()
    if "b" in options.only:
        say(f"\nb. passes over {CONTEXT} tokens of context on {device}, median of {TIMED}")
        say(pass_table("target", time_backends(models.target, device, ROW_COUNTS), bandwidth))
        say(pass_table("drafter", time_backends(models.drafter, device, (1,)), bandwidth))


def _parts(text: str) -> set[str]:
    parts = set(text.split(","))
    if not parts <= set(PARTS):
        raise argparse.ArgumentTypeError(f"some of {','.join(PARTS)}, not {text}")
    return parts


def main() -> int:
    """Run the experiment; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="where the models are made")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", type=_parts, default=set(PARTS), help="parts, as in a,b")
    parser.add_argument("--small", action="store_true", help="tiny models, few tokens")
    started = time.monotonic()
    try:
        run(parser.parse_args())
    except (ValueError, EngineError, SlipstreamError) as error:
        print(error, file=sys.stderr)
        return 1
    say(f"\n{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
