"""Keeps the logs of the latest runs, in one folder for each run.

They lie in $XDG_STATE_HOME/slipstream/logs (~/.local/state/slipstream/logs). The folder of a run
has `coordinator.log` and a file for what each node has printed; on another host of a Ray cluster
only the files of nodes. Only this user can read them. An error in logging never ends a text: where
logs cannot be kept, one warning says so.

Theory of operation: the process that a run belongs to holds a lock in its folder, as in a runtime
folder, so that several coordinators at once do not remove each other's logs. Each new run removes
the oldest runs that have ended. A node writes to its file directly. When the file becomes too long,
its last part moves to a second file, and what was printed before that is lost.
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
OLDER = ".1"  # suffix of the file that holds the older part of a log
MAX_RUNS = 50  # ended runs of coordinators that are kept; and as many runs of nodes alone
MAX_RUNS_BYTES = 1 << 26  # of all kept runs of one of these two kinds
MAX_FILE_BYTES = 1 << 20
MAX_NODE_LOGS = 12  # of one run, because a drafter may be started again for weeks
MAX_LINE = 1000  # characters
UNFINISHED_S = 3600.0  # a folder that has no owner file after this time was never finished
TAIL_BYTES = 1 << 14


def state_folder() -> Path:
    """Return the folder that keeps the logs of all runs. Raises OSError: no home."""
    named = os.environ.get("XDG_STATE_HOME", "")
    try:
        # By the XDG convention, a path that is not absolute is ignored.
        base = Path(named) if os.path.isabs(named) else Path("~/.local/state").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return base / "slipstream" / "logs"


def stamp(now: datetime) -> str:
    """Return the time stamp that begins a line of a log: 2026-03-01T12:00:00.123Z."""
    return now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def without_stamp(line: str) -> str:
    """Return a line of a log without the time stamp at its beginning, if it has one."""
    first, _, rest = line.partition(" ")
    return rest if len(first) == 24 and first[10] == "T" and first.endswith("Z") else line


class Logs:
    """The logs of one run: makes their folder, `folder`, and writes the coordinator's own log.

    fallback  the folder that is used if logs cannot be kept; it is removed when the run ends
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
        """Append a line to the coordinator's own log, with the time."""
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
        """Make a new log file for a node and return it; of too many, delete the oldest.

        Returns /dev/null where the file cannot be made.
        """
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
        """Shorten the node logs that are longer than MAX_FILE_BYTES. Called often."""
        for path in self._nodes:
            with contextlib.suppress(OSError):
                if path.stat().st_size > MAX_FILE_BYTES:
                    _shorten(path)

    def close(self) -> None:
        """Release the lock on the run's folder: it has ended, and later runs may remove it."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)

    def disown(self) -> None:
        """In a forked child: release the run's lock, and make a new lock for writing.

        A thread of the parent may have held the old lock while it wrote.
        """
        self.close()
        self._writing = threading.Lock()

    def _fail(self, line: str) -> None:
        """Log a warning, but only the first one."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s", line)


_all: weakref.WeakSet[Logs] = weakref.WeakSet()


def _disown_all() -> None:
    """In a forked child: release all runs, whose owner is the parent."""
    for logs in _all:
        logs.disown()


os.register_at_fork(after_in_child=_disown_all)


def runs(place: Path) -> list[Path]:
    """Return all runs in a folder, the one last written to at the end; empty if unreadable."""
    try:
        return sorted((path for path in place.iterdir() if path.is_dir()), key=_written_at)
    except OSError:
        return []


def _written_at(run: Path) -> tuple[int, str]:
    """Return when a run's log was last written to (in ns), and its name to sort equal times.

    For a run without a coordinator's log, the time of its newest file. The last line of the log of
    a run that has ended says so, which makes this the time of its end.
    """
    times = [0]
    with contextlib.suppress(OSError):
        log = run / COORDINATOR_LOG
        files = [log] if log.exists() else [run, *run.iterdir()]
        times += [file.lstat().st_mtime_ns for file in files]
    return max(times), run.name


def runtime_folders() -> list[Path]:
    """Return the runtime folders of running coordinators, as their logs name them."""
    found = []
    with contextlib.suppress(OSError):
        for run in runs(state_folder()):
            with contextlib.suppress(OSError):
                if has_owner(run):
                    found.append(Path(os.fsdecode((run / RUNTIME).read_bytes()[:4096])))
    return found


def latest() -> Path | None:
    """Return the folder of the coordinator's run that ended last; None if there is none."""
    try:
        found = [run for run in runs(state_folder()) if _is_of_coordinator(run)]
    except OSError:
        return None
    return next((run for run in reversed(found) if not has_owner(run)), None)


def tail(folder: Path, number: int) -> list[str]:
    """Return the last `number` lines of the coordinator's log in a folder; empty if unreadable."""
    try:
        with (folder / COORDINATOR_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            read = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return read.splitlines()[-number:]


def _new_run(place: Path) -> tuple[Path, int]:
    """Make a folder for a run; return it and the descriptor of its lock. Raises OSError."""
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
    """True if a run has a coordinator's log (other hosts have only logs of nodes)."""
    return os.path.isfile(run / COORDINATOR_LOG)  # an unreadable folder counts as one of nodes


def _remove_oldest(place: Path) -> None:
    """Remove the oldest runs that have ended, until the limits on number and bytes hold.

    Runs of coordinators and runs of nodes alone are counted apart.
    """
    ended = [run for run in runs(place) if not has_owner(run)]
    of_coordinators = [run for run in ended if _is_of_coordinator(run)]
    for kind in (of_coordinators, [run for run in ended if run not in of_coordinators]):
        _remove_oldest_of(kind)


def _remove_oldest_of(ended: Sequence[Path]) -> None:
    """Remove the oldest of `ended` (ended runs of one kind, the latest last) beyond the limits."""
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
    """Move the end of a file to a second one and empty the first; its writer goes on."""
    with path.open("rb+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE_BYTES))
        end = file.read(MAX_FILE_BYTES)
        file.truncate(0)
    older = path.with_name(path.name + OLDER)
    older.unlink(missing_ok=True)
    _append(older, end)
