"""Rows on disk: at once, whole, and measured once."""

import json
from pathlib import Path

import pytest

from lab.gpu_kit.recorder import FILE, Recorder, read
from proto.errors import ConfigurationError


def test_a_row_is_on_disk_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / FILE, "passes-target", "a machine")
    recorder.measured("graphs|1 row", pass_us=3.5)
    (row,) = read(tmp_path / FILE)
    assert (row.step, row.cell, row.state, row.figures) == (
        *("passes-target", "graphs|1 row", "measured"),
        {"pass_us": 3.5},
    )
    assert row.machine == "a machine"


def test_what_was_measured_is_known_to_the_next_run_and_what_failed_is_tried_again(
    tmp_path: Path,
) -> None:
    first = Recorder(tmp_path / FILE, "passes-target")
    first.measured("a", us=1.0)
    first.failed("b", "out of memory")
    Recorder(tmp_path / FILE, "passes-drafter").measured("c", us=1.0)
    again = Recorder(tmp_path / FILE, "passes-target")
    assert [again.has(cell) for cell in "abc"] == [True, False, False]
    again.measured("b", us=2.0)
    assert Recorder(tmp_path / FILE, "passes-target").has("b")


def test_a_line_that_was_cut_off_is_cut_away_and_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE
    first = Recorder(path, "passes-target")
    first.measured("a", us=1.0)
    first.measured("b", us=1.0)
    path.write_bytes(path.read_bytes()[:-20])
    assert [row.cell for row in read(path)] == ["a"]
    Recorder(path, "passes-target").measured("c", us=1.0)
    assert [row.cell for row in read(path)] == ["a", "c"]


def test_a_line_in_the_middle_that_is_no_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    Recorder(path, "passes-target").measured("a", us=1.0)
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ConfigurationError, match="choose another --out"):
        read(path)


@pytest.mark.parametrize(
    "wrong", [{"step": 3}, {"state": "odd"}, {"figures": {"us": [1]}}, {"figures": 3}, {"at": None}]
)
def test_a_row_with_a_field_of_a_wrong_type_is_refused(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    path = tmp_path / FILE
    Recorder(path, "passes-target").measured("a", us=1.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong) + "\n")
    with pytest.raises(ConfigurationError, match="has a line that is no row after byte 0"):
        read(path)
