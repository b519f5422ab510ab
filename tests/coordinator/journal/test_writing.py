"""The writer of the journal, on a real disk: what is found again, and what happens if it fails."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.journal import writing
from coordinator.journal.records import Asked, Came, Gone, Head
from coordinator.journal.writing import GARBLED, JOURNAL, Journal
from proto.errors import ConfigurationError

HEAD = Head("target", 100)
LIMIT_S = 10.0


def asked(name: str) -> Asked:
    return Asked(name, 0.0, "/v1/completions", "", "", {"prompt": "secret"}, ((1, 2),), 1, 7)


@contextmanager
def opened(folder: Path, head: Head = HEAD) -> Iterator[Journal]:
    with Journal(folder, 1 << 20) as journal:
        journal.open(head)
        yield journal


def synced(journal: Journal, *records: Asked | Came | Gone) -> None:
    """Note them, and wait until they are on the disk."""
    done = threading.Event()
    for record in records[:-1]:
        journal.note(record)
    journal.note(records[-1], done.set)
    assert done.wait(LIMIT_S)


def test_what_was_synced_is_found_again_and_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with opened(folder) as journal:
        assert journal.answers == {}
        assert "not encrypted" in journal.notices[0]
        synced(journal, asked("a"), Came("a", 0, 0, (5, 6)), asked("b"), Gone("b"))
        # As a process that is killed now leaves it.
        left = (folder / JOURNAL).read_bytes()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    (folder / JOURNAL).write_bytes(left)
    with opened(folder) as journal:
        assert list(journal.answers) == ["a"]
        assert journal.answers["a"].texts[0].tokens == [5, 6]
        assert len(journal.notices) == 1


def test_a_torn_record_is_cut_off_and_a_damaged_one_is_reported_with_its_place(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "journal"
    with opened(folder) as journal:
        synced(journal, asked("a"), Came("a", 0, 0, (5, 6)), Came("a", 0, 2, (7,)))
    place = folder / JOURNAL
    whole = place.read_bytes()
    place.write_bytes(whole[:-4])
    with opened(folder) as journal:
        assert journal.answers["a"].texts[0].tokens == [5, 6]
        assert "cut off" in journal.notices[1]
    place.write_bytes(whole.replace(b"[5,6]", b"[5,9]"))
    with opened(folder) as journal:
        assert journal.answers["a"].texts[0].tokens == []
        assert "damaged at line 3 (byte" in journal.notices[1]
        assert (folder / GARBLED).read_bytes() != whole


def test_answers_of_another_target_are_dropped_with_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with opened(folder) as journal:
        synced(journal, asked("a"))
    with opened(folder, Head("other", 100)) as journal:
        assert journal.answers == {}
        assert "of another target (target)" in journal.notices[1]


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    with opened(tmp_path / "journal"), pytest.raises(ConfigurationError, match="another coord"):
        Journal(tmp_path / "journal", 1 << 20)
    with pytest.raises(ConfigurationError, match="make its folder first"):
        Journal(tmp_path / "no" / "journal", 1 << 20)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="others may read it; type `chmod 700"):
        Journal(tmp_path / "open", 1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--journal .*file"):
        Journal(tmp_path / "file", 1 << 20)


def test_a_full_disk_is_told_once_and_all_is_written_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(writing, "TICK_S", 0.02)
    monkeypatch.setattr("coordinator.journal.ledger.AGAIN_S", 0.05)
    real, is_full = os.write, threading.Event()

    def write(file: int, data: bytes) -> int:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    folder = tmp_path / "journal"
    with opened(folder) as journal:
        monkeypatch.setattr(writing.os, "write", write)
        is_full.set()
        synced(journal, asked("a"), Came("a", 0, 0, (5,)))  # those that wait go on
        synced(journal, Came("a", 0, 1, (6,)))
        is_full.clear()
        written = threading.Event()
        monkeypatch.setattr(writing.logger, "info", lambda *_: None)
        for _ in range(200):
            if not journal.is_broken and b"[5,6]" in (folder / JOURNAL).read_bytes():
                written.set()
                break
            threading.Event().wait(0.02)
        assert written.is_set()
    told = [message for message in caplog.messages if "journal" in message]
    assert "cannot be written: No space left on device" in told[0]
    assert told[-1] == "the journal is written again"
    assert len(told) == 2


def test_a_full_journal_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Journal(tmp_path / "journal", 1) as journal:
        journal.open(Head("target", 100))
        synced(journal, asked("a"))
        synced(journal, asked("b"))
        assert journal.answers == {}
    (told,) = [message for message in caplog.messages if "journal" in message]
    assert "is full, so new answers are not noted; raise --journal-mb" in told
