"""Writes a trace of one text of each arm, after the measurement, which tracing would slow down."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from pathlib import Path

from coordinator.launching.launcher import ConnectRay
from lab.experiments.engines import PairEngine, host_of
from lab.experiments.rows import file_name
from lab.experiments.runner import FIRST_SEED, Job
from proto.errors import OutputError
from proto.system import cannot_write, check_writable


def write_traces(
    jobs: Sequence[Job],
    folder: Path,
    connect_ray: ConnectRay | None,
    say: Callable[[str], None],
) -> list[Path]:
    """Write a trace file for each arm that is no peer; return the paths.

    Raises OutputError and other SlipstreamErrors.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {cannot_write(error)}") from error
    by_pair: dict[Hashable, list[Job]] = {}
    for job in jobs:
        if not job.arm.work.peer:
            by_pair.setdefault(host_of(job.arm), []).append(job)
    written = []
    for shared in by_pair.values():
        arm = shared[0].arm
        with closing(PairEngine(arm.pair, arm.launch, connect_ray, traced=True)) as engine:
            for job in shared:
                path = folder / f"{file_name(job.arm.name)}.json"
                check_writable(path, "--trace")
                say(f"trace: {job.arm.name}")
                prompt = job.talk(job.prompts[0]).next_turn()
                for _ in range(2):  # the first text warms up all caches; its trace is overwritten
                    engine.write(job.arm, [prompt], [FIRST_SEED])
                    engine.write_trace(path)
                written.append(path)
    return written
