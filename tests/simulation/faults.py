"""Mistakes that the simulator must catch: each is one small change to a machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from coordinator.text.session import Session
from drafter_node import scheduling as drafter_scheduling
from drafter_node.frontier import Frontier, Tip
from drafter_node.sending import Numbers
from engine.layout.slots import Feed, SlotMap
from node.costs import Prices
from node.dispatcher import CLOSED, Dispatcher
from node.lanes import Lane
from proto.messages import FinishReason, Limits, Open
from proto.tree import CommittedText, Graft, SpeculationTree
from target_node import deciding
from target_node import scheduling as target_scheduling
from target_node.accepting import Judged
from target_node.drafts_at_hand import _Source
from target_node.lookup import LookupSource
from target_node.verifying import Verifying

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake, what the simulator must say about it, and where it shows soonest.

    oracle   with a drafter that is always right, as for most of what costs only speed
    alone    one text at a time, where others would hide it
    leaving  with readers that leave early, whose lanes are given away during a forward
    """

    plant: Callable[[Patch], None]
    symptom: str
    policy: str | None = None
    oracle: bool = False
    alone: bool = False
    leaving: bool = False

    @property
    def name(self) -> str:
        """The mistake in words."""
        return self.plant.__name__.replace("_", " ")


# -- guards by length instead of by hash ----------------------------------------------------------


def a_draft_is_known_by_the_length_of_its_parent(patch: Patch) -> None:
    attach = SpeculationTree.attach

    def by_length(self: SpeculationTree, graft: Graft) -> int:
        ahead = graft.parent_len - len(self.text)
        chain = self.best_chain(max(0, ahead))
        if ahead <= 0:
            graft = replace(graft, parent_hash=self.text.path_hashes[graft.parent_len])
        elif len(chain) == ahead:
            graft = replace(graft, parent_hash=chain[-1].key)
        return attach(self, graft)

    patch.setattr(SpeculationTree, "attach", by_length)


def a_verdict_is_known_by_the_length_of_its_base(patch: Patch) -> None:
    def by_length(
        self: SpeculationTree, base_len: int, base_hash: int, tokens: Sequence[int]
    ) -> Sequence[int] | None:
        ahead = base_len - len(self.text)
        if ahead <= 0:
            return tokens[-ahead:]
        chain = self.best_chain(ahead)
        return (*(node.token for node in chain), *tokens) if len(chain) == ahead else None

    patch.setattr(SpeculationTree, "news", by_length)


def a_cached_prefix_is_known_by_its_length(patch: Patch) -> None:
    def by_length(self: CommittedText, tokens: Sequence[int]) -> int:
        return min(len(self), len(tokens))

    patch.setattr(CommittedText, "common_len", by_length)


# -- the cache ------------------------------------------------------------------------------------


def an_open_keeps_one_row_too_many(patch: Patch) -> None:
    truncate = SlotMap.truncate
    patch.setattr(SlotMap, "truncate", lambda self, length: truncate(self, length + 1))


def a_verdict_counts_one_row_too_many_as_cached(patch: Patch) -> None:
    advance = SlotMap.advance

    def one_more(self: SlotMap[int], path: Sequence[int], survivors: Any) -> Any:
        move = advance(self, path, survivors)
        self.prefix_len += bool(path)
        return move

    patch.setattr(SlotMap, "advance", one_more)


def catching_up_feeds_one_token_too_few(patch: Patch) -> None:
    feed = SlotMap.feed

    def one_less(self: SlotMap[int], missing: Sequence[int], nodes: Any = ()) -> Feed:
        if len(missing) > 1:
            self.prefix_len += 1
            missing = missing[1:]
        return feed(self, missing, nodes)

    patch.setattr(SlotMap, "feed", one_less)


def a_node_does_not_inherit_the_mask_of_its_parent(patch: Patch) -> None:
    allocate = SlotMap._allocate
    patch.setattr(SlotMap, "_allocate", lambda self, key, _, at: allocate(self, key, None, at))


def a_pass_has_more_rows_than_the_fixed_number(patch: Patch) -> None:
    def unlimited(self: Verifying) -> int:
        room = self.opened.limits.max_drafts(len(self.tree.text))
        return min(self.opened.policy.num_speculative_tokens, room)

    patch.setattr(Verifying, "_num_drafts_max", unlimited)


# -- the text -------------------------------------------------------------------------------------


def the_recovered_token_is_dropped(patch: Patch) -> None:
    judge = Verifying._judge

    def without(self: Verifying, *of_pass: Any) -> Judged:
        judged = judge(self, *of_pass)
        if not judged.has_rejected:
            return judged
        return replace(judged, tokens=judged.tokens[:-1], finish=None)

    patch.setattr(Verifying, "_judge", without)


def a_verdict_that_comes_twice_is_applied_twice(patch: Patch) -> None:
    def append(
        self: CommittedText, base_len: int, base_hash: int, tokens: Sequence[int]
    ) -> Sequence[int] | None:
        return tokens if self.is_prefix(base_len, base_hash) else None

    patch.setattr(CommittedText, "continuation", append)


def _trim_by_length(
    self: Limits, start_len: int, tokens: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    allowed = tuple(tokens[: self.max_len - start_len])
    done = start_len + len(allowed) >= self.max_len
    return allowed, FinishReason.LENGTH if done else None


def a_stop_token_does_not_end_the_text(patch: Patch) -> None:
    patch.setattr(Limits, "trim", _trim_by_length)


def the_session_does_not_look_for_stop_tokens(patch: Patch) -> None:
    on_verdict = Session._on_verdict

    def careless(self: Session, verdict: Any, now: float) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Limits, "trim", _trim_by_length)
            return on_verdict(self, verdict, now)

    patch.setattr(Session, "_on_verdict", careless)


def drafts_go_past_the_longest_text(patch: Patch) -> None:
    def one_more(self: Limits, length: int) -> int:
        return max(0, self.max_len - length)

    patch.setattr(Limits, "max_drafts", one_more)


# -- lives ----------------------------------------------------------------------------------------


def an_open_of_the_same_incarnation_is_obeyed(patch: Patch) -> None:
    on_open = Dispatcher._on_open

    def obey(self: Dispatcher[Any, Any, Any], message: Open, now: float) -> Any:
        if self._newest.get(message.session) == message.incarnation:
            self._newest[message.session] -= 1
        return on_open(self, message, now)

    patch.setattr(Dispatcher, "_on_open", obey)


def a_late_open_revives_a_closed_text(patch: Patch) -> None:
    remember = Dispatcher._remember

    def forget(self: Dispatcher[Any, Any, Any], session: int, incarnation: int) -> None:
        if incarnation == CLOSED:
            self._newest.pop(session, None)
            return
        remember(self, session, incarnation)

    patch.setattr(Dispatcher, "_remember", forget)


def _of_whichever_life(patch: Patch, scheduling: Any) -> None:
    done = scheduling.Schedule.done

    def unchecked(self: Any, result: Any, texts: Any, now: float) -> Any:
        with Patch.context() as inner:
            inner.setattr(scheduling, "is_open", lambda text, texts: True)
            return done(self, result, texts, now)

    patch.setattr(scheduling.Schedule, "done", unchecked)


def the_target_uses_the_result_of_an_earlier_life(patch: Patch) -> None:
    _of_whichever_life(patch, target_scheduling)


def the_drafter_uses_the_result_of_an_earlier_life(patch: Patch) -> None:
    _of_whichever_life(patch, drafter_scheduling)


# -- speed: the text stays right ------------------------------------------------------------------


def what_was_lost_is_not_sent_again(patch: Patch) -> None:
    patch.setattr(Numbers, "heard", lambda self, message: False)


def a_draft_that_comes_too_early_is_dropped(patch: Patch) -> None:
    patch.setattr(SpeculationTree, "_keep_orphan", lambda self, graft: None)


def an_ack_counts_over_a_gap(patch: Patch) -> None:
    def careless(self: _Source, first: int, last: int) -> None:
        self.number = max(self.number, last)

    patch.setattr(_Source, "add", careless)


def the_later_child_wins(patch: Patch) -> None:
    place = SpeculationTree._place

    def anew(self: SpeculationTree, length: int, parent: int, *rest: Any) -> Any:
        if length >= len(self.text) and (existing := self.child(parent, rest[0].tokens[rest[1]])):
            existing.children.clear()
        return place(self, length, parent, *rest)

    patch.setattr(SpeculationTree, "_place", anew)


def _do_not_look_at_heartbeats(patch: Patch, schedule: type) -> None:
    on_marks = Dispatcher._on_marks

    def blind(self: Dispatcher[Any, Any, Any], *args: Any) -> Any:
        return () if isinstance(self._schedule, schedule) else on_marks(self, *args)

    patch.setattr(Dispatcher, "_on_marks", blind)


def the_drafter_does_not_look_at_heartbeats(patch: Patch) -> None:
    _do_not_look_at_heartbeats(patch, drafter_scheduling.Schedule)


def the_target_does_not_look_at_heartbeats(patch: Patch) -> None:
    _do_not_look_at_heartbeats(patch, target_scheduling.Schedule)


def a_fault_is_not_answered(patch: Patch) -> None:
    patch.setattr(Session, "_on_fault", lambda self, role, fault, now: [])


def an_open_that_was_lost_is_not_sent_again(patch: Patch) -> None:
    repair = Session._repair

    def once(self: Session, role: Any, incarnation: int, now: float) -> Any:
        told = self._told.get(role)
        return repair(self, role, incarnation, now if told is None else told.at)

    patch.setattr(Session, "_repair", once)


def the_target_waits_for_ever(patch: Patch) -> None:
    def endless(wanted: int, prices: Prices, *, is_ahead: bool) -> float:
        return float("inf")

    patch.setattr(deciding, "wait_limit_s", endless)


def the_drafter_ignores_its_window(patch: Patch) -> None:
    tips = Frontier.tips

    def wide(self: Frontier) -> list[Tip]:
        narrow, self._window = self._window, 64
        found = tips(self)
        self._window = narrow
        return found

    patch.setattr(Frontier, "tips", wide)


NOT_DRAFTED_THERE = "nobody drafted there"
NOT_THE_TEXT = "text is wrong|not the target's text"
BAD_CACHE = (
    "CacheError|IndexError|is not the target's text|the target's text is wrong|"
    "its model does not say|a pass has no rows"
)
# -- drafts of the target itself ------------------------------------------------------------------


def the_target_copies_more_than_there_is_room_for(patch: Patch) -> None:
    grow = LookupSource.grow

    def too_much(self: LookupSource, tree: SpeculationTree, limit: int) -> None:
        grow(self, tree, limit + 2)

    patch.setattr(LookupSource, "grow", too_much)


def a_text_that_is_opened_again_is_indexed_behind_what_was_there(patch: Patch) -> None:
    begin = Verifying.__init__

    def go_on(
        self: Verifying, opened: Open, lane: Lane, known: Any, earlier: Any, now: Any
    ) -> None:
        begin(self, opened, lane, known, earlier, now)
        if earlier is not None and (index := earlier.drafts._lookup._index) is not None:
            index.extend(self.tree.text.tokens)
            self.drafts._lookup._index = index

    patch.setattr(Verifying, "__init__", go_on)


NO_SPEED = "no draft is accepted"
CLOSED_AGAIN = "a closed text is open again|an old Open has been obeyed"

FAULTS = (
    Fault(a_draft_is_known_by_the_length_of_its_parent, NOT_DRAFTED_THERE),
    Fault(a_verdict_is_known_by_the_length_of_its_base, NOT_THE_TEXT),
    Fault(a_cached_prefix_is_known_by_its_length, BAD_CACHE),
    Fault(an_open_keeps_one_row_too_many, BAD_CACHE),
    Fault(a_verdict_counts_one_row_too_many_as_cached, BAD_CACHE),
    Fault(catching_up_feeds_one_token_too_few, BAD_CACHE),
    Fault(a_node_does_not_inherit_the_mask_of_its_parent, BAD_CACHE),
    Fault(a_pass_has_more_rows_than_the_fixed_number, "rows in a pass of", oracle=True),
    Fault(the_recovered_token_is_dropped, "says nothing|accepted tokens make|IndexError"),
    Fault(a_verdict_that_comes_twice_is_applied_twice, NOT_THE_TEXT),
    Fault(a_stop_token_does_not_end_the_text, NOT_THE_TEXT),
    Fault(the_session_does_not_look_for_stop_tokens, f"{NOT_THE_TEXT}|still missing"),
    Fault(drafts_go_past_the_longest_text, "past the longest text"),
    Fault(an_open_of_the_same_incarnation_is_obeyed, "old Open has been obeyed"),
    Fault(a_late_open_revives_a_closed_text, CLOSED_AGAIN),
    Fault(the_target_uses_the_result_of_an_earlier_life, f"{BAD_CACHE}|never came"),
    Fault(
        the_drafter_uses_the_result_of_an_earlier_life,
        f"{BAD_CACHE}|{NOT_DRAFTED_THERE}|hangs|ValueError|KeyError",
    ),
    Fault(what_was_lost_is_not_sent_again, f"{NO_SPEED}|did not continue", oracle=True),
    Fault(
        a_draft_that_comes_too_early_is_dropped,
        f"{NO_SPEED}|still missing",
        oracle=True,
    ),
    Fault(an_ack_counts_over_a_gap, "never came"),
    Fault(the_later_child_wins, "hangs nowhere|KeyError"),
    Fault(the_drafter_does_not_look_at_heartbeats, NO_SPEED, oracle=True),
    Fault(the_target_does_not_look_at_heartbeats, f"{NO_SPEED}|still missing"),
    Fault(a_fault_is_not_answered, f"{NO_SPEED}|still missing", oracle=True),
    Fault(an_open_that_was_lost_is_not_sent_again, f"{NO_SPEED}|still missing", oracle=True),
    Fault(the_target_waits_for_ever, "without a deadline", "sync"),
    Fault(the_drafter_ignores_its_window, "beyond its window"),
    Fault(the_target_copies_more_than_there_is_room_for, "past the longest text"),
    Fault(a_text_that_is_opened_again_is_indexed_behind_what_was_there, "another text"),
)
