"""What the kit measures, in which order, and how long each step may take (pure).

Theory of operation
-------------------
A *part* is what fits into one call of under ten minutes; it is a list of *steps*, and each step is
a process of its own with a limit of its own, so that one that hangs or dies costs its own figures
and no others. A step is begun only if as much of the call's time is left as it usually takes, and
ended when that time is up. What is done is not done again: running the same command once more goes
on with what is left.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.gpu_kit.rows import KitRow, latest

Need = Literal["gpu", "mps"]

CALL_LIMIT_S = 540.0  # of all that one call of the kit does
REPORT_S = 5.0  # that are kept for the report
MODULES = "lab.gpu_kit.steps."


@dataclass(frozen=True, slots=True)
class Step:
    """One process of the kit.

    module     what runs, in `steps/`
    arguments  that it is given besides those of every step
    limit_s    after which it is ended
    usual_s    that it takes, about, with models of full size; it is not begun with less
    needs      without which it is skipped
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
    Step("attention", 1, "Masked attention by kernel", "attention", 300, 90),
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
    Step("choice", 4, "The choice at 151,936 tokens", "choice", 150, 30),
    Step("choices-tests", 4, "Tests of choices on the GPU", "tests", 200, 40, ("choices",)),
    Step("pair-tests", 4, "Tests of the pair on the GPU", "tests", 400, 100, ("pair",)),
)
PARTS = tuple(sorted({step.part for step in PLAN}))


@dataclass(frozen=True, slots=True)
class Machine:
    """What of it decides which steps run.

    why_no_gpu  empty: there is one
    why_no_mps  empty: its daemon can be started
    """

    why_no_gpu: str = ""
    why_no_mps: str = ""


def why_skipped(step: Step, machine: Machine) -> str:
    """In a few words; empty: it is not."""
    reasons = {"gpu": machine.why_no_gpu, "mps": machine.why_no_mps}
    return next((reasons[need] for need in step.needs if reasons[need]), "")


def wanted(parts: Collection[int], rows: Iterable[KitRow]) -> list[Step]:
    """The steps of these parts that are not done yet, in order; no parts: of all."""
    done = {row.step for row in rows if row.state == "done"}
    return [step for step in PLAN if step.part in (parts or PARTS) and step.name not in done]


def limit_s(step: Step, left_s: float, *, is_small: bool) -> float | None:
    """How long it may take, if so much of the call is left; None: it is not begun."""
    usual_s = min(5.0, step.usual_s) if is_small else step.usual_s
    left_s -= REPORT_S
    return None if left_s < usual_s else min(step.limit_s, left_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a run stands: names of steps."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[str, ...]
    left: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[KitRow], parts: Collection[int] = ()) -> "Outcome":
        """Of the steps of these parts; one that has neither ended nor failed is left."""
        states = {row.step: row.state for row in latest(rows) if not row.cell}
        mine = [step.name for step in PLAN if step.part in (parts or PARTS)]
        by_state = {
            state: tuple(name for name in mine if states.get(name, "left") == state)
            for state in ("done", "skipped", "failed", "left")
        }
        return cls(**by_state)
