"""Rows on disk: a cell is there as a whole or not at all, whatever happened to its writer."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from coordinator.text.metrics import Metrics, SessionCounts
from lab.experiments.rows import (
    Row,
    RowFile,
    as_line,
    complete,
    file_name,
    from_line,
    read,
)
from proto.errors import ConfigurationError, OutputError
from tests.lab.experiments.made import row

COUNTS = SessionCounts()
METRICS = Metrics.of(
    COUNTS,
    started=0.0,
    emitted=[(0.5, 1), (1.0, 1)],
    drafter_lost_at=None,
    queued_s=0.0,
    num_spec_tokens=3,
)
TEXTS = ("arm", "stage", "prompt_id", "category", "at", "void")
WHOLE = (
    *("prompt", "repetition", "num_rows", "number", "turn", "text", "seed"),
    *("num_prompt_tokens", "num_cell_tokens", "num_bytes"),
)
NUMBERS = ("wall_s", "tokens_per_second", "ttft_s", "itl_p50_ms", "itl_p99_ms", "load")
WRONG: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(TEXTS, ([1], None, 3, {})),
    **dict.fromkeys(WHOLE, ("x", "1", None, {}, [1], 1.5, True)),
    **dict.fromkeys(NUMBERS, ("x", "1", None, {}, [1])),
    **dict.fromkeys(("tokens", "accept_lengths"), (["x"], 3, {"a": 1}, None, [1.5], [[1]])),
    "accepted_by_source": (3, None, [1], {"model": "x"}),
    "hosts": (3, None, {"target": 1}),
    "figures": (3, "x", [1], {}, {"hit_rate": 0.5}),
}

PAIR = [row("b", 0, num_rows=2, text=text) for text in range(2)]


def test_a_row_comes_back_as_it_was_written() -> None:
    figures = json.loads(json.dumps(dataclasses.asdict(METRICS)))
    one = row("a ü", 1, accepted_by_source={"model": 2}, figures=figures, hosts={"t": "h"})
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


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("num_after", [0, 1])
def test_a_row_with_a_field_of_a_wrong_type_is_no_row(
    tmp_path: Path, name: str, num_after: int
) -> None:
    path = tmp_path / "rows.jsonl"
    sound = as_line(row("a", 0))
    for value in WRONG[name]:
        damaged = json.dumps(json.loads(as_line(row("a", 1))) | {name: value}) + "\n"
        path.write_text(sound + damaged + sound * num_after)
        with pytest.raises(ConfigurationError, match="has a line that is no row after byte"):
            RowFile(path)
        with pytest.raises(ConfigurationError, match="mend it, or choose another --out"):
            read(path)


def test_there_is_a_wrong_type_for_every_field_of_a_row() -> None:
    assert set(WRONG) == {one.name for one in dataclasses.fields(Row)}


def test_every_arm_has_a_file_name_of_its_own() -> None:
    names = ("a/b", "a b", "a_b", "a+b", "a:b", "a%2Fb", "a%b", "a\\b", "A b", "å b")
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert not any(character in file for file in files for character in '/\\: "')
    assert file_name("sync K=2 T=0.8, één") == "sync+K=2+T=0.8,+één"


@given(st.text(), st.text())
def test_only_equal_names_share_a_file_name(one: str, other: str) -> None:
    assume(not any("\ud800" <= letter <= "\udfff" for letter in one + other))
    assert (file_name(one) == file_name(other)) == (one == other)
