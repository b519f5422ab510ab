"""Which connection of a client is closed first where too many are open."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.connections import Connections, Stage


def closed(connections: "Connections[str]") -> list[str]:
    """All that are closed to make room, in their order."""
    gone: list[str] = []
    while (key := connections.surplus()) is not None:
        connections.leave(key)
        gone.append(key)
    return gone


def test_the_oldest_without_a_header_is_closed_before_one_that_was_answered() -> None:
    connections: Connections[str] = Connections(3)
    for key in ("answered", "silent-1", "silent-2", "asking"):
        connections.enter(key, Stage.SILENT)
    connections.enter("answered", Stage.COMING)
    connections.enter("answered", Stage.IDLE)
    connections.enter("asking", Stage.COMING)
    assert connections.is_crowded
    assert closed(connections) == ["silent-1"]
    connections.most = 0
    assert closed(connections) == ["silent-2", "answered", "asking"]


def test_age_counts_from_the_last_answer() -> None:
    connections: Connections[str] = Connections(1)
    for key in ("busy", "lazy"):
        connections.enter(key, Stage.COMING)
        connections.enter(key, Stage.IDLE)
    for stage in (Stage.COMING, Stage.IDLE):
        connections.enter("busy", stage)
    assert closed(connections) == ["lazy"]


def test_one_with_a_request_in_work_is_never_closed_for_others() -> None:
    connections: Connections[str] = Connections(2)
    for key in ("in work", "also"):
        connections.enter(key, Stage.COMING)
        connections.hold(key)
    assert connections.first() is None
    connections.enter("new", Stage.SILENT)
    assert closed(connections) == ["new"]
    connections.enter("in work", Stage.IDLE)  # the answer is complete, but its request goes on
    connections.most = 1
    assert closed(connections) == []
    connections.release("in work")
    assert closed(connections) == ["in work"]


def test_what_has_left_is_neither_held_nor_closed() -> None:
    connections: Connections[str] = Connections(0)
    connections.enter("a", Stage.SILENT)
    connections.hold("a")
    connections.leave("a")
    connections.release("a")
    connections.hold("a")
    connections.leave("a")
    connections.check()
    assert len(connections) == 0
    assert connections.first() is None


MOVES = st.tuples(
    st.sampled_from(["enter", "hold", "release", "leave", "room"]),
    st.integers(0, 7),
    st.sampled_from(list(Stage)),
)


@given(st.lists(MOVES, max_size=60), st.integers(0, 6))
def test_whatever_happens_no_more_than_the_limit_stay_but_those_that_are_held(
    moves: list[tuple[str, int, Stage]], most: int
) -> None:
    connections: Connections[int] = Connections(most)
    held: set[int] = set()
    there: set[int] = set()
    for move, key, stage in moves:
        match move:
            case "enter":
                connections.enter(key, stage)
                there.add(key)
            case "hold":
                connections.hold(key)
                held |= {key} & there
            case "release":
                connections.release(key)
                held.discard(key)
            case "leave":
                connections.leave(key)
                there.discard(key)
                held.discard(key)
            case "room":
                while (gone := connections.surplus()) is not None:
                    assert gone in there - held
                    connections.leave(gone)
                    there.remove(gone)
                assert len(there) <= max(most, len(held))
        connections.check()
        assert len(connections) == len(there)
