"""Script A: what the device does by itself: memory, passes, choices, a load for 32k tokens."""

import os
import platform
import subprocess
import sys
import time
from statistics import median

import torch

from engine.checkpoint.model import LoadedModel, load_model
from engine.choice.coupling import choose, usual_choices
from engine.choice.coupling_on_gpu import capture_on, record_choices
from engine.choice.logit_graphs import Captures
from engine.choice.sampling import Sampling
from engine.device import torch_device
from engine.errors import OutOfMemory
from engine.forward.graphs import recorder
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from lab.experiments.surroundings import commit
from lab.gpu_kit.kit import LONGEST, LONGEST_SMALL, Kit, run
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import free_memory, seconds, typical

QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,compute_mode"
ROW_COUNTS = {"target": (1, 5, 9, 17), "drafter": (1, 4, 8)}
CONTEXTS, CONTEXTS_SMALL = (200, 700, 4000), (60,)
VOCABULARY, VOCABULARY_SMALL = 128_256, 1_000
NUM_TIMED = 20
LONG_LOAD_S = 120.0  # left at least, or the load for long texts is not begun
# Milliseconds, measured on an H200 or estimated from it (docs/LOG.md, 2026-11-26).
EXPECTED = {
    ("target", 1, 200): 5.2, ("target", 5, 200): 5.2, ("target", 17, 200): 5.7,
    ("drafter", 1, 200): 1.05, ("drafter", 4, 200): 1.14,
}  # fmt: skip


def measure(kit: Kit) -> None:
    """Measure it all, the important things first. Raises ModelError, ValueError."""
    machine(kit)
    for role in ("target", "drafter"):
        loaded = load_model(str(kit.long_model(role)), device=kit.device)
        passes(kit, role, loaded)
        del loaded
        free_memory()
    choices(kit)
    if kit.left_s > LONG_LOAD_S or kit.is_small:
        long_load(kit)


def machine(kit: Kit) -> None:
    """Say which machine this is, and how fast it copies."""
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": commit() or "not known",
        "cores": str(len(os.sched_getaffinity(0))),
    }
    if kit.is_on_gpu:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        about["gpu"] = " ".join(ended.stdout.split()) or ended.stderr[:100]
    kit.row("machine", {}, **about)
    where = torch_device(kit.device)
    source = torch.ones(1 << (24 if kit.is_small else 32), dtype=torch.uint8, device=where)
    copy = torch.empty_like(source)
    took_s = typical(lambda: copy.copy_(source), where, count=NUM_TIMED)
    kit.row("a copy, read and written", {"GB_s": 3800.0}, GB_s=2 * source.nbytes / took_s / 1e9)


def passes(kit: Kit, role: str, loaded: LoadedModel) -> None:
    """Time passes by rows and context, as a text runs them: until the tokens are on the host."""
    contexts = CONTEXTS_SMALL if kit.is_small else CONTEXTS
    began_s = time.monotonic()
    executor = make_executor(loaded, max(contexts) + NUM_TREE_SLOTS, row_counts=ROW_COUNTS[role])
    executor.warm_up(ROW_COUNTS[role])
    kit.row(f"{role} warm", seconds=time.monotonic() - began_s, backend=executor.backend)
    read = 0
    for context in contexts:
        read = read_up_to(executor, read, context)
        for num_rows in ROW_COUNTS[role]:
            first_s, pass_s = pass_seconds(executor, context, num_rows)
            expected = EXPECTED.get((role, num_rows, context))
            kit.row(
                f"{role}, {num_rows} rows after {context}",
                {"ms": expected} if expected else {},
                ms=1e3 * pass_s,
                first_ms=1e3 * first_s,
            )
    executor.free()


def pass_seconds(executor: ModelExecutor, context: int, num_rows: int) -> tuple[float, float]:
    """Return the seconds of the first pass of a chain after a context, and a later median."""
    feed = chain(num_rows, context)

    def once() -> torch.Tensor:
        return executor.run(feed, range(num_rows)).argmax(-1).cpu()

    device = executor.loaded.device
    took = [seconds(once, device) for _ in range(NUM_TIMED + 1)]
    return took[0], median(took[1:])


def choices(kit: Kit) -> None:
    """Time the choice of tokens from logits of a real vocabulary, recorded and to the host."""
    where = torch_device(kit.device)
    logits = torch.randn(17, VOCABULARY_SMALL if kit.is_small else VOCABULARY, device=where)
    if kit.is_on_gpu:  # those of the models before are for other numbers of rows
        capture_on(where, Captures(recorder(where), (1, 5, 17)))
    record_choices(usual_choices(()), logits, (1, 5, 17))
    for name, sampling in (
        ("greedy", Sampling()),
        ("at 0.8", Sampling(0.8)),
        ("top-p 0.95", Sampling(0.8, top_p=0.95)),
        ("top-k 20", Sampling(0.8, top_k=20)),
    ):
        for num_rows in (1, 5, 17):
            rows, positions = logits[:num_rows], range(num_rows)

            def once(
                rows: torch.Tensor = rows,
                positions: range = positions,
                sampling: Sampling = sampling,
            ) -> list[int]:
                return choose(rows, sampling, 7, 0, positions)

            took_s = typical(once, where, count=NUM_TIMED)
            kit.row(f"choice {name}, {num_rows} rows", ms=1e3 * took_s)


def long_load(kit: Kit) -> None:
    """Load the target for texts of 32k tokens, and time its passes there."""
    loaded = load_model(str(kit.long_model("target")), device=kit.device)
    context = (LONGEST_SMALL if kit.is_small else LONGEST) - 2 * NUM_TREE_SLOTS
    began_s = time.monotonic()
    try:
        executor = make_executor(loaded, context + NUM_TREE_SLOTS, row_counts=(1, 5))
        executor.warm_up((1, 5))
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        kit.row("target for 32k", failed=str(error)[:200])
        return
    kit.row("target for 32k", seconds=time.monotonic() - began_s)
    read_up_to(executor, 0, context)
    for num_rows in (1, 5):
        _, pass_s = pass_seconds(executor, context, num_rows)
        kit.row(f"target, {num_rows} rows after {context}", ms=1e3 * pass_s)
    executor.free()


if __name__ == "__main__":
    sys.exit(run("passes", measure))
