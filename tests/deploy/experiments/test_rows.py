"""Rows on disk: a cell is there as a whole or not at all, whatever happened to its writer."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.experiments.rows import Row, RowFile, as_line, complete, from_line, with_void_arms
from proto.errors import ConfigurationError, OutputError
from tests.deploy.experiments.made import row

PAIR = [row("b", 0, num_rows=2, text=text) for text in range(2)]


def test_a_row_comes_back_as_it_was_written() -> None:
    one = row("a ü", 1, accepted_by_source={"model": 2}, figures={"wait_s": 0.5}, hosts={"t": "h"})
    assert from_line(as_line(one)) == one
    assert as_line(one).count("\n") == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000))
def test_wherever_a_writer_was_killed_the_cells_that_are_whole_are_kept(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "rows.jsonl"
    cells = [[row("a", 0)], PAIR, [row("a", 1)]]
    path.unlink(missing_ok=True)
    file = RowFile(path)
    for cell in cells:
        file.append(cell)
    whole = path.read_bytes()
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut])
    again = RowFile(path)
    ends = [0]
    for cell in cells:
        ends.append(ends[-1] + sum(len(as_line(one).encode()) for one in cell))
    kept = [one for cell, end in zip(cells, ends[1:], strict=True) if end <= cut for one in cell]
    assert again.rows == kept
    for cell in cells:
        if cell[0] not in kept:
            again.append(cell)
    assert sorted(RowFile(path).rows, key=as_line) == sorted(
        (one for cell in cells for one in cell), key=as_line
    )


def test_a_cell_of_which_a_row_is_missing_is_not_believed() -> None:
    assert complete([PAIR[0], row("a", 0)]) == [row("a", 0)]
    assert complete([PAIR[0], row("a", 0), *PAIR]) == [PAIR[0], row("a", 0), PAIR[1]]


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path)
    file.append([row("a", 0)])
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device; make room there; the same"):
        file.append(PAIR)
    assert path.read_bytes() == before
    monkeypatch.undo()
    file.append(PAIR)
    assert RowFile(path).rows == [row("a", 0), *PAIR]


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b"\xff\n", b"[1]\n"])
def test_a_line_in_the_middle_that_is_no_row_is_not_cut_away(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + as_line(row("a", 0)).encode())
    with pytest.raises(ConfigurationError, match="has a line that is no row after byte 0"):
        RowFile(path)


def of_forwards(arm: str, late: int) -> Row:
    return row(arm, 0, figures={"simulated": {"elapsed_ms": 100.0, "late_ms": float(late)}})


def test_an_arm_is_void_by_all_of_its_forwards_together() -> None:
    rows = [of_forwards("a", 2), *[of_forwards("a", 0)] * 2, of_forwards("b", 2), row("c", 0)]
    assert [one.void for one in with_void_arms(rows)] == [
        *("", "", ""),
        "its forwards were late by 2% of the time",
        "",
    ]
