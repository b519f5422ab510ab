"""Writes the journal: a thread that appends records and syncs them, many at once.

What is written is decided by `ledger.py`. The folder has these files, which only their owner can
read (they hold prompts and answers):

journal          the records
journal.new      while the journal is written anew
journal.garbled  a journal that was damaged, as it was found
lock             held by the coordinator that writes here
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from coordinator.journal.ledger import Action, Append, Compact, KeptAnswer, Ledger
from coordinator.journal.records import Asked, Found, Head, Record, read
from proto.errors import ConfigurationError
from proto.system import cannot_read, cannot_write

logger = logging.getLogger(__name__)

BATCH_S = 0.002  # in which records are gathered before they are written and synced together
TICK_S = 1.0
JOURNAL, NEW, GARBLED, LOCK = "journal", "journal.new", "journal.garbled", "lock"

Then = Callable[[], None]


class Journal:
    """The journal of one coordinator. Records may be noted in any thread.

    The folder is made and locked at once, so that a mistake is told before models are loaded. Then
    `open` reads what it holds.

    answers  those that the folder held, by name
    notices  lines for the user about what was found
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Make and lock the folder. Raises ConfigurationError."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock_file = _locked(folder)
        self.notices = [
            f"the journal in {folder} holds prompts and answers: this user can read them, and they "
            "are not encrypted"
        ]
        self.answers: dict[str, KeptAnswer] = {}
        self._file: int | None = None
        self._changed = threading.Condition()
        self._waiting: list[tuple[Sequence[Action], Then | None]] = []
        self._is_closed = False
        self._was_full = False  # at the last answer that began
        self._thread: threading.Thread | None = None

    def open(self, head: Head) -> None:
        """Read what the folder holds, and write the journal anew. Raises ConfigurationError."""
        self._ledger = Ledger(head, self._most_bytes)
        try:
            self._take_over(head)
            self._write([self._ledger.compact()])
        except OSError as error:
            line = f"--journal {self._folder}: {cannot_write(error)}"
            raise ConfigurationError(line) from error
        self.answers = dict(self._ledger.answers)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # -- at the start -----------------------------------------------------------------------------

    def _take_over(self, head: Head) -> None:
        """Read what another coordinator has left. Raises OSError, ConfigurationError."""
        place = self._folder / JOURNAL
        try:
            found = read(place.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigurationError(f"--journal {place}: {cannot_read(error)}") from error
        self._tell_of(found, place)
        if found.head is not None and found.head != head:
            self.notices.append(
                f"the journal is of another target ({found.head.target}): its answers are dropped"
            )
            return
        self._ledger.replay(found.records)

    def _tell_of(self, found: Found, place: Path) -> None:
        if found.is_torn:
            self.notices.append("the last record of the journal was cut off, and is left out")
        if found.garbled:
            place.rename(self._folder / GARBLED)
            self.notices.append(
                f"the journal is damaged at {found.garbled}: nothing from there on is trusted; "
                f"the file is now {GARBLED}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- while it runs ----------------------------------------------------------------------------

    def note(self, record: Record, then: Then | None = None) -> None:
        """Note a record.

        then  is called in the journal's thread once the record is on the disk, or if the journal
              cannot be written
        """
        with self._changed:
            actions = self._ledger.note(record)
            if isinstance(record, Asked):
                self._say_if_full(record)
            if self._is_closed:
                actions = []
            if actions or then is not None:
                self._waiting.append((actions, then))
                self._changed.notify()
        if self._is_closed and then is not None:
            self._drain()

    def _say_if_full(self, asked: Asked) -> None:
        """Say once that answers are not noted, until there is room again."""
        is_full = asked.name not in self._ledger.answers
        if is_full and not self._was_full:
            logger.warning(
                "the journal in %s is full, so new answers are not noted; raise --journal-mb",
                self._folder,
            )
        self._was_full = is_full

    @property
    def is_broken(self) -> bool:
        """True if the journal cannot be written now."""
        return self._ledger.is_broken

    def close(self) -> None:
        """Write what was noted, and end. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._drain()
        for number in (self._file, self._lock_file):
            if number is not None:
                os.close(number)

    def _drain(self) -> None:
        """Call what waits for records although nothing is written any more."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for _, then in waiting:
            if then is not None:
                then()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._changed.wait(TICK_S)
                if not self._waiting and self._is_closed:
                    return
                is_late = not self._waiting
                if is_late:
                    self._waiting.append((self._ledger.tick(time.monotonic()), None))
            if not is_late:
                time.sleep(BATCH_S)
            with self._changed:
                waiting, self._waiting = self._waiting, []
            self._write_or_say([action for actions, _ in waiting for action in actions])
            for _, then in waiting:
                if then is not None:
                    then()

    def _write_or_say(self, actions: Sequence[Action]) -> None:
        was_broken = self._file is None
        try:
            self._write(actions)
        except OSError as error:
            with self._changed:
                self._ledger.failed(time.monotonic())
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if not was_broken:
                logger.warning(
                    "the journal in %s cannot be written: %s; answers go on, and would be lost if "
                    "this process died now",
                    self._folder,
                    cannot_write(error),
                )
        else:
            if was_broken and self._file is not None:
                logger.warning("the journal is written again")

    def _write(self, actions: Sequence[Action]) -> None:
        """Do what the ledger has decided, and sync it. Raises OSError."""
        # What stands before the last new file is in it.
        last = max(
            (n for n, action in enumerate(actions) if isinstance(action, Compact)), default=None
        )
        if last is not None:
            action = actions[last]
            assert isinstance(action, Compact)
            self._replace(action.content)
            actions = actions[last + 1 :]
        lines = b"".join(action.line for action in actions if isinstance(action, Append))
        if lines and self._file is not None:
            _write_all(self._file, lines)
            os.fdatasync(self._file)

    def _replace(self, content: bytes) -> None:
        new, place = self._folder / NEW, self._folder / JOURNAL
        made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write_all(made, content)
            os.fsync(made)
            new.rename(place)
            _sync_folder(self._folder)
        except OSError:
            os.close(made)
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = made


def _write_all(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _locked(folder: Path) -> int:
    """Make the folder if it is not there, and lock it. Raises ConfigurationError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            raise ConfigurationError(
                f"--journal {folder}: others may read it; type `chmod 700 {folder}`, or name "
                "another folder"
            )
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"--journal {folder}: {cannot_write(error)}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigurationError(
            f"--journal {folder}: another coordinator writes there; end it, or name another folder"
        ) from None
    return file
