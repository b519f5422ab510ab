"""Runs the steps that are left, each as a process with a time limit, and updates the report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lab.experiments.folder import write_whole
from lab.gpu_kit import report
from lab.gpu_kit.plan import MODULES, Machine, Outcome, Step, limit_s, wanted, why_skipped
from lab.gpu_kit.recorder import FILE, Recorder, read
from lab.gpu_kit.rows import KitRow
from proto.errors import ConfigurationError, OutputError
from proto.installation import ROOT
from proto.system import cannot_write

ASK_LIMIT_S, END_S = 120.0, 15.0
LOG, PAGE, TABLES = "log.txt", "report.html", "report.txt"
RESULTS = "gpu-results"  # folder of the working tree for results, also those of earlier calls
# Environment of every step: nothing in the kit may use the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one call of the kit.

    parts    numbers of the parts to run; empty: all
    out      folder of the results
    work     folder of large files that can be made again (models)
    limit_s  seconds for the whole call, counted from `started` (time.monotonic)
    earlier  folders with results of earlier calls, which are continued if `out` has none
    kept     a lasting folder of this machine, to which results are copied after each step
    """

    parts: Collection[int]
    out: Path
    work: Path
    device: str
    is_small: bool
    prompts: Path
    limit_s: float
    started: float
    earlier: Sequence[Path]
    kept: Path

    @property
    def left_s(self) -> float:
        """Return the seconds that are left of the call's time."""
        return self.limit_s - (time.monotonic() - self.started)


def run(settings: Settings, say: Say) -> Outcome:
    """Run the steps of the wanted parts that are left; return the states of all their steps.

    Raises ConfigurationError, OutputError.
    """
    _take_over_earlier(settings, say)
    rows_file = settings.out / FILE
    machine, name = _ask(settings)
    say(name)
    if others := {row.machine for row in read(rows_file)} - {name}:
        raise ConfigurationError(
            f"{settings.out} holds results of another machine ({', '.join(sorted(others))}); "
            "choose another --out, or remove it"
        )
    for step in wanted(settings.parts, read(rows_file)):
        _run_one(step, settings, machine, name, say)
        write_report(settings.out)
        _keep(settings)
    write_report(settings.out)
    return Outcome.of(read(rows_file), settings.parts)


def write_report(out: Path) -> str:
    """Write the report as a page and as text tables; return the text. Raises OutputError."""
    rows = read(out / FILE)
    text = report.as_text(rows)
    write_whole(out / TABLES, text)
    write_whole(out / PAGE, report.as_page(rows))
    return text


def _take_over_earlier(settings: Settings, say: Say) -> None:
    """Copy results of earlier calls to an empty `out`: those with the largest file of rows.

    Raises OutputError.
    """
    out = settings.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = [one for one in settings.earlier if one != out and (one / FILE).exists()]
        if found and not (out / FILE).exists():
            fullest = max(found, key=lambda one: (one / FILE).stat().st_size)
            shutil.copytree(fullest, out, dirs_exist_ok=True)
            say(f"goes on with what {fullest} has")
    except OSError as error:
        raise OutputError(f"cannot write to {out}: {cannot_write(error)}") from error


def _keep(settings: Settings) -> None:
    """Copy the results to the lasting folder, so that a call with a new `out` finds them.

    Raises OutputError.
    """
    if settings.kept == settings.out:
        return
    try:
        shutil.copytree(settings.out, settings.kept, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise OutputError(f"cannot write to {settings.kept}: {error}") from error


def _ask(settings: Settings) -> tuple[Machine, str]:
    """Return what this machine can do, and its name. Raises ConfigurationError."""
    command = [sys.executable, "-m", f"{MODULES}versions", "--ask", settings.device]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"torch was not loaded in {ASK_LIMIT_S:.0f} s") from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no reason was given"]
        raise ConfigurationError(
            f"this Python cannot run the kit ({lines[-1]}); use lab/gpu_kit/start.py"
        )
    said = json.loads(ended.stdout.strip().splitlines()[-1])
    no_gpu = said["why_no_gpu"]
    if not no_gpu and settings.is_small and not settings.device.startswith("cuda"):
        no_gpu = "a rehearsal on the CPU"
    if no_gpu and settings.device.startswith("cuda"):
        raise ConfigurationError(f"{no_gpu}; --small rehearses the kit on a CPU")
    no_mps = no_gpu or said["why_no_mps"]
    return Machine(no_gpu, no_mps), said["name"]


def _run_one(step: Step, settings: Settings, machine: Machine, name: str, say: Say) -> None:
    """Run one step, or say (and record) why it is skipped or left for later."""
    title = f"part {step.part}, {step.name}"
    record = Recorder(settings.out / FILE, step.name, name)
    if reason := why_skipped(step, machine):
        say(f"{title}: skipped, {reason}")
        if _last(settings.out, step) != ("skipped", reason):
            record.skipped("", reason)
        return
    most_s = limit_s(step, settings.left_s, is_small=settings.is_small)
    if most_s is None:
        say(f"{title}: left for the next call ({max(0.0, settings.left_s):.0f} s are left)")
        return
    say(f"{title}: {step.title} (at most {most_s:.0f} s)")
    started = time.monotonic()
    problem = _run_process(step, settings, name, most_s)
    took_s = time.monotonic() - started
    if problem:
        Recorder(settings.out / FILE, step.name, name).failed("", problem)
    say(f"{title}: {problem or 'done'} ({took_s:.0f} s)")


def _last(out: Path, step: Step) -> tuple[str, str] | None:
    """Return state and note of the last row about the step as a whole; None if there is none."""
    mine: list[KitRow] = [row for row in read(out / FILE) if row.step == step.name and not row.cell]
    return (mine[-1].state, mine[-1].note) if mine else None


def _run_process(step: Step, settings: Settings, name: str, most_s: float) -> str:
    """Run a step as a process of its own; return what went wrong in one line, or ""."""
    command = [
        *(sys.executable, "-m", f"{MODULES}{step.module}", *step.arguments),
        *("--step", step.name, "--out", str(settings.out), "--work", str(settings.work)),
        *("--device", settings.device, "--prompt-file", str(settings.prompts)),
        *("--machine", name, "--limit-s", f"{most_s:.0f}"),
        *(["--small"] if settings.is_small else []),
    ]
    with (settings.out / LOG).open("ab") as log:
        log.write(f"\n== {step.name}\n".encode())
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(os.environ, is_small=settings.is_small),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with all that it has started
        )
        tail = _Tail(process, log)
        try:
            status = process.wait(most_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"ended after its {most_s:.0f} s; what was measured is kept"
        except BaseException:
            _end(process)
            raise
        finally:
            tail.finish()
    return "" if status == 0 else tail.last or f"ended with status {status}"


def _environment(given: Mapping[str, str], *, is_small: bool) -> dict[str, str]:
    """Return the environment of a step; a rehearsal computes with one thread."""
    threads = {"OMP_NUM_THREADS": "1"} if is_small else {}
    return {**given, **OFFLINE, **threads, "PYTHONUNBUFFERED": "1"}


class _Tail:
    """Copies what a process prints to a log and to standard output, and keeps the last line."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: BinaryIO) -> None:
        assert process.stdout is not None
        self.last = ""
        self._lines = process.stdout
        self._log = log
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        """Copy each line to the log and to stdout until the output ends; `last` is the last one."""
        for line in self._lines:
            self._log.write(line)
            self._log.flush()
            text = line.decode(errors="replace").rstrip()
            self.last = text or self.last
            sys.stdout.write(f"  {text}\n")
            sys.stdout.flush()

    def finish(self) -> None:
        """Wait until all output is copied, but at most END_S seconds.

        A process that lives on may hold the pipe open.
        """
        self._thread.join(END_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a step with all processes that it started: SIGTERM first, SIGKILL after END_S seconds."""
    for insist in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, insist)
            process.wait(END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def words(outcome: Outcome, settings: Settings, command: Sequence[str]) -> str:
    """Return a few lines that say which steps are done, skipped, failed or left."""
    lines = [f"{len(outcome.done)} steps are done, in {settings.out}"]
    for state, names in (("skipped", outcome.skipped), ("failed", outcome.failed)):
        if names:
            lines.append(f"{state}: {', '.join(names)}")
    if outcome.left or outcome.failed:
        left = ", ".join((*outcome.failed, *outcome.left))
        lines.append(f"left: {left}; the same command goes on: {' '.join(command)}")
    return "\n".join(lines)
