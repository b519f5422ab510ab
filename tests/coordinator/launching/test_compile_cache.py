"""What nodes compile lasts: the next start is led to the same folders, which only this user has."""

import logging
import os
import time
from pathlib import Path

import pytest

from coordinator.launching.compile_cache import VARIABLES, cache_variables, trim
from coordinator.launching.launcher import Launcher
from proto.messages import Role
from proto.node_config import NodeConfig

# In place of a node: it says whether an earlier one has left something where compilers look.
NODE = """
import os, pathlib
left = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "left")
print("found" if left.exists() else "nothing")
left.parent.mkdir(exist_ok=True)
left.touch()
print(os.environ["TMPDIR"] in os.environ.get("TRITON_CACHE_DIR", ""))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs stay."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "compiled"


def lines_of_a_start(folder: Path, device: str = "cuda:0") -> list[str]:
    """What a node says that is started by a launcher of its own."""
    (folder / "cached_node.py").write_text(NODE)
    launcher = Launcher(modules={Role.TARGET: "cached_node"})
    try:
        config = NodeConfig(Role.TARGET, launcher.endpoint, "t", "secret", "model", device=device)
        launcher.start(config)
        deadline = time.monotonic() + 30
        while not launcher.ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        (log,) = launcher.logs.folder.glob("t*.log")
        return log.read_text().splitlines()
    finally:
        launcher.close()


def test_a_second_start_finds_what_the_first_has_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert lines_of_a_start(tmp_path) == ["nothing", "False"]
    assert lines_of_a_start(tmp_path) == ["found", "False"]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_node_on_a_cpu_compiles_no_programs_and_is_not_given_any_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "KeyError: 'TORCHINDUCTOR_CACHE_DIR'" in lines_of_a_start(tmp_path, "cpu")[-1]
    assert not cache.exists()


def test_what_the_user_has_set_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_variables({"TORCHINDUCTOR_CACHE_DIR": "mine"}) == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "mine")
    }, "a node runs in another folder; Triton's programs lie in this one"
    found = cache_variables({**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "t")})
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "t"),
    }


@pytest.mark.parametrize("what", ["a file", "open to others", "the user's own, a file"])
def test_where_nothing_can_be_kept_one_line_says_so_and_nodes_start(
    what: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if what == "open to others":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    elif what == "a file":
        cache.parent.parent.mkdir()
        cache.parent.touch()
    else:
        (tmp_path / "mine").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "cached_node.py").touch()
    with caplog.at_level(logging.WARNING):
        assert lines_of_a_start(tmp_path)[-1] == "True", "in the runtime folder, as without any"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("programs are compiled anew at each start: they cannot be kept (")


def test_the_oldest_programs_go_but_none_of_today(tmp_path: Path) -> None:
    now = time.time()
    for name, days in (("old", 9), ("older", 10), ("today", 0)):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (now - days * 86_400,) * 2)
    trim(tmp_path, max_bytes=250)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "today"}
    trim(tmp_path, max_bytes=10)
    assert {path.name for path in tmp_path.iterdir()} == {"today"}
