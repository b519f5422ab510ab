"""What the four scripts of the GPU kit share: options, rows, and the pair in large shapes.

A row is a line of JSON in `rows.jsonl`, written as soon as its figures are known, so that a script
that is ended loses nothing. It names what was expected beside what was measured.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.checkpoint.files import one_line
from engine.device import torch_device
from engine.errors import EngineError, lacks_memory
from lab.testbeds.inflate import Shape, inflate
from proto.errors import SlipstreamError
from proto.installation import MODELS

ROWS = "rows.jsonl"
# Models of 8 B and 1 B have 32 and 16 layers. The further layers make up for the small vocabulary.
LARGE = {
    "target": Shape(4096, 14336, 37, 32, 8, 128),
    "drafter": Shape(2048, 8192, 20, 32, 8, 64),
}
# The shapes of the embedded models, with one layer more.
SMALL = {"target": Shape(384, 1024, 9, 6, 3, 64), "drafter": Shape(128, 384, 3, 4, 2, 32)}
NEEDED_BYTES = 20e9
LONGEST, LONGEST_SMALL = 33_024, 2_048  # tokens: 32,768, and room for a tree


@dataclass(frozen=True, slots=True)
class Kit:
    """What a script is given.

    out      folder of the results
    work     folder of the models, which can be made again
    is_small  True: a rehearsal in tiny shapes
    ends_at  by `time.monotonic`: nothing is begun after it
    """

    script: str
    out: Path
    work: Path
    device: str
    is_small: bool
    prompts: Path
    ends_at: float

    @property
    def is_on_gpu(self) -> bool:
        """Return True if the device is a GPU."""
        return self.device.startswith("cuda")

    @property
    def left_s(self) -> float:
        """Return the seconds that are left for this script."""
        return self.ends_at - time.monotonic()

    def row(
        self, what: str, expected: Mapping[str, float] | None = None, **figures: float | str
    ) -> None:
        """Write a row, and print it with the ratios to what was expected."""
        expected = {} if self.is_small else expected or {}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        found = {"script": self.script, "what": what, "figures": figures, "expected": expected}
        with (self.out / ROWS).open("a") as file:
            file.write(json.dumps({**found, "at": at}) + "\n")
        said = [_said(name, value, expected.get(name)) for name, value in figures.items()]
        self.say(f"{what}: {', '.join(said)}")

    def say(self, text: str) -> None:
        """Print a line at once."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def model(self, role: str) -> Path:
        """Return the folder of the target or of the drafter, made if it is not there.

        Raises ValueError: there is no room on the disk.
        """
        folder = self.work / ("small" if self.is_small else "large") / role
        if not (folder / "config.json").exists():
            self.work.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.work).free
            if not self.is_small and free < NEEDED_BYTES:
                raise ValueError(f"{self.work} has {free / 1e9:.0f} GB; use --work with 20 GB free")
            shape, began_s = (SMALL if self.is_small else LARGE)[role], time.monotonic()
            unfinished = folder.with_name(f"{role}-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a script that was ended
            inflate(MODELS / role, unfinished, shape, device=str(torch_device(self.device)))
            unfinished.rename(folder)
            self.row(f"{role} made", seconds=time.monotonic() - began_s)
        return folder

    def long_model(self, role: str) -> Path:
        """Return a folder with the same weights, and room for long texts, which are noise."""
        folder = self.model(role)
        beside = folder.with_name(f"{role}-long")
        beside.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name != "config.json" and not (beside / path.name).exists():
                (beside / path.name).symlink_to(path)
        config = json.loads((folder / "config.json").read_text())
        longest = LONGEST_SMALL if self.is_small else LONGEST
        config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
        (beside / "config.json").write_text(json.dumps(config))
        return beside


def _said(name: str, value: float | str, expected: float | None) -> str:
    """Return a figure in words."""
    if isinstance(value, str):
        return f"{name} {value}"
    beside = f" ({value / expected:.2f} of the expected {expected:g})" if expected else ""
    return f"{name} {value:.4g}{beside}"


def options(script: str) -> argparse.ArgumentParser:
    """Return the parser of what every script is given."""
    found = argparse.ArgumentParser(prog=f"python -m lab.gpu_kit.{script}")
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--work", type=Path, required=True)
    found.add_argument("--device", required=True)
    found.add_argument("--prompt-file", type=Path, required=True)
    found.add_argument("--limit-s", type=float, required=True)
    found.add_argument("--small", action="store_true")
    return found


def run(script: str, measure: Callable[[Kit], None]) -> int:
    """Run a script; return its exit status. The last line on standard error says what failed."""
    given = options(script).parse_args()
    ends_at = time.monotonic() + given.limit_s
    where = given.out, given.work, given.device
    kit = Kit(script, *where, given.small, given.prompt_file, ends_at)
    try:
        measure(kit)
    except (ValueError, OSError, EngineError, SlipstreamError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        sys.stderr.write(f"{one_line(error)}\n")
        return 1
    return 0
