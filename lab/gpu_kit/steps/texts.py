"""Generates whole texts: runs the experiment `gpu` (or `gpu_mps`), and writes a row per arm.

If the machine has enough CPU cores, coordinator and target do not use those of `DRAFTER_CORES`, so
that a drafter on the CPU has cores of its own.
"""

import contextlib
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median

from coordinator.launching.mps import PIPE, VISIBLE
from lab.experiments.command import DRAWN_WITH
from lab.experiments.description import Experiment
from lab.experiments.engines import host_of
from lab.experiments.folder import FILE, ROWS, Header, read_header
from lab.experiments.rows import Row, read
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.gpu_kit.steps.models import models_in
from lab.gpu_kit.steps.versions import MPS_DAEMON
from lab.needed import are_installed
from proto.errors import ConfigurationError
from proto.installation import ROOT

# -- mps -------------------------------------------------------------------------------------------

# Starts a daemon of NVIDIA's multi-process service (MPS) for the time of a measurement.
#
# Its pipe is in a folder of ours, so it affects only processes that are given this folder, and the
# compute mode of the GPU is not changed.

START_S, DAEMON_END_S, ASK_S = 20.0, 10.0, 5.0


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Start an MPS daemon, yield the environment for processes that share a GPU by it, and end it.

    Raises ConfigurationError: the daemon does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # With CUDA_VISIBLE_DEVICES the daemon would renumber the GPUs (`coordinator/launching/mps.py`).
    of_daemon = {name: value for name, value in os.environ.items() if name != VISIBLE}
    folders = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    environment = {**os.environ, **folders}
    for name in ("pipe", "log"):
        (folder / name).mkdir(exist_ok=True)
    log = folder / "daemon.txt"
    try:
        with log.open("wb") as file:
            # In the foreground (-f), so that it is our child process and can be ended by its id.
            daemon = subprocess.Popen(
                *([MPS_DAEMON, "-f"],),
                env={**of_daemon, **folders},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    except OSError as error:
        raise ConfigurationError(f"{MPS_DAEMON} does not start: {error.strerror}") from error
    try:
        _wait_for(daemon, environment, log)
        yield environment
    finally:
        _ask("quit", environment)
        _end(daemon)


def _wait_for(daemon: "subprocess.Popen[bytes]", environment: dict[str, str], log: Path) -> None:
    """Wait until the daemon answers, at most START_S seconds. Raises ConfigurationError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            break
        if _ask("get_server_list", environment):
            return
        time.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines() or ["no reason was given"]
    raise ConfigurationError(f"{MPS_DAEMON} does not start: {lines[-1]}")


def _ask(command: str, environment: dict[str, str]) -> bool:
    """Send a command to the daemon; return True if the daemon took it."""
    try:
        ended = subprocess.run(
            *([MPS_DAEMON],),
            input=f"{command}\n".encode(),
            env=environment,
            capture_output=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    """Wait for the daemon to end; after DAEMON_END_S seconds terminate it, then kill it."""
    ways: list[Callable[[], object]] = [daemon.poll, daemon.terminate, daemon.kill]
    for insist in ways:
        insist()
        try:
            daemon.wait(DAEMON_END_S)
        except subprocess.TimeoutExpired:
            continue
        return


# -- texts -----------------------------------------------------------------------------------------

DRAFTER_CORES = range(4, 12)  # CPU cores of the drafter in the arms of `gpu` that draft on the CPU
# Expected, not measured: seconds to load, check and warm up a pair of 8 B and 1 B, and seconds per
# token by the drafter's device.
PAIR_S = 60.0
TOKEN_S = {"cuda": 0.007, "cpu": 0.03}
SUMMARY_S = 10.0  # seconds of the step that are reserved for its work after the experiment
EXPERIMENT_END_S = 20.0  # seconds that the experiment's processes have to end
REHEARSAL = """\
title = "A rehearsal of the GPU experiment on a CPU"
repetitions = 1
warm_pairs = 1

[fixed]
max_tokens = 12
limit = 2

[[arms]]
policy = ["ar", "sync", "tree"]
"""


def measure(context: Context) -> None:
    """Run the texts of the experiment that are left, and write a row for each arm.

    Raises ValueError: the time was up, or the experiment failed.
    """
    models = models_in(context)
    name = "texts" if context.which == "gpu" else "texts-mps"
    folder, packed = context.work / name, context.out / f"{name}.tar.gz"
    _unpack(packed, folder)
    file = context.which
    if context.is_small:
        file = str(context.work / "rehearsal.toml")
        Path(file).write_text(REHEARSAL)
    command = [*(sys.executable, "-m", "lab.experiments", "experiment", file)]
    command += ["--out", str(folder)]
    if not are_installed(*DRAWN_WITH):
        command.append("--texts-only")
    command += [*("--models", str(context.work), "--prompt-file", str(context.prompts))]
    command += [*("--set", f"target={models.target}", "--set", f"drafter={models.drafter}")]
    with _environment(context) as environment:
        problem = _run(command, environment, context.limit_s - SUMMARY_S - EXPERIMENT_END_S)
    _summarise(context, folder)
    if folder.exists():
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(folder, name)
    if problem:
        raise ValueError(problem)


def _unpack(packed: Path, folder: Path) -> None:
    """Unpack the texts that an earlier call kept, if this machine lacks them. Raises ValueError."""
    if packed.exists() and not folder.exists():
        try:
            with tarfile.open(packed) as archive:
                archive.extractall(folder.parent, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{packed} cannot be unpacked ({error}); remove it") from error


@contextlib.contextmanager
def _environment(context: Context) -> Iterator[Mapping[str, str]]:
    """Yield the environment of the experiment: with an MPS daemon for `gpu_mps`, else without."""
    if context.which == "gpu_mps":
        with mps(context.work / "mps") as environment:
            yield environment
    else:
        yield {**os.environ, PIPE: ""}  # empty: keeps the coordinator from starting an MPS daemon


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run the experiment, at most `limit_s` seconds; return what went wrong in one line, or ""."""
    cores = os.sched_getaffinity(0)
    is_wide = cores >= set(range(max(DRAFTER_CORES) + 1))
    own = cores - set(DRAFTER_CORES) if is_wide else cores
    os.sched_setaffinity(0, own)  # inherited by the children; the drafter pins itself to its cores
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    finally:
        os.sched_setaffinity(0, cores)
    last = ""
    try:
        _, errors = process.communicate(timeout=max(1.0, limit_s))
        lines = errors.decode(errors="replace").strip().splitlines()
        for line in lines:
            say(line)
        last = lines[-1] if lines else "no reason was given"
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=EXPERIMENT_END_S)
            return "the time was up; the same command goes on with the texts that are left"
        process.kill()
        process.communicate()
        return "the time was up, and the experiment had to be killed; the same command goes on"
    return f"the experiment failed: {last}" if process.returncode else ""


def _summarise(context: Context, folder: Path) -> None:
    """Write a row for each arm that has texts."""
    if not (folder / ROWS).exists() or not (folder / FILE).exists():
        return
    header, rows = read_header(folder), read(folder / ROWS)
    for arm in header.arms:
        mine = [row for row in rows if row.arm == arm.name and row.stage == "main"]
        if mine:
            found = figures(mine, _ratios(header, rows, mine))
            context.record.measured(called(arm.settings), **found)


def usual_s(experiment: Experiment) -> float:
    """Return about how many seconds an experiment takes with the pair in large shapes."""
    arms = experiment.arms
    description = experiment.description
    texts_s = {
        arm.name: arm.sampling.max_tokens * TOKEN_S[arm.pair.drafter_device.partition(":")[0]]
        for arm in arms
    }
    pairs = {host_of(arm): texts_s[arm.name] for arm in arms}
    warm_s = sum(PAIR_S + description.warm_prompts * text_s for text_s in pairs.values())
    counted = sum(texts_s[arm.name] * (arm.work.limit or 1) for arm in arms)
    return warm_s + description.repetitions * counted


def called(settings: Mapping[str, object]) -> str:
    """Return the name of an arm in the report: policy, drafter's device and temperature."""
    device = settings.get("drafter_device") or "default"
    return f"{settings['policy']} {device} T={settings.get('temperature', 0.0)}"


def figures(rows: Sequence[Row], ratios: Sequence[float]) -> dict[str, float]:
    """Return the figures of an arm's texts; `ratios` are their speed-ups over plain decoding."""
    found = {
        "tokens_s": median(row.tokens_per_second for row in rows),
        "ms_per_token": median(1e3 * (row.wall_s - row.ttft_s) / _later(row) for row in rows),
        "first_ms": median(1e3 * row.ttft_s for row in rows),
        "tokens_pass": fmean(fmean(row.accept_lengths) for row in rows),
        "texts": float(len(rows)),
    }
    hosts = [row.figures["host_ms_per_pass"] for row in rows if row.figures is not None]
    found |= {"host_ms": median(hosts)} if hosts else {}
    return found | ({"speedup": median(ratios)} if ratios else {})


def _later(row: Row) -> int:
    """Return the number of tokens after the first pass, at least 1."""
    return max(1, len(row.tokens) - row.accept_lengths[0])


def _ratios(header: Header, rows: Sequence[Row], mine: Sequence[Row]) -> list[float]:
    """Return the speed-up of each text of an arm over the same text of its baseline."""
    baseline = next(arm.baseline for arm in header.arms if arm.name == mine[0].arm)
    plain = {
        (row.prompt, row.repetition): row.tokens_per_second
        for row in rows
        if row.arm == baseline and row.stage == "main"
    }
    return [
        row.tokens_per_second / plain[row.prompt, row.repetition]
        for row in mine
        if (row.prompt, row.repetition) in plain
    ]


if __name__ == "__main__":
    sys.exit(run_step(measure))
