"""The target's machine at work: whole action lists for the textbook cases."""

from dataclasses import replace

import pytest

from engine.layout.slots import Feed, SlotMap
from node.economics import WAIT_S_MIN
from node.events import Afterwards, Allocate, Send, WaitUntil
from node.rows import PREFILL_CHUNK
from proto.messages import (
    Ack,
    Cause,
    Close,
    Hit,
    Limits,
    Policy,
)
from target_node.compute import Computed, Outcome
from tests.policies import autoregressive, pipelined
from tests.target_node.target import Target, ready, said
from tests.texts import PIPELINED, STOP, SYNC_4, draft, opening, verdict


def test_the_first_pass_does_not_wait_for_a_drafter() -> None:
    target = Target()
    assert target.hears(opening(1, 2)) == [Allocate(40)]
    feed = Feed((1, 2), (0, 1), (0, 1), 0, (0b01, 0b11))
    assert target.ticks() == [target.asks(1, feed, 1, (2,))]
    assert target.ticks() == []
    assert target.computes(1, 3) == [Send(verdict((1, 2), 3, cause=Cause.QUIET, awaits=4))]


def test_four_accepted_drafts_and_the_targets_own_token_are_five_from_one_pass() -> None:
    target = ready(draft((1, 2, 3), 4, 5, 6, 7))
    assert target.ticks() == [target.rows(2, (3, 4, 5, 6, 7), 2)]
    five = verdict((1, 2, 3), 4, 5, 6, 7, 8, acked=1, num_drafted=4, num_accepted=4, awaits=2)
    assert target.computes(2, 4, 5, 6, 7, 8) == [Send(five)]


def test_two_accepted_drafts_and_the_third_corrected_are_three_from_one_pass() -> None:
    target = ready(draft((1, 2, 3), 4, 5, 6, 7))
    assert target.ticks() == [target.rows(2, (3, 4, 5, 6, 7), 2)]
    three = verdict(
        (1, 2, 3),
        *(4, 5, 9),
        acked=1,
        num_drafted=4,
        num_accepted=2,
        num_rolled_back=2,
        rejected=(6, 7),
        awaits=2,
    )
    assert target.computes(2, 4, 5, 9, 1, 1) == [Send(three)]
    assert target.machine.tree.nodes == {}


def test_a_wrong_first_draft_costs_nothing_but_itself() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    one = verdict(
        (1, 2, 3),
        9,
        acked=1,
        num_drafted=2,
        num_rolled_back=2,
        rejected=(4, 5),
        hit=Hit.CONTENT,
        awaits=2,
    )
    assert target.computes(2, 9, 1, 1) == [Send(one)]


def test_after_full_acceptance_only_the_bonus_token_is_missing() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.computes(2, 4, 5, 6)
    target.hears(draft((1, 2, 3, 4, 5, 6), 7, 8, number=2))
    assert target.ticks() == [target.rows(3, (6, 7, 8), 5)]


def test_drafts_that_come_during_a_pass_are_verified_by_the_next() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.hears(draft((1, 2, 3, 4, 5), 6, 7, number=2))
    hit = verdict((1, 2, 3), 4, 5, 6, acked=2, num_drafted=2, num_accepted=2, awaits=2)
    assert target.computes(2, 4, 5, 6) == [Send(hit)]
    target.hears(draft((1, 2, 3, 4, 5, 6, 7), 8, number=3))
    assert target.ticks() == [target.rows(3, (6, 7, 8), 5)]


def test_no_token_follows_an_accepted_stop_token() -> None:
    target = ready(draft((1, 2, 3), 4, STOP))
    target.ticks()
    end = verdict((1, 2, 3), 4, STOP, acked=1, num_drafted=2, num_accepted=2)
    assert target.computes(2, 4, STOP, 6) == [Send(end)]
    assert target.machine.finished
    assert target.ticks() == []


def test_drafts_behind_an_accepted_stop_token_are_not_counted() -> None:
    target = ready(draft((1, 2, 3), STOP, 5, 6))
    target.ticks()
    end = said(target.computes(2, STOP, 5, 6, 7))
    assert (end.tokens, end.num_accepted) == ((STOP,), 1)


def test_the_last_token_is_verified_without_a_draft() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=PIPELINED, limits=Limits(4, (STOP,))))
    target.ticks()
    target.computes(1, 3)
    target.hears(draft((1, 2, 3), 4))
    assert target.ticks() == [target.rows(2, (3,), 2)]
    assert said(target.computes(2, 4)) == verdict((1, 2, 3), 4, acked=1, cause=Cause.ALONE)
    assert target.machine.finished


def test_the_longest_draft_leaves_a_place_for_the_targets_own_token() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=pipelined(8, 16), limits=Limits(6, ())))
    target.ticks()
    target.computes(1, 3)
    target.hears(draft((1, 2, 3), 4, 5, 6, 7))
    assert target.ticks() == [target.rows(2, (3, 4, 5), 2)]


def test_autoregressive_passes_are_alone() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=autoregressive()))
    target.ticks()
    alone = verdict((1, 2), 3, cause=Cause.ALONE)
    assert target.computes(1, 3) == [Send(alone)]
    assert target.ticks() == [target.rows(2, (3,), 2)]


def test_sync_waits_for_k_then_for_its_deadline() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.computes(1, 3, pass_s=0.5)
    target.hears(draft((1, 2, 3), 4, 5))
    assert target.ticks() == [WaitUntil(1.0)]
    target.now = 0.999
    assert target.ticks() == [WaitUntil(1.0)]
    target.hears(draft((1, 2, 3, 4, 5), 6, 7, number=2))
    assert target.ticks() == [target.rows(2, (3, 4, 5, 6, 7), 2)]


def test_a_deadline_is_late_twice_then_quiet_until_the_drafter_is_heard_again() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.computes(1, 3, pass_s=0.5)
    target.hears(draft((9,), 9))  # a sign of life, and nothing that fits
    causes = []
    for ticket, text in ((2, (1, 2, 3)), (3, (1, 2, 3, 4)), (4, (1, 2, 3, 4, 5))):
        waiting = target.ticks()
        if isinstance(waiting[0], WaitUntil):
            target.now = waiting[0].deadline
            waiting = target.ticks()
        assert waiting == [target.rows(ticket, (text[-1],), len(text) - 1)]
        causes.append(said(target.computes(ticket, text[-1] + 1, pass_s=0.5)).cause)
    assert causes == [Cause.LATE, Cause.LATE, Cause.QUIET]
    target.hears(draft((9,), 9, number=2))
    assert isinstance(target.ticks()[0], WaitUntil)


def test_a_drafter_that_is_done_is_not_waited_for() -> None:
    target = ready(draft((1, 2, 3), 4, done=True))
    assert target.ticks() == [target.rows(2, (3, 4), 2)]


def test_of_two_drafters_both_are_waited_for_if_both_have_drafts_for_this_root() -> None:
    target = ready(draft((1, 2, 3), 4))
    other = replace(draft((1, 2, 3), 5, done=True), source=2)
    target.hears(other)
    assert isinstance(target.ticks()[0], WaitUntil), "the first one may send more"
    target.hears(draft((1, 2, 3, 4), 6, number=2))
    target.hears(draft((1, 2, 3), 7, number=3, done=True))
    assert not isinstance(target.ticks()[0], WaitUntil)


def test_a_drafter_that_has_nothing_for_this_root_is_not_waited_for_beside_one_that_is_done() -> (
    None
):
    target = ready(draft((1, 2), 3, 4))
    target.hears(replace(draft((1, 2, 3), 5, done=True), source=2))
    assert not isinstance(target.ticks()[0], WaitUntil)


def test_done_holds_only_under_the_root_it_was_said_for() -> None:
    target = ready(draft((1, 2), 3, 4, done=True))
    assert target.ticks() == [WaitUntil(WAIT_S_MIN)]


def test_durations_are_split_into_waiting_model_and_host() -> None:
    target = ready()
    target.now = 1.0
    target.ticks()
    target.dispatcher.handle(Computed(2, (Outcome((4,)),), 400_000), 1.5)
    (send,) = target.dispatcher.handle(Afterwards(), 1.7)
    expected = verdict(
        (1, 2, 3), 4, cause=Cause.QUIET, durations_us=(1_000_000, 400_000, 100_000), awaits=2
    )
    assert send == Send(expected)


@pytest.mark.parametrize(("policy", "counts"), [(SYNC_4, [1, 0]), (PIPELINED, [0, 1])])
def test_a_verdict_goes_out_with_the_result_if_the_drafter_waits_for_it(
    policy: Policy, counts: list[int]
) -> None:
    target = ready(draft((1, 2, 3), 4, 5, 6, 7), policy=policy)
    assert target.ticks() == [target.rows(2, (3, 4, 5, 6, 7), 2)]
    at_once = target.dispatcher.handle(Computed(2, (Outcome((9, 9, 9, 9, 9)),), 0), 0.0)
    later = target.dispatcher.handle(Afterwards(), 0.0)
    assert [len(at_once), len(later)] == counts
    assert said([*at_once, *later]).tokens == (9,)


def test_stale_drafts_are_reported_once() -> None:
    target = ready(draft((1, 2), 9, 9))
    target.now = 10.0
    target.ticks()
    assert said(target.computes(2, 4)).num_stale == 2
    target.now = 20.0
    target.ticks()
    assert said(target.computes(3, 5)).num_stale == 0


def test_acks_stop_at_a_lost_draft() -> None:
    target = ready(draft((1, 2, 3), 4, number=1), draft((1, 2, 3, 4, 5), 6, number=3))
    target.now = 10.0
    assert target.ticks() == [target.rows(2, (3, 4), 2)]
    assert said(target.computes(2, 4, 5)).acks == (Ack(0, 1, 1),)


def test_a_long_prompt_is_read_in_chunks_and_asked_at_its_end() -> None:
    target = Target()
    prompt = tuple(range(PREFILL_CHUNK + 30))
    target.hears(opening(*prompt, limits=Limits(900, ())))
    where = tuple(range(PREFILL_CHUNK))
    assert target.ticks() == [target.asks(1, Feed(where, where, where, 0, None), 0, ())]
    assert target.computes(1) == []
    rest = tuple(range(PREFILL_CHUNK, PREFILL_CHUNK + 30))
    feed = Feed(rest, rest, rest, PREFILL_CHUNK, None)
    assert target.ticks() == [target.asks(2, feed, 1, (PREFILL_CHUNK + 30,))]


def test_reproducible_passes_have_at_most_the_fixed_number_of_rows() -> None:
    target = Target(fixed_rows=4)
    target.hears(opening(1, 2, 3, policy=pipelined(8, 16)))
    prefill = Feed((1, 2), (0, 1), (0, 1), 0, None)
    assert target.ticks() == [target.asks(1, prefill, 0, ())]
    target.computes(1)
    target.hears(draft((1, 2, 3), 4, 5, 6, 7, 8))
    assert target.ticks() == [target.rows(2, (3, 4, 5, 6), 2)]


def test_reproducible_sessions_share_no_cache() -> None:
    target = Target(fixed_rows=4)
    target.hears(opening(1, 2, 3))
    target.ticks()
    target.computes(1)
    target.hears(Close(1, "stop"), opening(1, 2, 3, session=2))
    prefill = Feed((1, 2), (0, 1), (0, 1), 0, None)
    assert target.ticks() == [target.asks(2, prefill, 0, (), number=1)]


def test_reproducible_recovery_replays_generated_tokens_in_passes_of_that_size() -> None:
    target = Target(fixed_rows=2)
    target.hears(opening(1, 2, 3, 4, 5, num_prompt=2))
    assert target.ticks() == [target.asks(1, Feed((1,), (0,), (0,), 0, None), 0, ())]
    target.computes(1)
    replay = Feed((2, 3), (1, 2), (1, 2), 1, (0b01, 0b11))
    assert target.ticks() == [target.asks(2, replay, 0, ())]
    target.computes(2)
    assert target.ticks() == [target.asks(3, Feed((4,), (3,), (3,), 3, (1,)), 0, ())]
    target.computes(3)
    assert target.ticks() == [target.rows(4, (5,), 4)]


@pytest.mark.parametrize("k", [63, 64])
def test_the_widest_pass_leaves_a_row_for_the_missing_token(k: int) -> None:
    target = Target()
    limits = Limits(200, ())
    target.hears(opening(1, 2, policy=pipelined(k, 64), limits=limits))
    target.ticks()
    target.computes(1, 3)
    tokens = tuple(range(100, 164))
    target.hears(draft((1, 2, 3), *tokens))
    assert target.ticks() == [target.rows(2, (3, *tokens[:63]), 2)]
    assert SlotMap(1000).num_tree_slots == 64
