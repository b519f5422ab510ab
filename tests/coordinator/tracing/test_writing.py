"""A trace is written whole, or there is none."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.tracing.writing import write
from proto.errors import OutputError

ROOT = Path(__file__).resolve().parents[3]
TRACE: dict[str, Any] = {"traceEvents": [{"name": "x" * 100}] * 1000, "otherData": {}}
WRITE = """
import sys
from pathlib import Path
from coordinator.tracing.writing import write
try:
    write(Path(sys.argv[1]), {"traceEvents": [{"name": "x" * 100}] * 1000})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_trace_that_cannot_be_written_whole_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "-c", WRITE, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit, check=True
    )
    assert done.stdout == (
        f"OutputError the trace cannot be written to {path}: File too large; raise the limit "
        "of how long files may be (ulimit -f) (what there was of it has been removed)\n"
    )
    assert not path.exists()


def test_a_trace_that_was_interrupted_is_removed(tmp_path: Path) -> None:
    class Events(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"name": "one"}
            raise KeyboardInterrupt

    path = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt):
        write(path, {"traceEvents": Events()})
    assert not path.exists()


def test_a_file_that_cannot_be_opened_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"Is a directory; give the name of a file$"):
        write(tmp_path, TRACE)
    assert tmp_path.is_dir()


def test_what_is_no_file_is_not_removed(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"No space left on device; make room there$"):
        write(link, TRACE)
    assert Path("/dev/full").exists()
    assert link.is_symlink()


def test_where_it_cannot_be_removed_it_is_said_to_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError

    path = tmp_path / "trace.json"
    monkeypatch.setattr(Path, "unlink", refuse)
    unwritable = {"traceEvents": [], "otherData": object()}
    with pytest.raises(TypeError):  # not an error of the disk: nothing is hidden
        write(path, unwritable)
    monkeypatch.setattr("json.dumps", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OutputError, match=r"full; make room there \(the file is cut off\)$"):
        write(path, TRACE)
