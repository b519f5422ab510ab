"""The lines of a journal: what was written is read again, and what is damaged is found."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.journal.records import (
    Asked,
    Came,
    Ended,
    Gone,
    Head,
    Ran,
    Record,
    Scored,
    TakenUp,
    head_line,
    line_of,
    read,
)
from proto.messages import Logprobs

HEAD = Head("target, float32", 6000, "digest")
PROBS = Logprobs((5, 6, 7, 8), (-0.1, -2.5, -0.30000001192092896, -1e-9), (1, 3))
RECORDS: list[Record] = [
    Asked("a/b", 12.5, "/v1/completions", "key", "key 0", {"prompt": "ä\n"}, ((1, 2),), 2, 7),
    Scored("a/b", 0, PROBS),
    Came("a/b", 0, 0, (5, 7), PROBS),
    Came("a/b", 1, 3, (9,)),
    Ended("a/b", 0, "stop"),
    Ended("a/b", 1, "error", "no memory"),
    Ran("a/b", is_running=False),
    TakenUp("a/b"),
    Gone("a/b"),
]
LINES = [head_line(HEAD), *map(line_of, RECORDS)]


def test_what_was_written_is_read_again() -> None:
    found = read(b"".join(LINES))
    assert (found.head, found.records) == (HEAD, RECORDS)
    assert not found.is_torn
    assert found.garbled == ""


def test_an_empty_file_holds_nothing() -> None:
    found = read(b"")
    assert (found.head, found.records, found.is_torn, found.garbled) == (None, [], False, "")


def test_a_record_that_was_cut_off_is_left_out_and_those_before_it_count() -> None:
    whole = b"".join(LINES)
    for size in range(len(whole)):
        found = read(whole[:size])
        num_whole = whole[:size].count(b"\n")
        assert found.records == RECORDS[: max(0, num_whole - 1)], size
        assert found.is_torn == (whole[:size] != b"" and not whole[:size].endswith(b"\n")), size
        assert found.garbled == ""


@given(data=st.data(), flips=st.integers(1, 255))
def test_a_damaged_record_is_named_and_nothing_behind_it_is_trusted(
    data: st.DataObject, flips: int
) -> None:
    number = data.draw(st.integers(0, len(LINES) - 2))
    place = data.draw(st.integers(0, len(LINES[number]) - 2))
    line = bytearray(LINES[number])
    line[place] ^= flips
    found = read(b"".join([*LINES[:number], bytes(line), *LINES[number + 1 :]]))
    begin = sum(map(len, LINES[:number]))
    if line[place] == ord("\n"):
        assert found.garbled == f"line {number + 1} (byte {begin})"
    elif place < 8 and found.garbled == "":
        # A digit of a checksum in another case is the same digit.
        assert bytes(line).lower() == LINES[number].lower()
        return
    elif place == 8:
        return  # the space says nothing
    assert found.garbled == f"line {number + 1} (byte {begin})"
    assert found.records == RECORDS[: max(0, number - 1)]


def test_a_damaged_last_record_counts_as_cut_off() -> None:
    found = read(b"".join(LINES[:-1]) + LINES[-1].replace(b"gone", b"gane"))
    assert found.records == RECORDS[:-1]
    assert found.is_torn
