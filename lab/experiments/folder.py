"""The folder of an experiment: its description (`experiment.json`) and its results (`rows.jsonl`).

experiment.json   the arms and what they are compared with; machine and versions of each run
rows.jsonl        a row for each text (`rows.py`)
summary.csv, table.md, *.png, report.html, answers/   made from these two
"""

import dataclasses
import errno
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lab.experiments.rows import RowFile
from lab.records import NO_OTHERS, from_json
from proto.errors import ConfigurationError, OutputError, shown
from proto.system import cannot_read, cannot_write

FILE, ROWS = "experiment.json", "rows.jsonl"
SUMMARY, REPORT, ANSWERS, TRACES = "summary.csv", "report.html", "answers", "traces"
TABLE = "table.md"
AFTER_PROMPT = "after the first tokens"  # what a speed counts where it is not a whole text
PICTURES = (
    *("speedup.png", "along_x.png", "categories.png", "acceptance.png", "tokens_per_pass.png"),
    "predicted.png",
)


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """What the results of an experiment need to know about an arm (a combination of settings).

    settings       all settings of its table, and those given for all arms
    baseline       name of the arm that it is compared with; empty: none (it is a baseline itself)
    is_same_text   its tokens must equal those of the baseline, one by one
    num_devices    number of devices that it uses
    all_devices    name of the arm that is plain decoding on as many devices; empty: there is none
    swept_from     name of the sweep that it belongs to, of which only the fastest arm is measured;
                   empty: none
    """

    __pydantic_config__ = NO_OTHERS
    name: str
    settings: dict[str, Any]
    baseline: str = ""
    is_same_text: bool = False
    swept_from: str = ""
    num_devices: int = 1
    all_devices: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of the experiment's command: when (UTC), where and with what software.

    load  CPU cores that other processes used just before the run
    """

    __pydantic_config__ = NO_OTHERS
    at: str
    machine: str
    versions: dict[str, str]
    commit: str
    load: float


@dataclass(frozen=True, slots=True)
class Header:
    """The description of an experiment, as `experiment.json` keeps it.

    digest  hash of everything that decides the rows: another digest is another experiment
    x       the setting that a picture has on its x axis; empty: none
    runs    every run of the command, in order of time
    speed   what a speed counts: AFTER_PROMPT, or "" for whole texts, prompt included
    """

    __pydantic_config__ = NO_OTHERS
    title: str
    question: str
    digest: str
    x: str
    prompts: str
    num_prompts: int
    repetitions: int
    max_tokens: int
    arms: tuple[ArmRecord, ...]
    runs: tuple[RunRecord, ...] = field(default=())
    speed: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the header that JSON text states. Raises ValueError."""
        return from_json(cls, text)


class Folder:
    """The folder that an experiment is written to; locked against other processes while in use."""

    def __init__(self, path: Path) -> None:
        """Make the folder, or open an existing one, and lock it.

        Raises ConfigurationError, OutputError.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise OutputError(f"cannot make the folder {path}: {cannot_write(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigurationError(
                f"another experiment is being written to {path}; choose another --out"
            ) from error

    def open(self, header: Header) -> tuple[Header, RowFile]:
        """Return the header with all earlier runs of this experiment, and its file of rows.

        This writes no result, but checks that results can be written. Raises ConfigurationError
        (the folder holds another experiment), OutputError.
        """
        earlier = read_header(self.path) if (self.path / FILE).exists() else None
        if earlier is None and (self.path / ROWS).exists():
            raise ConfigurationError(f"{self.path} has rows without {FILE}; choose another --out")
        if earlier is not None and earlier.digest != header.digest:
            raise ConfigurationError(
                f"{self.path} holds another experiment ({shown(earlier.title)}), or this one with "
                "other settings or prompts; choose another --out"
            )
        rows = RowFile(self.path / ROWS)
        self._check_writable()
        return dataclasses.replace(header, runs=earlier.runs if earlier else ()), rows

    def begin(self, header: Header, run: RunRecord) -> Header:
        """Write `experiment.json` with a run added; return the new header. Raises OutputError."""
        header = dataclasses.replace(header, runs=(*header.runs, run))
        write_whole(self.path / FILE, json.dumps(dataclasses.asdict(header), indent=1))
        return header

    def _check_writable(self) -> None:
        """Raise OutputError if a result, which will come hours later, could not be written here."""
        trial = self.path / f".{FILE}.new"
        try:
            trial.write_bytes(b" ")  # one byte: on a full disk an empty file could still be made
            trial.unlink()
            if (self.path / ROWS).exists():
                (self.path / ROWS).open("ab").close()
            for name in (ANSWERS, TRACES):
                _check_folder(self.path / name)
        except OSError as error:
            where = self.path if error.filename in (None, str(trial)) else error.filename
            raise OutputError(f"cannot write to {where}: {cannot_write(error)}") from error
        for name in (FILE, SUMMARY, TABLE, REPORT, *PICTURES):
            if (self.path / name).is_dir():  # an existing file would simply be replaced
                raise OutputError(
                    f"{self.path / name} is a folder, and a file has to be written there; remove "
                    "it, or choose another --out"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def _check_folder(path: Path) -> None:
    """Raise OSError if this path exists and is no folder, or is a folder that is not writable."""
    if path.is_dir():
        trial = path / ".new"
        trial.write_bytes(b" ")
        trial.unlink()
    elif path.exists() or path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "It is no folder", str(path))


def read_header(folder: Path) -> Header:
    """Read and return an experiment's header from its folder. Raises ConfigurationError."""
    path = folder / FILE
    try:
        return Header.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {cannot_read(error)}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not an experiment of this version") from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically: it is complete or unchanged. Raises OutputError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OutputError(f"cannot write {path}: {cannot_write(error)}") from error
