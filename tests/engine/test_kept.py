"""What was found on this machine is found once, and a broken table costs nothing but that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import kept
from engine.kept import Kept


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the table is kept; no other process computes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_others_s", lambda: 5.0)
    return tmp_path / "slipstream" / kept.FILE


def _found(value: int, about: str = "model", **named: bool) -> int:
    return Kept().found("threads", (about,), lambda: value, _is_number, **named)


def _is_number(found: object) -> bool:
    return isinstance(found, int) and found > 0


@pytest.mark.usefixtures("table")
def test_what_was_found_is_not_looked_for_again() -> None:
    assert (_found(3), _found(4), _found(4, "another"), _found(5, "another")) == (3, 3, 4, 4)
    anew = Kept(is_anew=True).found("threads", ("model",), lambda: 6, _is_number)
    assert (anew, _found(7), _found(7, "another")) == (6, 6, 4)
    assert Kept().found("dtype", ("model",), lambda: 8, _is_number) == 8


@pytest.mark.parametrize(
    "changed", ["processor", "library_name"], ids=["another processor", "another library"]
)
@pytest.mark.usefixtures("table")
def test_another_machine_finds_for_itself(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found(3) == 3
    monkeypatch.setattr(kept, changed, lambda: "another")
    assert _found(4) == 4


@pytest.mark.parametrize("text", ["", "[]", "{", '{"threads": 3}', "[" * 100_000])
def test_a_broken_table_is_made_anew(text: str, table: Path) -> None:
    table.parent.mkdir()
    table.write_text(text)
    assert _found(3) == 3
    assert list(json.loads(table.read_text())["threads"].values()) == [3]


def test_what_was_timed_beside_other_work_is_used_and_not_kept(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter((5.0, 6.0, 6.0, 7.0))  # another process used a core for a second, twice
    monkeypatch.setattr(kept, "_others_s", lambda: next(spent))
    assert _found(3) == 3
    assert not table.exists()
    assert _found(4, needs_quiet=False) == 4
    assert list(json.loads(table.read_text())["threads"].values()) == [4]


def test_what_is_not_right_is_not_kept(table: Path) -> None:
    assert _found(0) == 0
    assert not table.exists()


def test_what_is_not_right_any_more_is_forgotten(table: Path) -> None:
    assert _found(3) == 3
    assert Kept(is_anew=True).found("threads", ("model",), lambda: 0, _is_number) == 0
    assert json.loads(table.read_text()) == {"threads": {}}
    assert _found(4) == 4


@pytest.mark.usefixtures("table")
def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    for number, about in enumerate(("a", "b", "c"), start=1):
        _found(number, about)
    assert (_found(9, "b"), _found(9, "c"), _found(9, "a")) == (2, 3, 9)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", ["write_text", "replace", "read_text", "mkdir"])
def test_a_disk_that_refuses_costs_no_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Callable[[], None]:
        raise OSError("no room")

    monkeypatch.setattr(Path, name, refuse)
    assert _found(3) == 3
