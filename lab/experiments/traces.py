"""A trace of one text of each arm, written after the measurement, which it must not slow down."""

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
    """The files, one for each arm of a pair. Raises SlipstreamError."""
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
                for _ in range(2):  # the first is the one that makes all caches warm
                    engine.write(job.arm, [prompt], [FIRST_SEED])
                    engine.write_trace(path)
                written.append(path)
    return written
