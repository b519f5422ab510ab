"""Mistakes with several texts on a node that the simulator must catch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from node.lanes import Lane, Lanes
from target_node import scheduling as target_scheduling
from target_node.compute import Computed
from tests.simulation.faults import BAD_CACHE, NOT_THE_TEXT, Fault, Patch


def all_texts_lie_in_one_lane(patch: Patch) -> None:
    begin = Lane.__init__
    patch.setattr(
        Lane, "__init__", lambda self, number, *sizes, **more: begin(self, 0, *sizes, **more)
    )


def a_lane_that_is_taken_is_given_away(patch: Patch) -> None:
    take = Lanes.take

    def any_lane(self: Lanes, tokens: Sequence[int], key: bytes) -> Lane:
        taken, self._taken = self._taken, []
        lane = take(self, tokens, key)
        self._taken = [*taken, lane]
        return lane

    patch.setattr(Lanes, "take", any_lane)


def another_text_is_copied_by_its_length(patch: Patch) -> None:
    def by_length(self: Lane, tokens: Sequence[int]) -> int:
        return min(self.slots.prefix_len, len(tokens))

    patch.setattr(Lane, "num_cached_of", by_length)


def the_outcomes_of_a_pass_reach_each_other(patch: Patch) -> None:
    done = target_scheduling.Schedule.done

    def turned(self: Any, result: Computed, texts: Any, now: float) -> Any:
        return done(self, replace(result, outcomes=result.outcomes[::-1]), texts, now)

    patch.setattr(target_scheduling.Schedule, "done", turned)


def a_text_is_never_scheduled_again(patch: Patch) -> None:
    tick = target_scheduling.Schedule.tick

    def forgetful(self: Any, texts: Any, now: float) -> Any:
        some = {key: text for key, text in texts.items() if not text.served or key % 2}
        return tick(self, some, now)

    patch.setattr(target_scheduling.Schedule, "tick", forgetful)


SCHEDULING_FAULTS = (
    Fault(all_texts_lie_in_one_lane, f"{BAD_CACHE}|in one lane"),
    Fault(a_lane_that_is_taken_is_given_away, "a lane is given to two texts"),
    Fault(another_text_is_copied_by_its_length, BAD_CACHE),
    Fault(the_outcomes_of_a_pass_reach_each_other, NOT_THE_TEXT),
    Fault(a_text_is_never_scheduled_again, "still missing|without a deadline"),
)
