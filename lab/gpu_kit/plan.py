"""The plan of the GPU kit: its steps, their order, and how long each may take (pure).

Theory of operation
-------------------
A *part* is what fits into one call of under ten minutes; it is a list of *steps*. Each step is a
process of its own with a time limit of its own, so that a step that hangs or dies loses only its
own figures. A step begins only if as much of the call's time is left as it usually takes, and it is
ended when that time is up. Finished steps are not run again: the same command run once more resumes
with the steps that are left.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.gpu_kit.rows import KitRow, latest

Need = Literal["gpu", "mps"]

CALL_LIMIT_S = 540.0  # default time limit of one call of the kit
REPORT_S = 5.0  # reserved for the report
MODULES = "lab.gpu_kit.steps."


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the kit, which runs as a process of its own.

    module     name of the module in `steps/` that runs
    limit_s    seconds after which it is ended
    usual_s    seconds that it takes with models of full size; it does not begin with less time left
    arguments  arguments besides those that every step gets
    needs      what the machine must have; otherwise the step is skipped
    """

    name: str
    part: int
    title: str
    module: str
    limit_s: float
    usual_s: float
    arguments: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()


PLAN = (
    Step("versions", 1, "Versions and state of the machine", "versions", 90, 15),
    Step("engine-tests", 1, "Tests of the engine on the GPU", "tests", 300, 90, ("engine",)),
    Step("flex-tests", 1, "Tests of attention split over the keys", "tests", 400, 120, ("flex",)),
    Step("models", 2, "Models in larger shapes; what a copy reaches", "models", 300, 60),
    Step("passes-target", 2, "Passes of the target", "passes", 300, 90, ("target",)),
    Step("passes-drafter", 2, "Draft steps", "passes", 150, 40, ("drafter",)),
    Step("profile-target", 2, "Where a target pass goes", "profile", 120, 40, ("target",)),
    Step("profile-drafter", 2, "Where a draft step goes", "profile", 90, 25, ("drafter",)),
    Step("texts", 3, "Texts: drafter on the GPU, on the CPU", "texts", 480, 300, ("gpu",)),
    Step(
        *("texts-mps", 3, "Texts: both nodes on one GPU under MPS", "texts", 300, 150),
        arguments=("gpu_mps",),
        needs=("gpu", "mps"),
    ),
    Step("choices-tests", 4, "Tests of choices on the GPU", "tests", 200, 40, ("choices",)),
    Step("pair-tests", 4, "Tests of the pair on the GPU", "tests", 400, 100, ("pair",)),
)
PARTS = tuple(sorted({step.part for step in PLAN}))


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine lacks, as far as it decides which steps run.

    why_no_gpu  why there is no GPU; empty: there is one
    why_no_mps  why NVIDIA's MPS daemon cannot be started; empty: it can
    """

    why_no_gpu: str = ""
    why_no_mps: str = ""


def why_skipped(step: Step, machine: Machine) -> str:
    """Return why the step is skipped on this machine; "" if it is not."""
    reasons = {"gpu": machine.why_no_gpu, "mps": machine.why_no_mps}
    return next((reasons[need] for need in step.needs if reasons[need]), "")


def wanted(parts: Collection[int], rows: Iterable[KitRow]) -> list[Step]:
    """Return the steps of these parts (empty: of all) that are not done yet, in order."""
    done = {row.step for row in rows if row.state == "done"}
    return [step for step in PLAN if step.part in (parts or PARTS) and step.name not in done]


def limit_s(step: Step, left_s: float, *, is_small: bool) -> float | None:
    """Return the seconds that a step may take if `left_s` are left; None if it must not begin."""
    usual_s = min(5.0, step.usual_s) if is_small else step.usual_s
    left_s -= REPORT_S
    return None if left_s < usual_s else min(step.limit_s, left_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Which steps of a run are done, skipped, failed and left, by name."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[str, ...]
    left: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[KitRow], parts: Collection[int] = ()) -> "Outcome":
        """Return the outcome of the steps of these parts (empty: of all).

        A step without a row about the step as a whole is left.
        """
        states = {row.step: row.state for row in latest(rows) if not row.cell}
        mine = [step.name for step in PLAN if step.part in (parts or PARTS)]
        by_state = {
            state: tuple(name for name in mine if states.get(name, "left") == state)
            for state in ("done", "skipped", "failed", "left")
        }
        return cls(**by_state)
