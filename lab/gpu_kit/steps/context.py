"""What every step is given, and how it ends."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError
from lab.gpu_kit.recorder import FILE, Recorder
from proto.errors import SlipstreamError

FAILED = 1


@dataclass(frozen=True, slots=True)
class Context:
    """One run of a step.

    record    where its rows go
    which     what of several things the step is to measure: its argument in the plan
    out       folder of the results
    work      folder of what is large and made anew where it is lost: models
    is_small  tiny shapes: a rehearsal
    prompts   file of prompts
    limit_s   after which it is ended
    """

    record: Recorder
    which: str
    out: Path
    work: Path
    device: str
    is_small: bool
    prompts: Path
    limit_s: float

    @property
    def is_on_gpu(self) -> bool:
        """Whether CUDA is there to be measured."""
        return self.device.startswith("cuda")


def say(text: str) -> None:
    """Print at once: a run that is cut off has said what it found."""
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    """What the driver gives to every step."""
    found = argparse.ArgumentParser()
    found.add_argument("--step", required=True)
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--work", type=Path, required=True)
    found.add_argument("--device", required=True)
    found.add_argument("--prompts", type=Path, required=True)
    found.add_argument("--machine", default="")
    found.add_argument("--limit-s", type=float, required=True)
    found.add_argument("--small", action="store_true")
    found.add_argument("which", nargs="?", default="")
    return found


def run_step(measure: Callable[[Context], None]) -> int:
    """Measure; returns the exit status. The last line of an error says what is wrong."""
    options = parser().parse_args()
    started = time.monotonic()
    try:
        context = Context(
            Recorder(options.out / FILE, options.step, options.machine),
            *(options.which, options.out, options.work, options.device, options.small),
            options.prompts,
            options.limit_s,
        )
        measure(context)
        context.record.done(time.monotonic() - started)
    except (ValueError, EngineError, SlipstreamError) as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0
