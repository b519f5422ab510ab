"""`trace-summary` tells people and programs the same, and refuses what is no trace of ours."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.app import EXIT_USAGE, command_line, run
from coordinator.tracing.chrome import chrome_trace
from coordinator.tracing.timeline import timeline_of
from coordinator.tracing.writing import write
from lab.trace.command import trace_summary
from proto.errors import ConfigurationError, OutputError
from proto.system import check_writable
from tests.coordinator.tracing.recordings import (
    DRAFTER,
    HOST,
    TARGET,
    Script,
    one_round,
    round_on_devices,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trace of one round, with nodes on another host."""
    script = one_round(5000.0, "elsewhere")
    for node in (TARGET, DRAFTER):
        script.beats(node, way_ms=0.2, back_ms=0.2)
    return written(tmp_path / "trace.json", script)


def written(path: Path, script: Script) -> Path:
    trace = chrome_trace(timeline_of(script.finished(), HOST), {"machine": {"host": HOST}})
    write(path, trace)
    return path


def summarize(*options: str) -> int:
    """The command; returns its exit status."""
    app = command_line([trace_summary])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["slipstream", "trace-summary", *options])
        return run(app)


def test_people_are_told_the_shares_and_what_to_make_of_them(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summarize(str(file), "--rounds", "1-1") == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["target", "9.900", "4.950", "9.9", "38.1%"] in rows
    assert ["together", "26.000", "13.000", "26.0", "100.0%"] in rows
    assert ["1", "26.00", "9.90", "7.90", "3.93", "3.72", "0.55", "0.00", "2", "1/2"] in rows
    assert "beside" not in text
    assert "check: the shares add up to 26.0 of 26.0 ms (100.0%), 0.0% unexplained" in text
    assert "ahead, give or take 0.202 (1 exchanges)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_hosts_work_beside_a_device_is_a_column_that_is_not_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "trace.json", round_on_devices())
    assert summarize(str(path), "--plot", str(tmp_path / "trace.png")) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["target", "10.000", "5.000", "10.0", "38.5%", "3.0"] in rows
    assert ["drafter", "8.000", "4.000", "8.0", "30.8%", "2.0"] in rows
    assert ["together", "26.000", "13.000", "26.0", "100.0%"] in rows
    assert max(map(len, text.splitlines()[4:])) <= 80
    assert summarize(str(path), "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["beside_ms"] == {"target": 3.0, "drafter": 2.0}
    assert sum(found["shares_ms"].values()) == pytest.approx(found["wall_ms"])


def test_programs_are_told_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summarize(str(file), "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["wall_ms"] == 26.0
    assert found["shares_ms"]["target"] == 9.9
    assert found["ms_per_token"]["target"] == 4.95
    (text,) = found["texts"]
    assert (text["num_tokens"], len(text["rounds"])) == (2, 1)


def test_the_picture_is_drawn(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "trace.png"
    assert summarize(str(file), "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ("--rounds", "0-1"),
        ("--rounds", "1-2"),
        ("--rounds", "nonsense"),
        ("--text", "2"),
        ("--plot", "/nowhere/at/all.png"),
    ],
)
def test_what_does_not_fit_the_trace_is_refused_in_one_line(
    file: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert summarize(str(file), *options) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe\x00", b'{"traceEvents": ['])
def test_what_is_no_trace_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    for place in (path, tmp_path / "missing.json", tmp_path):
        assert summarize(str(place)) == EXIT_USAGE
        error = capsys.readouterr().err
        assert error.startswith(f"error: {place} ")
        assert len(error.splitlines()) == 1


def test_a_trace_without_a_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace.json", Script())
    assert summarize(str(path)) == EXIT_USAGE
    assert "no text of which anything was written" in capsys.readouterr().err


def test_asking_whether_a_file_can_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    check_writable(path, "--trace")
    assert not path.exists()
    path.write_text("an earlier one")
    check_writable(path, "--trace")
    assert path.read_text() == "an earlier one"
    for place in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            check_writable(place, "--trace")


def test_a_disk_that_takes_nothing_is_found_before_the_file_is_needed(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"^--out: .*new\.json cannot be written: "):
            check_writable(tmp_path / "new.json", "--out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_in_one_line() -> None:
    with pytest.raises(OutputError, match="No space left on device"):
        write(Path("/dev/full"), {"traceEvents": [], "otherData": {}})
