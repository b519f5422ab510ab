"""Who gets the next free lane, and who is refused."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.admission import Admission, Ticket


def admitted(admission: Admission) -> list[Ticket]:
    """All that may begin now."""
    found = []
    while (ticket := admission.next()) is not None:
        found.append(ticket)
    return found


def test_texts_take_lanes_in_their_order_while_there_are_some() -> None:
    admission = Admission(2, 8)
    tickets = admission.ask("a", 3)
    assert tickets is not None
    assert admitted(admission) == tickets[:2]
    assert (admission.num_running, admission.num_waiting) == (2, 1)
    admission.leave(tickets[0])
    assert admitted(admission) == tickets[2:]


def test_a_client_that_asks_for_many_texts_delays_another_by_one_at_most() -> None:
    admission = Admission(2, 100)
    many = admission.ask("greedy", 50)
    assert many is not None
    running = admitted(admission)
    assert running == many[:2]
    one = admission.ask("modest", 1)
    assert one is not None
    admission.leave(running[0])
    assert admitted(admission) == one


def test_of_clients_with_equally_many_lanes_the_one_that_waits_longest_is_next() -> None:
    admission = Admission(1, 8)
    first = admission.ask("a", 1)
    second = admission.ask("b", 1)
    third = admission.ask("a", 1)
    assert first is not None
    assert second is not None
    assert third is not None
    assert admitted(admission) == first
    admission.leave(first[0])
    assert admitted(admission) == second
    admission.leave(second[0])
    assert admitted(admission) == third


def test_what_does_not_fit_into_the_queue_is_refused_as_a_whole() -> None:
    admission = Admission(2, 3)
    assert admission.ask("a", 6) is None
    assert admission.num_waiting == 0
    assert admission.ask("a", 5) is not None
    assert admission.ask("b", 1) is None
    admitted(admission)
    assert admission.ask("b", 1) is None


def test_whoever_leaves_the_queue_makes_room_in_it() -> None:
    admission = Admission(1, 1)
    running, waiting = admission.ask("a", 1), admission.ask("a", 1)
    assert running is not None
    assert waiting is not None
    assert admitted(admission) == running
    admission.leave(waiting[0])
    admission.leave(waiting[0])
    assert admission.ask("b", 1) is not None


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 9)), max_size=60),
)
def test_no_lane_is_lost_and_nobody_waits_beside_a_free_one(
    num_lanes: int, max_waiting: int, story: list[tuple[str, int, int]]
) -> None:
    admission = Admission(num_lanes, max_waiting)
    there: list[Ticket] = []
    for client, num_texts, leaving in story:
        there += admission.ask(client, num_texts) or []
        admitted(admission)
        admission.check()
        assert admission.num_running == num_lanes or not admission.num_waiting
        assert admission.num_running + admission.num_waiting == len(there)
        assert admission.num_waiting <= max_waiting
        if leaving < len(there):
            admission.leave(there.pop(leaving))
            admitted(admission)
    for ticket in there:
        admission.leave(ticket)
        admitted(admission)
    assert (admission.num_running, admission.num_waiting) == (0, 0)
