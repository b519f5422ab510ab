"""What every step of the GPU kit is given, and how it reports its end."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.files import one_line
from engine.errors import EngineError, lacks_memory
from lab.gpu_kit.recorder import FILE, Recorder
from proto.errors import SlipstreamError

FAILED = 1


@dataclass(frozen=True, slots=True)
class Context:
    """The settings of one run of a step.

    record    writes the rows of the step
    which     the step's argument in the plan: which of several things it is to measure
    out       folder of the results
    work      folder of large files (models) that are made again if they are lost
    is_small  use tiny shapes: a rehearsal
    prompts   file of prompts
    limit_s   seconds after which the step is ended
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
        """Return True if the device is a CUDA GPU."""
        return self.device.startswith("cuda")


def say(text: str) -> None:
    """Print at once, so that a run that is cut off has printed all that it found."""
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments that the driver gives to every step."""
    found = argparse.ArgumentParser()
    found.add_argument("--step", required=True)
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--work", type=Path, required=True)
    found.add_argument("--device", required=True)
    found.add_argument(*("--prompt-file", "--prompts"), dest="prompts", type=Path, required=True)
    found.add_argument("--machine", default="")
    found.add_argument("--limit-s", type=float, required=True)
    found.add_argument("--small", action="store_true")
    found.add_argument("which", nargs="?", default="")
    return found


def run_step(measure: Callable[[Context], None]) -> int:
    """Run a step; return its exit status. On failure the last line of standard error says why."""
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
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        print(one_line(error), file=sys.stderr)
        return FAILED
    return 0
