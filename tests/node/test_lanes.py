"""Which lane of the cache a text gets, and what it finds there."""

from dataclasses import dataclass

import pytest

from node.events import CopyPrefix
from node.lanes import MIN_COPIED, READ_AGAIN, TOLD_LATE, Lane, Lanes, next_reader
from proto.messages import Open
from proto.tree import CommittedText
from tests.texts import key_of, opening

NUM_SLOTS = 400
LONG = tuple(range(200))


def begun(lanes: Lanes, session: int, *tokens: int, num_read: int | None = None) -> Lane:
    """A lane with this text, of which so many tokens have been read; all, if nothing is said."""
    lane = lanes.take(tokens, key_of(session))
    lane.begin(CommittedText(key_of(session), tokens))
    read(lane, len(tokens) if num_read is None else num_read)
    lanes.check()
    return lane


def read(lane: Lane, length: int) -> None:
    """The first `length` tokens of its text are cached."""
    lane.slots.feed_prefix(lane.text.tokens[lane.slots.prefix_len : length])


def closed(lanes: Lanes, *sessions: int) -> list[Lane]:
    """A lane for each of these texts of their own, closed in this order."""
    used = [
        begun(lanes, session, *range(1000 * session, 1000 * session + 9)) for session in sessions
    ]
    for lane in used:
        lanes.give_back(lane)
    return used


def test_a_text_gets_the_lane_that_has_the_longest_beginning_of_it() -> None:
    lanes = Lanes(3, NUM_SLOTS)
    used = [begun(lanes, n, *LONG[:50], *range(1000 * n, 1000 * n + n * 30)) for n in (1, 2, 3)]
    for lane in used:
        lanes.give_back(lane)
    assert lanes.take((*LONG[:50], *range(2000, 2070)), key_of(9)) is used[1]


def test_what_is_not_cached_of_a_beginning_does_not_count() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    much, little = begun(lanes, 1, *LONG[:100]), begun(lanes, 2, *LONG, num_read=50)
    lanes.give_back(much)
    lanes.give_back(little)
    assert little.num_cached_of(LONG) == 50
    assert lanes.take(LONG, key_of(9)) is much


def test_a_text_gets_its_own_lane_again() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    own, other = begun(lanes, 1, 1, 2, 3, num_read=1), begun(lanes, 2, *LONG)
    lanes.give_back(own)
    lanes.give_back(other)
    # By its key, though another lane has more of it now.
    assert lanes.take(LONG, key_of(1)) is own


def test_without_a_beginning_it_gets_the_lane_that_was_free_for_longest() -> None:
    lanes = Lanes(3, NUM_SLOTS)
    first, second, third = closed(lanes, 1, 2, 3)
    assert lanes.take(LONG, key_of(9)) is first
    assert lanes.take(LONG, key_of(8)) is second
    lanes.give_back(first)
    assert lanes.take(LONG, key_of(7)) is third
    assert lanes.take(LONG, key_of(6)) is first


def test_a_beginning_that_is_read_again_as_quickly_takes_no_lane_that_others_may_want() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    used = begun(lanes, 1, *LONG)
    lanes.give_back(used)
    unused = lanes.take((*LONG[: MIN_COPIED - 1], 500, 501), key_of(2))
    assert unused is not used
    lanes.give_back(unused)
    assert lanes.take((*LONG[:MIN_COPIED], 500, 501), key_of(3)) is used


def test_a_lane_that_is_taken_is_given_to_nobody_else() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    first = begun(lanes, 1, *LONG)
    assert lanes.num_free == 1
    assert lanes.take(LONG, key_of(2)) is not first
    assert lanes.num_free == 0
    lanes.give_back(first)
    assert lanes.num_free == 1


def test_a_lane_that_is_given_to_two_texts_is_caught() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    lane = begun(lanes, 1, 1, 2)
    lanes._taken.append(lane)
    with pytest.raises(AssertionError, match="two texts"):
        lanes.check()


def test_a_text_keeps_what_is_cached_of_it_but_for_its_last_token() -> None:
    lanes = Lanes(1, NUM_SLOTS)
    lane = begun(lanes, 1, 1, 2, 3, 4)
    lane.begin(CommittedText(key_of(1), (1, 2, 3, 4)))
    assert lane.slots.prefix_len == 3
    lane.begin(CommittedText(key_of(1), (1, 2, 7)))
    assert lane.slots.prefix_len == 2
    lane.begin(CommittedText(key_of(1), (1, 2, 7)), keep=False)
    assert lane.slots.prefix_len == 0


@pytest.mark.parametrize("num_read", [READ_AGAIN // 2, 2 * READ_AGAIN])
def test_a_text_for_a_head_reads_its_end_again_if_no_head_was_told_of_it(num_read: int) -> None:
    lanes = Lanes(2, NUM_SLOTS)
    tokens = tuple(range(num_read))
    plain = begun(lanes, 1, *tokens)
    lanes.give_back(plain)
    text = CommittedText(key_of(1), tokens)
    plain.begin(text, layers=(1, 2))
    assert plain.slots.prefix_len == max(0, num_read - READ_AGAIN - 1)
    read(plain, num_read)
    plain.begin(text, layers=(1, 2))
    assert plain.slots.prefix_len == num_read - TOLD_LATE - 1, "the head was told the second time"
    read(plain, num_read)
    plain.begin(text, layers=(3,))
    assert plain.slots.prefix_len == max(0, num_read - READ_AGAIN - 1), "others are wanted"
    read(plain, num_read)
    plain.begin(text)
    assert plain.slots.prefix_len == num_read - 1


def test_and_copies_no_more_than_that_of_a_text_without_one() -> None:
    lanes = Lanes(3, NUM_SLOTS)
    tokens = tuple(range(2 * READ_AGAIN))
    plain = begun(lanes, 1, *tokens)
    other = lanes.take(tokens, key_of(2))
    other.begin(CommittedText(key_of(2), tokens), layers=(1, 2))
    copy = lanes.copy_for(other, tokens)
    assert copy == CopyPrefix(plain.slots.lane, other.slots.lane, READ_AGAIN - 1)
    other.copied(copy)
    read(other, len(tokens))
    third = lanes.take(tokens, key_of(3))
    third.begin(CommittedText(key_of(3), tokens), layers=(1, 2))
    want = CopyPrefix(other.slots.lane, third.slots.lane, len(tokens) - TOLD_LATE - 1)
    assert lanes.copy_for(third, tokens) == want


def test_what_another_lane_has_is_copied() -> None:
    lanes = Lanes(3, NUM_SLOTS)
    some, most = begun(lanes, 1, *LONG[:100]), begun(lanes, 2, *LONG)
    lane = begun(lanes, 3, *LONG[:150], 999, 998, num_read=20)
    copy = lanes.copy_for(lane, lane.text.tokens)
    assert copy == CopyPrefix(most.slots.lane, lane.slots.lane, 150)
    assert lane.slots.prefix_len == 20, "nothing is done by asking"
    lane.copied(copy)
    assert lane.slots.prefix_len == 150
    assert lanes.copy_for(lane, lane.text.tokens) is None, "it has it now"
    assert some.slots.prefix_len == 100


def test_also_of_a_lane_whose_text_is_closed() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    lane, other = begun(lanes, 1, *LONG, num_read=1), begun(lanes, 2, *LONG)
    lanes.give_back(other)
    copy = lanes.copy_for(lane, LONG)
    assert copy == CopyPrefix(other.slots.lane, lane.slots.lane, len(LONG) - 1), (
        "not the last token"
    )


@pytest.mark.parametrize("num_more", [MIN_COPIED - 1, MIN_COPIED])
def test_few_tokens_are_not_copied(num_more: int) -> None:
    lanes = Lanes(2, NUM_SLOTS)
    lane = begun(lanes, 1, *LONG, num_read=50)
    begun(lanes, 2, *LONG[: 50 + num_more], 999)
    assert (lanes.copy_for(lane, LONG) is not None) is (num_more == MIN_COPIED)


def test_a_copy_of_its_own_is_none() -> None:
    lanes = Lanes(2, NUM_SLOTS)
    lane = begun(lanes, 1, *LONG, num_read=150)
    begun(lanes, 2, *LONG[:100])
    assert lanes.copy_for(lane, LONG) is None


@dataclass
class Reader:
    """A text that is being read."""

    opened: Open
    lane: Lane
    may_copy: bool = True


def readers(lanes: Lanes, *texts: tuple[int, tuple[int, ...], int]) -> list[Reader]:
    """Readers of these texts, of which so many tokens have been read."""
    return [
        Reader(opening(*tokens, session=session), begun(lanes, session, *tokens, num_read=num_read))
        for session, tokens, num_read in texts
    ]


def test_who_comes_first_reads_first() -> None:
    assert next_reader([]) is None
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 1), (1, LONG[::-1], 1))
    assert next_reader(every) is every[0]


def test_a_text_that_begins_as_an_older_one_waits_for_its_copy() -> None:
    younger, older = every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 1), (1, (*LONG, 7), 1))
    assert next_reader(every) is older
    assert next_reader([younger]) is younger


def test_not_for_what_it_has_read_itself_or_would_read_as_quickly() -> None:
    num_alike = 1 + MIN_COPIED
    alike = (*LONG[:num_alike], *range(900, 990))
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 1), (1, alike, 1))
    assert next_reader(every) is every[0]
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 1), (1, (LONG[num_alike], *alike), 1))
    assert next_reader(every) is every[0]
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 150), (1, LONG, 1))
    assert next_reader(every) is every[1], "the older one has more than that still to read"
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 180), (1, LONG, 1))
    assert next_reader(every) is every[0]


def test_nor_if_it_may_not_copy() -> None:
    every = readers(Lanes(2, NUM_SLOTS), (2, LONG, 1), (1, LONG, 1))
    every[0].may_copy = False
    assert next_reader(every) is every[0]
