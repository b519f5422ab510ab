"""Mistakes that only a drafter that is a head shows: features of the wrong rows, and stale ones."""

from typing import Any

from drafter_node.feeding import Change, Given, HeadReading
from engine.layout.slots import Feed, SlotMap
from node.lanes import Lane
from target_node import verifying
from tests.simulation.faults import Fault, Patch

WRONG_ROW = "a feature of another row"
GUESSED = "as the head had guessed it"


def a_feature_is_taken_for_that_of_the_next_token(patch: Patch) -> None:
    take = Given.take

    def shifted(self: Given, start: int, end: int) -> tuple[bytes | None, ...]:
        return take(self, start, end + 1)[1:]

    patch.setattr(Given, "take", shifted)


def features_are_told_from_the_row_after_the_first(patch: Patch) -> None:
    tell = verifying.tell_features
    patch.setattr(
        verifying,
        "tell_features",
        lambda opened, text, start, rows: tell(opened, text, start + 1, rows),
    )


def committed_drafts_stay_as_they_were_guessed(patch: Patch) -> None:
    moved = HeadReading.moved

    def content(self: HeadReading) -> Change:
        moved(self)
        self._slots.fed_len = self._slots.prefix_len
        return Change.NONE

    patch.setattr(HeadReading, "moved", content)


def a_lane_keeps_what_was_guessed(patch: Patch) -> None:
    def num_cached_of(self: Lane, tokens: list[int]) -> int:
        return min(self.slots.prefix_len, self.text.common_len(tokens))

    begin = Lane.begin

    def guessing(self: Lane, text: object, **how: Any) -> None:
        begin(self, text, **how)
        self.slots.fed_len = self.slots.prefix_len

    patch.setattr(Lane, "num_cached_of", num_cached_of)
    patch.setattr(Lane, "begin", guessing)


def a_gap_in_the_features_is_not_waited_for(patch: Patch) -> None:
    def is_ready(self: HeadReading) -> bool:
        length = len(self._text)
        return self._slots.fed_len == length or length - 1 in self._given._rows

    patch.setattr(HeadReading, "is_ready", property(is_ready))


def the_tree_is_given_away_by_what_is_read_again(patch: Patch) -> None:
    feed = SlotMap.feed

    def forgetful(self: SlotMap[int], missing: list[int], nodes: list = (), **again: int) -> Feed:
        if again.get("num_again"):
            self._places.clear()
            self._taken = 0
        return feed(self, missing, nodes, **again)

    patch.setattr(SlotMap, "feed", forgetful)


HEAD_FAULTS = (
    Fault(a_feature_is_taken_for_that_of_the_next_token, WRONG_ROW),
    Fault(features_are_told_from_the_row_after_the_first, WRONG_ROW),
    Fault(committed_drafts_stay_as_they_were_guessed, GUESSED),
    Fault(a_lane_keeps_what_was_guessed, GUESSED),
    Fault(a_gap_in_the_features_is_not_waited_for, "share one mask word"),
    Fault(the_tree_is_given_away_by_what_is_read_again, "KeyError"),
)
