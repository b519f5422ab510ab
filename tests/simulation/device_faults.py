"""Mistakes of a host beside a device that leaves it free: too early, too late, or of another pass.

They show only where messages are heard during a forward, as in three of four seeds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from drafter_node.drafting import Drafting
from node.events import Afterwards
from node.turns import Launched, Turns
from proto.messages import Draft
from rehearsal.device import Device, Handle
from rehearsal.node import SimulatedNode
from target_node import scheduling
from target_node.accepting import Judged
from target_node.compute import Part
from target_node.drafts_at_hand import laid_out
from target_node.verifying import ComputedPart, Verifying
from tests.simulation.faults import NOT_THE_TEXT, Fault, Patch

# -- the result ------------------------------------------------------------------------------------


def a_result_is_read_when_the_next_message_comes(patch: Patch) -> None:
    receive = SimulatedNode.receive

    def hasty(self: SimulatedNode, frame: bytes) -> None:
        receive(self, frame)
        if self.is_computing:
            self._ended()

    patch.setattr(SimulatedNode, "receive", hasty)


def a_device_has_ended_when_it_should_have(patch: Patch) -> None:
    """Whoever asks then gets the result, ready or not."""
    is_over = Turns._is_over

    def trusting(self: Any, running: Launched[Any]) -> bool:
        if running.due_at is not None and self._clock() >= running.due_at:
            return True
        return is_over(self, running)

    patch.setattr(Turns, "_is_over", trusting)


class _LeftInTheBuffer:
    """An outcome of a pass that is read from the buffer whenever it is looked at."""

    def __init__(self, handle: Handle, index: int) -> None:
        self._handle = handle
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # whoever tells the story asks what this is
        return getattr(_read(self._handle)[self._index], name)


_read = Handle.result


def a_result_is_left_in_a_buffer_that_the_next_launch_overwrites(patch: Patch) -> None:
    ended = SimulatedNode._ended

    def lazy(self: Handle) -> Any:
        return tuple(_LeftInTheBuffer(self, index) for index in range(len(_read(self))))

    def lazily(self: SimulatedNode) -> None:
        with Patch.context() as inner:
            if isinstance(self.dispatcher._schedule, scheduling.Schedule):
                inner.setattr(Handle, "result", lazy)
            ended(self)

    patch.setattr(SimulatedNode, "_ended", lazily)


def a_result_is_given_to_the_machine_twice(patch: Patch) -> None:
    finish = SimulatedNode.finish
    latest: dict[SimulatedNode, Any] = {}

    def kept(self: SimulatedNode) -> Any:
        latest[self] = finish(self)
        return latest[self]

    def twice(self: Turns[Any, Any], computed: Launched[Any], *, has_slept: bool) -> None:
        node: SimulatedNode = computed._node  # type: ignore[attr-defined]
        overlapped(self, computed, has_slept=has_slept)
        self._go_on(latest[node])

    overlapped = Turns._overlapped
    patch.setattr(SimulatedNode, "finish", kept)
    patch.setattr(Turns, "_overlapped", twice)


def a_result_is_that_of_another_launch(patch: Patch) -> None:
    finish = SimulatedNode.finish

    def older(self: SimulatedNode) -> Any:
        made = finish(self)
        return replace(made, ticket=made.ticket - (made.ticket > 3))

    patch.setattr(SimulatedNode, "finish", older)


# -- the queue -------------------------------------------------------------------------------------


def a_move_comes_after_the_launch_that_needs_it(patch: Patch) -> None:
    def without(self: scheduling.Schedule, texts: Any, now: float) -> Any:
        return () if self._running is not None else self._next(texts, now)

    patch.setattr(scheduling.Schedule, "tick", without)


def rows_are_moved_before_the_running_forward_has_used_them(patch: Patch) -> None:
    patch.setattr(Device, "move", lambda self, move: self.lanes[move.lane].move(move))


def a_roll_back_frees_the_slots_of_the_running_steps(patch: Patch) -> None:
    patch.setattr(Drafting, "_fed", property(lambda self: self.tree.nodes))


# -- drafts that come during a pass ----------------------------------------------------------------


def a_draft_is_written_into_the_pass_that_is_running(patch: Patch) -> None:
    launch, heard = Verifying.take_part, Verifying._on_draft
    running: dict[Verifying, Part] = {}

    def launched(self: Verifying, *how: Any) -> Part:
        running[self] = launch(self, *how)
        return running[self]

    def join(self: Verifying, message: Draft, now: float) -> Any:
        said = heard(self, message, now)
        if self._running is not None and self._running.nodes and (part := running.get(self)):
            tokens = (*part.feed.tokens[:-1], *message.tokens[-1:])
            object.__setattr__(part.feed, "tokens", tokens[: len(part.feed.tokens)])
        return said

    patch.setattr(Verifying, "take_part", launched)
    patch.setattr(Verifying, "_on_draft", join)


def a_draft_joins_the_pass_that_is_running(patch: Patch) -> None:
    judge = Verifying._judge

    def with_all(self: Verifying, running: Any, keys: Sequence[int], outcome: Any) -> Judged:
        nodes, parents = laid_out(self.tree, self.gather())
        joined = replace(running, parents=parents)
        return judge(self, joined, tuple(node.key for node in nodes), outcome)

    patch.setattr(Verifying, "_judge", with_all)


def a_verdict_counts_a_draft_that_came_during_its_pass(patch: Patch) -> None:
    judge = Verifying._judge

    def with_later(self: Verifying, *of_pass: Any) -> Judged:
        judged = judge(self, *of_pass)
        later = [key for key in self.gather() if key not in {one.key for one in judged.verified}]
        return replace(
            judged, verified=(*judged.verified, *[self.tree.nodes[key] for key in later])
        )

    patch.setattr(Verifying, "_judge", with_later)


# -- lives -----------------------------------------------------------------------------------------


def a_result_is_taken_for_the_text_that_has_the_lane_now(patch: Patch) -> None:
    done = scheduling.Schedule.done

    def by_lane(self: scheduling.Schedule, result: Any, texts: Any, now: float) -> Any:
        assert self._running is not None
        there = {text.lane: text for text in texts.values()}
        meant = tuple(there.get(text.lane, text) for text in self._running.texts)
        for text, other in zip(self._running.texts, meant, strict=True):
            other._running = text._running
        self._running = replace(self._running, texts=meant)
        return done(self, result, texts, now)

    patch.setattr(scheduling.Schedule, "done", by_lane)


# -- what is said afterwards -----------------------------------------------------------------------


def what_a_forward_has_brought_is_not_said(patch: Patch) -> None:
    handled = SimulatedNode.handled

    def silent(self: SimulatedNode, event: Any, now: float) -> Iterator[Any]:
        return iter(()) if isinstance(event, Afterwards) else handled(self, event, now)

    patch.setattr(SimulatedNode, "handled", silent)


def what_a_pass_has_brought_is_said_twice(patch: Patch) -> None:
    report = Verifying.report

    def twice(self: Verifying, part: ComputedPart) -> Any:
        return (*report(self, part), *report(self, part))

    patch.setattr(Verifying, "report", twice)


def _tell_of_the_next_pass(patch: Patch, change: Any) -> None:
    report = Verifying.report

    def confused(self: Verifying, part: ComputedPart) -> Any:
        return report(self, part if self._running is None else change(self, part))

    patch.setattr(Verifying, "report", confused)


def a_verdict_counts_the_drafts_of_the_next_pass(patch: Patch) -> None:
    def change(self: Verifying, part: Any) -> Any:
        assert self._running is not None
        verified = tuple(self.tree.nodes[key] for key in self._running.nodes or ())
        return replace(part, judged=replace(part.judged, verified=verified))

    _tell_of_the_next_pass(patch, change)


def a_verdict_goes_on_from_where_the_next_pass_began(patch: Patch) -> None:
    def change(self: Verifying, part: Any) -> Any:
        moved = replace(part.moved, base_len=len(self.tree.text), base_hash=self.tree.root)
        return replace(part, moved=moved)

    _tell_of_the_next_pass(patch, change)


def copies_count_as_what_they_are_in_the_next_pass(patch: Patch) -> None:
    learn = Verifying.learn

    def confused(self: Verifying, part: Any) -> None:
        learn(self, replace(part, judged=replace(part.judged, copies=self.drafts.copies)))

    patch.setattr(Verifying, "learn", confused)


OTHER_ROWS = "another path|a hole|before it is written|is seen at|not that of the token before"
OTHER_DRAFTS = "a verdict counts .* drafts, but its pass had"

DEVICE_FAULTS = (
    Fault(a_device_has_ended_when_it_should_have, "read before it is ready"),
    Fault(a_result_is_read_when_the_next_message_comes, "read before it is ready"),
    Fault(a_result_is_left_in_a_buffer_that_the_next_launch_overwrites, "has overwritten it"),
    Fault(a_result_is_given_to_the_machine_twice, "AssertionError"),
    Fault(a_result_is_that_of_another_launch, "AssertionError"),
    Fault(a_move_comes_after_the_launch_that_needs_it, f"{OTHER_ROWS}|{NOT_THE_TEXT}"),
    Fault(rows_are_moved_before_the_running_forward_has_used_them, OTHER_ROWS),
    Fault(a_roll_back_frees_the_slots_of_the_running_steps, "KeyError"),
    Fault(a_draft_is_written_into_the_pass_that_is_running, "changed since its launch"),
    Fault(a_draft_joins_the_pass_that_is_running, f"{OTHER_DRAFTS}|IndexError"),
    Fault(a_verdict_counts_a_draft_that_came_during_its_pass, OTHER_DRAFTS),
    Fault(
        a_result_is_taken_for_the_text_that_has_the_lane_now,
        f"{NOT_THE_TEXT}|KeyError",
        leaving=True,
    ),
    Fault(what_a_forward_has_brought_is_not_said, "was not reported yet|have not been sent"),
    Fault(what_a_pass_has_brought_is_said_twice, "a pass is told twice"),
    Fault(a_verdict_counts_the_drafts_of_the_next_pass, OTHER_DRAFTS),
    Fault(a_verdict_goes_on_from_where_the_next_pass_began, NOT_THE_TEXT),
    Fault(copies_count_as_what_they_are_in_the_next_pass, "KeyError"),
)
