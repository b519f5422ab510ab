"""The folder of an experiment: what is wrong with it is said before anything is waited for."""

import dataclasses
import errno
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import plugins
from coordinator.cli.app import command_line, run
from lab.experiments import surroundings
from lab.experiments.folder import (
    ANSWERS,
    FILE,
    PICTURES,
    REPORT,
    ROWS,
    SUMMARY,
    TRACES,
    Folder,
    Header,
    RunRecord,
    read_header,
    write_whole,
)
from lab.experiments.results.pictures import draw_all
from lab.experiments.rows import RowFile, as_line
from proto.errors import ConfigurationError, OutputError, SlipstreamError
from proto.system import cannot_read, cannot_write, remedy
from tests.lab.experiments.made import row

HEADER = Header("t", "", "digest", "", "p.txt", 1, 1, 8, ())
RUN = RunRecord("2026", "a machine", {}, "c0ffee", 0.5)
ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EACCES: "choose a place where you may write",
    errno.EPERM: "choose a place where you may write",
    errno.EROFS: "choose a place that is not read-only",
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "raise the limit of open files",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EISDIR: "give the name of a file",
    errno.ELOOP: "its links lead in a circle",
    errno.EFBIG: "ulimit -f",
    errno.EIO: "look after the disk",
}


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a quiet machine fails."""

    def wait(*_: object) -> float:
        raise AssertionError("it waited")

    monkeypatch.setattr(surroundings, "wait_for_quiet", wait)


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["coordinator", "experiment", *arguments])
    monkeypatch.setattr(sys, "stderr", errors)
    status = run(command_line(plugins.commands()), plugins.connect_ray)
    return status, errors.getvalue()


def damaged(folder: Path) -> None:
    (folder / ROWS).write_text('{"no": "row"}\n' + as_line(row("a", 0)))
    with Folder(folder) as made:
        made.begin(HEADER, RUN)


def of_another(folder: Path) -> None:
    with Folder(folder) as made:
        made.begin(HEADER, RUN)


def without_header(folder: Path) -> None:
    (folder / ROWS).write_text(as_line(row("a", 0)))


def garbled(folder: Path) -> None:
    (folder / FILE).write_text("{}")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (of_another, "holds another experiment ('t'), or this one with other settings or prompts"),
        (without_header, "has rows without experiment.json; choose another --out"),
        (garbled, "is not an experiment of this version"),
    ],
)
@pytest.mark.usefixtures("never_quiet")
def test_what_is_wrong_with_a_folder_is_said_before_a_quiet_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, line: str
) -> None:
    make(tmp_path)
    status, errors = said(monkeypatch, "bench", "--out", str(tmp_path))
    assert status == 2
    assert line in errors
    assert errors.count("\n") == 1


@pytest.mark.usefixtures("never_quiet")
@pytest.mark.parametrize("place", ["/sys/kernel", "/sys/slipstream", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_refused_at_once_with_advice_that_fits(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    status, errors = said(monkeypatch, "bench", "--out", place)
    assert status == 1
    assert place in errors
    assert any(advice in errors for advice in ADVICE.values())
    assert "make room" not in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "null", '"x"', "[]", "[" * 200_000, "{}", "\0"),
        *('{"arms": 3, "runs": []}', '{"arms": [1], "runs": []}', '{"arms": [], "runs": "x"}'),
    ],
)
def test_a_damaged_header_is_no_experiment(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigurationError, match="is not an experiment of this version"):
        read_header(tmp_path)


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(Header)])
def test_a_header_with_a_field_of_a_wrong_type_is_no_experiment(tmp_path: Path, name: str) -> None:
    with Folder(tmp_path) as folder:
        folder.begin(HEADER, RUN)
    written = json.loads((tmp_path / FILE).read_text())
    for value in (None, {}, 1.5, [1], [{}], True):
        (tmp_path / FILE).write_text(json.dumps(written | {name: value}))
        with pytest.raises(ConfigurationError, match="is not an experiment of this version"):
            read_header(tmp_path)


@pytest.mark.parametrize("name", [FILE, SUMMARY, REPORT, *PICTURES])
def test_a_folder_in_the_place_of_a_result_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    with Folder(tmp_path) as folder, pytest.raises(SlipstreamError) as caught:
        folder.open(HEADER)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", [ANSWERS, TRACES])
def test_what_is_no_folder_in_the_place_of_one_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    with Folder(tmp_path) as folder:
        (tmp_path / name).mkdir()
        folder.open(HEADER)
        assert list((tmp_path / name).iterdir()) == []
        (tmp_path / name).rmdir()
        (tmp_path / name).touch()
        with pytest.raises(OutputError, match=f"cannot write to .*{name}: It is no folder; "):
            folder.open(HEADER)


def test_every_picture_that_is_drawn_is_among_the_names_of_results() -> None:
    drawn = Path(draw_all.__code__.co_filename).read_text(encoding="utf-8")
    assert set(re.findall(r'"(\w+\.png)"', drawn)) == set(PICTURES)


def test_damaged_rows_are_found_when_the_folder_is_opened(tmp_path: Path) -> None:
    damaged(tmp_path)
    with (
        Folder(tmp_path) as folder,
        pytest.raises(ConfigurationError, match="has a line that is no row after byte 0; mend it"),
    ):
        folder.open(HEADER)


def test_an_opened_folder_is_as_it_was_and_a_run_is_added_when_it_begins(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        header, rows = folder.open(HEADER)
        assert list(tmp_path.iterdir()) == []
        assert rows.rows == []
        assert folder.begin(header, RUN).runs == (RUN,)
        header, _ = folder.open(HEADER)
        assert folder.begin(header, RUN).runs == (RUN, RUN)
    assert read_header(tmp_path).runs == (RUN, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("number", ADVICE)
def test_what_is_advised_fits_the_error_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise error_of(number)

    rows = RowFile(tmp_path / "rows.jsonl")
    monkeypatch.setattr(os, "fsync", fail)
    for act in (
        lambda: write_whole(tmp_path / "x", b"x"),
        lambda: rows.append([row("a", 0)]),
    ):
        with pytest.raises(OutputError) as caught:
            act()
        line = str(caught.value)
        assert os.strerror(number) in line
        assert ADVICE[number] in line
        assert ("make room" in line) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert ADVICE[number] in remedy(error_of(number), "make room there")


def test_what_is_plain_by_itself_has_no_advice() -> None:
    assert cannot_read(error_of(errno.ENOENT)) == "No such file or directory"
    assert cannot_read(error_of(errno.EACCES)) == "Permission denied; see that you may read it"
    assert cannot_read(error_of(errno.EISDIR)) == "Is a directory; give a file"
    assert cannot_write(error_of(errno.ENOENT)).endswith("; make its folder first")
    assert cannot_write(OSError("odd")) == "odd"


def test_what_cannot_be_cleaned_up_does_not_hide_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error_of(errno.EACCES)

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OutputError, match="Permission denied; choose a place where you may write"):
        write_whole(tmp_path / "x", b"x")
