"""The ids of events: what a client sends back says what it has got."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.told import Told
from proto.errors import ConfigurationError


@given(
    chunks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=20),
    has_usage=st.booleans(),
)
def test_an_id_that_comes_back_says_what_was_told(
    chunks: list[tuple[int, int, bool]], *, has_usage: bool
) -> None:
    told = Told.nothing(3)
    for place, number, is_last in chunks:
        told.add(place, number, is_last=is_last)
    told.has_usage = has_usage
    assert Told.read(told.event_id, 3) == told


def test_ids_are_short() -> None:
    told = Told.nothing(2)
    assert told.event_id == "-,-"
    told.add(0, 12, is_last=False)
    told.add(1, 0, is_last=False)
    assert told.event_id == "12,0"
    told.add(0, 0, is_last=True)
    assert told.event_id == "12.,0"


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "x,1", "1,-1", "1,,", "12345678,1", "1.5,2"])
def test_what_is_no_id_of_such_an_answer_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="the id of no event"):
        Told.read(text, 2)
