"""How the processes that a coordinator starts are called."""

import pytest

from coordinator.launching.places import by_name, name_among, place_of


@pytest.mark.parametrize(
    ("identity", "others", "name"),
    [
        ("target-1", ["target-1", "drafter-1"], "target"),
        ("target-1.2", ["target-1", "drafter-1"], "target"),
        ("target-1", ["target-1", "target-2"], "target-1"),
        ("target-2.1", ["target-1.3", "target-2.1"], "target-2"),
        ("drafter-1", ["target-1", "target-2", "drafter-1"], "drafter"),
    ],
)
def test_a_process_has_the_name_of_its_place_beside_others_of_its_role(
    identity: str, others: list[str], name: str
) -> None:
    assert name_among(identity, others) == name


def test_a_place_is_that_of_all_processes_that_have_it_one_after_another() -> None:
    assert {place_of(one) for one in ("target-2", "target-2.1", "target-2.14")} == {"target-2"}


def test_process_ids_are_told_by_name() -> None:
    pids = {"target-1.1": 5, "target-2": 6, "drafter-1": 7}
    assert by_name(pids) == {"target-1": 5, "target-2": 6, "drafter": 7}
