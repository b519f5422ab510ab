"""Mistakes that only a drafter that is a head shows: features of the wrong rows, and stale ones."""

from drafter_node.given import Given
from drafter_node.reading import Change, HeadReading
from engine.slots import Feed, SlotMap
from node.lanes import Lane
from proto.messages import Features
from target_node import verifying
from tests.simulation.faults import Fault, Patch

WRONG_ROW = "a feature of another row"
GUESSED = "as the head had guessed it"


def a_feature_is_taken_for_that_of_the_next_token(patch: Patch) -> None:
    of = Given.of

    def shifted(self: Given, start: int, end: int) -> tuple[bytes | None, ...]:
        return of(self, start, end + 1)[1:]

    patch.setattr(Given, "of", shifted)


def features_are_told_from_the_row_after_the_first(patch: Patch) -> None:
    tell = verifying.tell_features
    patch.setattr(
        verifying,
        "tell_features",
        lambda opened, text, start, rows: tell(opened, text, start + 1, rows),
    )


def a_path_is_known_by_its_length(patch: Patch) -> None:
    def heard(self: Given, message: Features) -> None:
        if message.end_len > len(self._text):
            self._early.append(message)
        else:
            self._take(message)

    patch.setattr(Given, "heard", heard)


def committed_drafts_stay_as_they_were_guessed(patch: Patch) -> None:
    def feed(self: HeadReading, rows: list[tuple[int, int | None, int, int]]) -> Feed:
        start = self._slots.prefix_len
        missing = self._text.tokens[start:]
        return self._with_features(self._slots.feed(missing, rows), start)

    patch.setattr(HeadReading, "feed", feed)


def a_lane_keeps_what_was_guessed(patch: Patch) -> None:
    def num_cached_of(self: Lane, tokens: list[int]) -> int:
        return min(self.slots.prefix_len, self.text.common_len(tokens))

    begin = Lane.begin

    def guessing(self: Lane, text: object, *, keep: bool = True) -> None:
        begin(self, text, keep=keep)
        self.slots.fed_len = self.slots.prefix_len

    patch.setattr(Lane, "num_cached_of", num_cached_of)
    patch.setattr(Lane, "begin", guessing)


def a_stale_root_stays_expanded_for_ever(patch: Patch) -> None:
    """What is too far behind to be read in one forward is forgotten, and the tree is not."""
    moved = HeadReading.moved

    def keeps(self: HeadReading) -> Change:
        change = moved(self)
        return Change.NONE if change is Change.ALL else change

    patch.setattr(HeadReading, "moved", keeps)


def the_tree_is_given_away_by_what_is_read_again(patch: Patch) -> None:
    feed = SlotMap.feed

    def forgetful(self: SlotMap[int], missing: list[int], nodes: list = (), **again: int) -> Feed:
        if again.get("num_again"):
            self._places.clear()
        return feed(self, missing, nodes, **again)

    patch.setattr(SlotMap, "feed", forgetful)


HEAD_FAULTS = (
    Fault(a_feature_is_taken_for_that_of_the_next_token, WRONG_ROW),
    Fault(features_are_told_from_the_row_after_the_first, f"{WRONG_ROW}|."),
    Fault(a_path_is_known_by_its_length, WRONG_ROW),
    Fault(committed_drafts_stay_as_they_were_guessed, GUESSED),
    Fault(a_lane_keeps_what_was_guessed, GUESSED),
    Fault(a_stale_root_stays_expanded_for_ever, "."),
    Fault(the_tree_is_given_away_by_what_is_read_again, "."),
)
