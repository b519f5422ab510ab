"""Makes the embedded pair in larger shapes, once for all steps; times it, and copies on the device.

Beside each model is a second one for long texts: the same weights with a larger limit of positions
in its config.json. Text beyond the source's limit is noise, but takes the time of the shape.
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.device import torch_device
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.measure.timing import free_memory, typical
from lab.testbeds.inflate import Shape, inflate
from proto.installation import MODELS

COPIES = 20


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of both models and of the copy that is timed."""

    target: Shape
    drafter: Shape
    copied_bytes: int


# 37 and 20 layers: models of 8 B and 1 B have 32 and 16; the further layers make up for the small
# vocabulary of 4,096 tokens.
LARGE = Scale(
    target=Shape(4096, 14336, 37, 32, 8, 128),
    drafter=Shape(2048, 8192, 20, 32, 8, 64),
    copied_bytes=4 << 30,
)
# The shapes of the embedded models, with one layer more.
SMALL = Scale(Shape(384, 1024, 9, 6, 3, 64), Shape(128, 384, 3, 4, 2, 32), 1 << 26)
LONGEST = 33_024  # tokens: 32,768, and room for a tree
LONGEST_SMALL = 2048


@dataclass(frozen=True, slots=True)
class Models:
    """The folders of the two models."""

    target: Path
    drafter: Path


def models_in(context: Context) -> Models:
    """Return the folders of the pair, which is made if it is not there.

    Raises ValueError: there is no room on the disk, or no such device.
    """
    scale = SMALL if context.is_small else LARGE
    folder = context.work / "models"
    made = Models(folder / "target", folder / "drafter")
    if not (made.drafter / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _check_room(context)
        unfinished = folder.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a step that was ended early
        started = time.monotonic()
        new = make_models(unfinished, scale, context.device)
        for new_one in (new.target, new.drafter):
            new_one.rename(unfinished / new_one.name.partition("-")[0])
        unfinished.rename(folder)
        say(f"the pair was made in {time.monotonic() - started:.0f} s")
    return made


def make_models(work: Path, scale: Scale, device: str) -> Models:
    """Inflate both models to the scale's shapes, unless they exist; return them.

    Raises ValueError, ModelError.
    """
    folders = {}
    for role, shape in (("target", scale.target), ("drafter", scale.drafter)):
        folder = work / f"{role}-{shape.hidden_size}x{shape.num_layers}"
        if not (folder / "config.json").exists():
            started = time.monotonic()
            inflate(MODELS / role, folder, shape, device=str(torch_device(device)))
            say(f"{folder} made in {time.monotonic() - started:.0f} s")
        folders[role] = folder
    return Models(**folders)


def long_model(context: Context, folder: Path) -> Path:
    """Make a copy of the model's folder with a larger limit of positions; return the folder."""
    longest = LONGEST_SMALL if context.is_small else LONGEST
    beside = folder.with_name(f"{folder.name}-long")
    beside.mkdir(exist_ok=True)
    for path in folder.iterdir():
        link = beside / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    (beside / "config.json").write_text(json.dumps(config, indent=1))
    return beside


def _check_room(context: Context) -> None:
    """Raise ValueError if the disk has too little room for the models."""
    context.work.mkdir(parents=True, exist_ok=True)
    needed, free = (1 if context.is_small else 18) * 10**9, shutil.disk_usage(context.work).free
    if free < needed:
        raise ValueError(
            f"the models need {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free on the disk "
            f"of {context.work}; name another folder with --work"
        )


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Return the median bytes per second, read plus written, of a copy of `num_bytes`.

    Raises ModelError if the device cannot be used.
    """
    where = torch_device(device)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=where)
    copy = torch.empty_like(source)
    return 2 * num_bytes / typical(lambda: copy.copy_(source), where, count=COPIES)


def measure(context: Context) -> None:
    """Measure how long it takes to make the pair, and how fast the device copies.

    Raises ModelError if the device cannot be used.
    """
    started = time.monotonic()
    made = models_in(context)
    took_s = time.monotonic() - started
    for role, folder in (("target", made.target), ("drafter", made.drafter)):
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        context.record.measured(role, GB=num_bytes / 1e9, both_made_s=took_s)
    free_memory()
    if not context.record.has("copy"):
        scale = SMALL if context.is_small else LARGE
        rate = copy_bandwidth(str(torch_device(context.device)), scale.copied_bytes)
        context.record.measured("copy", GB_s=rate / 1e9)
        say(f"{context.device} copies {rate / 1e9:,.0f} GB/s, read and written")


if __name__ == "__main__":
    sys.exit(run_step(measure))
