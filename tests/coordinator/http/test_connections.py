"""Which connection of a client is closed first where too many are open."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.connections import PATIENCE_S, Connections, Stage

LATER = 10 * PATIENCE_S


def opened(most: int, *keys: str) -> "Connections[str]":
    """Connections that were opened one after the other, the first at the time 0."""
    made: Connections[str] = Connections(most)
    for number, key in enumerate(keys):
        made.enter(key, Stage.SILENT, number / 1000)
    return made


def asked(connections: "Connections[str]", key: str, now: float) -> None:
    """A request has come over this connection and was answered."""
    connections.enter(key, Stage.COMING, now)
    connections.enter(key, Stage.IDLE, now)


def closed(connections: "Connections[str]", now: float) -> list[str]:
    """All that are closed to make room, in their order."""
    gone: list[str] = []
    while (key := connections.surplus(now)) is not None:
        connections.leave(key)
        gone.append(key)
    return gone


def test_the_oldest_that_has_sent_no_whole_header_in_time_is_closed_first() -> None:
    connections = opened(3, "answered", "silent-1", "silent-2", "asking")
    asked(connections, "answered", 0.1)
    connections.enter("asking", Stage.COMING, 0.2)
    assert connections.is_crowded
    assert closed(connections, LATER) == ["silent-1"]
    connections.most = 0
    assert closed(connections, LATER) == ["silent-2", "answered", "asking"]


def test_one_that_was_just_opened_is_the_last_whatever_the_others_have_done() -> None:
    connections = opened(2, "idle", "slow")
    asked(connections, "idle", 0.1)
    connections.enter("slow", Stage.COMING, 0.2)
    connections.enter("new", Stage.SILENT, LATER)
    assert closed(connections, LATER) == ["idle"]
    connections.enter("newer", Stage.SILENT, LATER)
    assert closed(connections, LATER) == ["slow"]


def test_age_counts_from_the_last_answer() -> None:
    connections = opened(1, "busy", "lazy")
    asked(connections, "busy", 0.1)
    asked(connections, "lazy", 0.2)
    asked(connections, "busy", 0.3)
    assert closed(connections, LATER) == ["lazy"]


def test_one_with_a_request_in_work_is_never_closed_for_others() -> None:
    connections = opened(2, "in work", "also")
    for key in ("in work", "also"):
        connections.enter(key, Stage.COMING, 0.1)
        connections.hold(key)
    assert connections.first(LATER) is None
    connections.enter("new", Stage.SILENT, LATER)
    assert closed(connections, LATER) == ["new"]
    connections.enter("in work", Stage.IDLE, LATER)  # answered, but its request goes on
    connections.most = 1
    assert closed(connections, LATER) == []
    connections.release("in work", LATER)
    assert closed(connections, LATER) == ["in work"]


def test_what_has_left_is_neither_held_nor_closed() -> None:
    connections = opened(0, "a")
    connections.hold("a")
    connections.leave("a")
    connections.release("a", 1.0)
    connections.hold("a")
    connections.leave("a")
    connections.check()
    assert len(connections) == 0
    assert connections.first(LATER) is None


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
    for number, (move, key, stage) in enumerate(moves):
        now = number * PATIENCE_S / 3
        match move:
            case "enter":
                connections.enter(key, stage, now)
                there.add(key)
            case "hold":
                connections.hold(key)
                held |= {key} & there
            case "release":
                connections.release(key, now)
                held.discard(key)
            case "leave":
                connections.leave(key)
                there.discard(key)
                held.discard(key)
            case "room":
                while (gone := connections.surplus(now)) is not None:
                    assert gone in there - held
                    connections.leave(gone)
                    there.remove(gone)
                assert len(there) <= max(most, len(held))
        connections.check()
        assert len(connections) == len(there)
