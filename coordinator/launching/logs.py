"""Logs that stay: a folder for each run, of which the latest are kept.

They lie in $XDG_STATE_HOME/slipstream/logs (~/.local/state/slipstream/logs), one folder for each
run: `coordinator.log`, and what each node has printed; on another host of a Ray cluster only that.
Only this user can read them. No log ever ends a text: where nothing can be kept, one line says so.

Theory of operation: who has a run holds a lock in its folder, as in a runtime folder, so several
coordinators at once leave each other's alone. Each new run removes the oldest that have ended. A
node writes to its file directly; when that becomes too long its content moves to a second file,
which is all that is kept of what was printed before.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from coordinator.launching.runtime_folder import OWNER, has_owner, is_own, locked, remove_if_dead

logger = logging.getLogger(__name__)

COORDINATOR_LOG = "coordinator.log"
RUNTIME = "runtime"  # a file that names the runtime folder, which may be under another TMPDIR
OLDER = ".1"  # the end of the name of what a log held before it became too long
MAX_RUNS = 50  # that have ended and are kept, of coordinators; and as many of nodes alone
MAX_RUNS_BYTES = 1 << 26  # of all those of a kind
MAX_FILE_BYTES = 1 << 20
MAX_NODE_LOGS = 12  # of one run: a drafter may be started again for weeks
MAX_LINE = 1000  # characters
UNFINISHED_S = 3600.0  # a folder without an owner for so long was never finished
TAIL_BYTES = 1 << 14


def state_folder() -> Path:
    """Where the runs are kept. Raises OSError: this user has no home."""
    named = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The convention: a path that is not absolute does not count.
        base = Path(named) if os.path.isabs(named) else Path("~/.local/state").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return base / "slipstream" / "logs"


def stamp(now: datetime) -> str:
    """What a line begins with: 2026-03-01T12:00:00.123Z."""
    return now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def without_stamp(line: str) -> str:
    """The line of a log as it was said."""
    first, _, rest = line.partition(" ")
    return rest if len(first) == 24 and first[10] == "T" and first.endswith("Z") else line


class Logs:
    """Those of one run. `folder`: where they are.

    fallback  where they lie if they cannot be kept; it goes when the run ends
    """

    def __init__(self, fallback: Path) -> None:
        self._lock: int | None = None
        self._writing = threading.Lock()
        self._nodes: list[Path] = []
        self._has_failed = False
        try:
            self.folder, self._lock = _new_run(state_folder())
            _append(self.folder / RUNTIME, os.fsencode(fallback))
        except OSError as error:
            self.folder = fallback
            self._fail(f"logs cannot be kept ({error}); set XDG_STATE_HOME to a folder that can")
        _all.add(self)

    def note(self, line: str) -> None:
        """Add a line to the coordinator's own log, with the time."""
        words = " ".join(line.split())
        shown = "".join(letter if letter.isprintable() else "?" for letter in words)[:MAX_LINE]
        written = f"{stamp(datetime.now(UTC))} {shown}\n".encode(errors="replace")
        path = self.folder / COORDINATOR_LOG
        with self._writing:
            try:
                if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
                    path.replace(path.with_name(path.name + OLDER))
                _append(path, written)
            except OSError as error:
                self._fail(f"the log cannot be written ({error}); what happens is not kept")

    def of_node(self, identity: str) -> Path:
        """The new, empty file for what a node prints, of which the oldest is given up."""
        path = self.folder / f"{identity}.log"
        with contextlib.suppress(OSError):
            while len(self._nodes) >= MAX_NODE_LOGS:
                gone = self._nodes.pop(0)
                gone.unlink(missing_ok=True)
                gone.with_name(gone.name + OLDER).unlink(missing_ok=True)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        except OSError as error:
            self._fail(f"what the nodes print cannot be kept ({error})")
            return Path(os.devnull)
        self._nodes.append(path)
        return path

    def trim(self) -> None:
        """See that no node's log gets too long. Asked often."""
        for path in self._nodes:
            with contextlib.suppress(OSError):
                if path.stat().st_size > MAX_FILE_BYTES:
                    _shorten(path)

    def close(self) -> None:
        """The run has ended: from now on it is one of those that may be removed."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)

    def disown(self) -> None:
        """In a forked child: the run is its parent's, of which a thread may have been writing."""
        self.close()
        self._writing = threading.Lock()

    def _fail(self, line: str) -> None:
        """Say it once."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s", line)


_all: weakref.WeakSet[Logs] = weakref.WeakSet()


def _disown_all() -> None:
    """In a forked child: it does not make the run of its parent seem alive."""
    for logs in _all:
        logs.disown()


os.register_at_fork(after_in_child=_disown_all)


def runs(place: Path) -> list[Path]:
    """All runs in a folder, the one that was last written to last; none where it cannot be read."""
    try:
        return sorted((path for path in place.iterdir() if path.is_dir()), key=_written_at)
    except OSError:
        return []


def _written_at(run: Path) -> tuple[int, str]:
    """When its log was written to last: where it has ended, by its last line, which says so.

    Without a coordinator's log, when anything was. The name is for those of one moment.
    """
    times = [0]
    with contextlib.suppress(OSError):
        log = run / COORDINATOR_LOG
        files = [log] if log.exists() else [run, *run.iterdir()]
        times += [file.lstat().st_mtime_ns for file in files]
    return max(times), run.name


def runtime_folders() -> list[Path]:
    """The runtime folders of the runs that go on, as far as they are known here."""
    found = []
    with contextlib.suppress(OSError):
        for run in runs(state_folder()):
            with contextlib.suppress(OSError):
                if has_owner(run):
                    found.append(Path(os.fsdecode((run / RUNTIME).read_bytes()[:4096])))
    return found


def latest() -> Path | None:
    """Of the runs with a coordinator's log that have ended, the one that ended last."""
    try:
        found = [run for run in runs(state_folder()) if _is_of_coordinator(run)]
    except OSError:
        return None
    return next((run for run in reversed(found) if not has_owner(run)), None)


def tail(folder: Path, number: int) -> list[str]:
    """The last lines of a coordinator's log; none where it cannot be read."""
    try:
        with (folder / COORDINATOR_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            read = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return read.splitlines()[-number:]


def _new_run(place: Path) -> tuple[Path, int]:
    """A folder for a run, and the lock on it. Raises OSError."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(place):
        raise PermissionError(f"{place} is no folder of this user")
    place.chmod(0o700)
    _remove_oldest(place)
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    for number in range(1000):
        folder = place / (f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            try:
                return folder, locked(folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    raise FileExistsError(f"{place} has too many runs of this moment")


def _is_of_coordinator(run: Path) -> bool:
    """Whether it is not a run of nodes alone, as on the hosts of a Ray cluster."""
    return os.path.isfile(run / COORDINATOR_LOG)  # where it cannot be known, it is none


def _remove_oldest(place: Path) -> None:
    """Of the runs that have ended the latest stay, as many as the limits allow.

    Those of coordinators and those of nodes alone do not push each other out.
    """
    ended = [run for run in runs(place) if not has_owner(run)]
    of_coordinators = [run for run in ended if _is_of_coordinator(run)]
    for kind in (of_coordinators, [run for run in ended if run not in of_coordinators]):
        _remove_oldest_of(kind)


def _remove_oldest_of(ended: Sequence[Path]) -> None:
    """`ended`: runs of one kind, the latest last."""
    num_bytes = 0
    for number, run in enumerate(reversed(ended), 1):
        num_bytes += _size(run)
        if number >= MAX_RUNS or num_bytes > MAX_RUNS_BYTES:
            with contextlib.suppress(OSError):
                if (run / OWNER).exists():
                    remove_if_dead(run)
                elif is_own(run) and time.time() - run.stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(run, ignore_errors=True)


def _size(run: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in run.iterdir())
    except OSError:
        return 0


def _append(path: Path, written: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, written)
    finally:
        os.close(file)


def _shorten(path: Path) -> None:
    """Keep what a file ends with in a second one, and empty it: whoever writes to it goes on."""
    with path.open("rb+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE_BYTES))
        end = file.read(MAX_FILE_BYTES)
        file.truncate(0)
    older = path.with_name(path.name + OLDER)
    older.unlink(missing_ok=True)
    _append(older, end)
