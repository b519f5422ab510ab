"""What texts have shown of a pair is there at the next start, and nothing else is."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import kept
from engine.kept import Kept
from target_node.remembering import KIND, Memory
from target_node.resting import MAX_KINDS, Outcome

ABOUT = ("target", "with drafter")
FOUND = Outcome("auto at 0", 1, True, 96, 12, (700.0, 0.0014), (500.0, 0.004))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the table is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "slipstream" / kept.FILE


def earlier(about: Sequence[str] = ABOUT, *, is_anew: bool = False) -> Sequence[Outcome]:
    """What the next start knows."""
    return Memory(Kept(is_anew=is_anew), about).earlier


@pytest.mark.usefixtures("table")
def test_the_next_start_of_the_same_pair_knows_it() -> None:
    Memory(Kept(), ABOUT).keep([FOUND])
    assert earlier() == (FOUND,)
    assert earlier(("target", "with another")) == ()
    assert earlier(is_anew=True) == ()


def test_nothing_is_kept_of_a_pair_without_a_name(table: Path) -> None:
    Memory(Kept(), ()).keep([FOUND])
    assert not table.exists()
    assert earlier(()) == ()


@pytest.mark.parametrize(
    "broken",
    [
        7,
        {"a": 1},
        [7],
        [[*FOUND[:5], [1.0, 1.0]]],
        [["auto", 1, True, 96, 97, [1.0, 1.0], [1.0, 1.0]]],
        [["auto", 1, True, 96, 0, [1.0, 1.0], [1.0, -1.0]]],
        [["auto", 1, True, 96, 0, [1.0, 1e300], [1.0, 1.0]]],
        [["auto", 1, 1, 96, 0, [1.0, 1.0], [1.0, 1.0]]],
        [["auto", 1, True, 1.5, 0, [1.0, 1.0], [1.0, 1.0]]],
    ],
)
@pytest.mark.usefixtures("table")
def test_what_is_no_outcome_is_left_out(broken: object) -> None:
    Kept().keep(KIND, ABOUT, broken)
    assert earlier() == ()


def test_a_table_that_grows_is_not_read_whole(table: Path) -> None:
    Kept().keep(KIND, ABOUT, [FOUND] * (2 * MAX_KINDS))
    assert json.loads(table.read_text())
    assert len(earlier()) == MAX_KINDS


def test_where_keeping_takes_long_it_is_not_done_each_time(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, now = Memory(Kept(), ABOUT), iter((10.0, 11.0, 12.0, 10_000.0, 10_000.5))
    # Its own clock: threads of pairs that this process keeps read the usual one.
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("target_node.remembering.time", clock)
    for number in range(1, 4):
        memory.keep([FOUND._replace(num_passes=number)])
        assert earlier()[0].num_passes == (1, 1, 3)[number - 1]
    assert table.exists()
