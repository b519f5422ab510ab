"""The drafter's machine: whole action lists for the textbook cases."""

from collections.abc import Sequence

from drafter_node.compute import Children, Compute
from engine.layout.slots import Feed
from node.events import Allocate, Send
from node.rows import PREFILL_CHUNK
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Close, Draft, Heartbeat, Limits, SessionMark
from tests.drafter_node.drafter import Drafter, chosen
from tests.target_node.target import gap, marked
from tests.texts import (
    KEY,
    PIPELINED,
    STOP,
    SYNC_4,
    draft,
    name,
    opening,
    verdict,
)


def test_a_short_text_is_fed_and_expanded_at_once() -> None:
    drafter = Drafter()
    assert drafter.hears(opening(1, 2)) == [Allocate(40)]
    feed = Feed((1, 2), (0, 1), (0, 1), 0, (0b01, 0b11))
    assert drafter.ticks() == [drafter.asks(1, feed)]
    assert drafter.ticks() == []  # it is still running


def test_a_long_text_is_read_in_chunks() -> None:
    drafter = Drafter(max_len=1000)
    prompt = tuple(range(PREFILL_CHUNK + 30))
    drafter.hears(opening(*prompt, limits=Limits(1000, ())))
    where = tuple(range(PREFILL_CHUNK))
    assert drafter.ticks() == [drafter.asks(1, Feed(where, where, where, 0, None), 0)]
    assert drafter.proposes(1) == []
    rest = tuple(range(PREFILL_CHUNK, PREFILL_CHUNK + 30))
    last = Feed(rest, rest, rest, PREFILL_CHUNK, None)
    assert drafter.ticks() == [drafter.asks(2, last)]


def test_sync_sends_k_drafts_in_one_message_and_waits() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    assert drafter.drafts(5) == [draft((1, 2), 5, number=1)]  # the sign of life
    assert drafter.drafts(6, 7, 8) == [draft((1, 2, 5), 6, 7, 8, number=2)]
    assert drafter.is_idle()


def test_a_free_running_chain_sends_every_token_once_the_target_can_start() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    assert drafter.drafts(5, 6, 7) == [
        draft((1, 2), 5, number=1),
        draft((1, 2, 5), 6, number=2),
        draft((1, 2, 5, 6), 7, number=3),
    ]
    assert drafter.ticks() == [drafter.row(4, 7, 4, 2, mask=0b111)]


def test_the_next_step_is_launched_before_the_draft_of_the_last_one_is_sent() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.ticks()
    assert drafter.ends(1, (chosen(5),)) == []
    assert drafter.ticks() == [drafter.row(2, 5, 2, 2, mask=0b1)]
    assert drafter.tells() == [Send(draft((1, 2), 5, number=1))]
    assert drafter.tells() == []


def test_the_last_draft_of_a_window_is_sent_once_and_by_itself() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.drafts(5, 6, 7)
    drafter.ticks()
    last = draft((1, 2, 5), 6, 7, 8, number=2)
    assert drafter.ends(4, (chosen(8),)) == [Send(last)], "the target waits for it"
    assert drafter.is_idle()
    assert drafter.tells() == []


def test_the_window_is_its_credit_and_a_verdict_renews_it() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.drafts(5, 6, 7, 8)
    assert drafter.is_idle()
    assert drafter.hears(verdict((1, 2), 5, 6)) == []
    assert drafter.ticks() == [drafter.row(5, 8, 5, 4, mask=0b11)]


def test_a_hit_keeps_what_is_below_it() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(5, 6, 7)
    assert drafter.hears(verdict((1, 2), 5, 6, acked=3)) == []
    assert [node.token for node in drafter.machine.tree.best_chain(8)] == [7]
    assert drafter.ticks() == [drafter.row(4, 7, 4, 4)]


def test_a_miss_starts_from_the_corrected_text() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(5, 6, 7)
    assert drafter.hears(verdict((1, 2), 5, 9, acked=3)) == []
    assert drafter.machine.tree.nodes == {}
    assert drafter.ticks() == [drafter.row(4, 9, 3, 3)]


def test_full_acceptance_in_sync_leaves_two_tokens_to_catch_up() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.drafts(5, 6, 7, 8)
    assert drafter.hears(verdict((1, 2), 5, 6, 7, 8, 9, acked=2)) == []
    feed = Feed((8, 9), (5, 6), (5, 6), 5, (0b01, 0b11))
    assert drafter.ticks() == [drafter.asks(5, feed)]


def test_several_verdicts_are_applied_before_anything_is_expanded() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    assert drafter.hears(verdict((1, 2), 3)) == []
    assert drafter.hears(verdict((1, 2, 3), 4)) == []
    feed = Feed((1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2, 3), 0, (0b1, 0b11, 0b111, 0b1111))
    assert drafter.ticks() == [drafter.asks(1, feed)]


def test_a_verdict_on_a_live_node_is_as_good_as_the_one_that_was_lost() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.drafts(5, 6, 7, 8)
    assert drafter.hears(verdict((1, 2, 5, 6), 7, 4)) == []
    assert drafter.machine.tree.text.tokens == [1, 2, 5, 6, 7, 4]


def test_a_verdict_that_comes_twice_changes_nothing() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.hears(verdict((1, 2), 3, 4))
    assert drafter.hears(verdict((1, 2), 3, 4)) == []
    assert drafter.machine.tree.text.tokens == [1, 2, 3, 4]


def test_an_unknown_or_contradicting_verdict_is_a_gap() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.hears(verdict((1, 2), 3))
    assert drafter.hears(verdict((1, 2, 3, 4), 5)) == gap(1, 3)
    assert drafter.hears(verdict((1, 2), 4)) == gap(1, 3)
    assert drafter.machine.tree.text.tokens == [1, 2, 3]


def test_what_two_verdicts_in_a_row_lack_is_sent_again_as_one_message() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(5, 6, 7, 8)
    assert drafter.hears(verdict((1, 2), 5, acked=1)) == []
    again = draft((1, 2, 5, 6), 7, 8, first_number=1, number=5, num_steps=0)
    assert drafter.hears(verdict((1, 2, 5), 6, acked=1)) == [Send(again)]
    assert drafter.hears(verdict((1, 2, 5, 6), 7, acked=5)) == []


def test_what_one_verdict_acknowledges_is_not_sent_again() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(5, 6, 7, 8)
    assert drafter.hears(verdict((1, 2), 5, acked=1)) == []
    assert drafter.hears(verdict((1, 2, 5), 6, acked=4)) == []
    assert drafter.hears(verdict((1, 2, 5, 6), 7, acked=4)) == []


def test_an_ack_of_an_earlier_life_means_nothing() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, incarnation=3, policy=PIPELINED))
    drafter.drafts(5, 6)
    drafter.hears(verdict((1, 2), 5, acked=2, acked_life=1))
    again = draft((1, 2, 5, 6), first_number=1, number=3, incarnation=3, num_steps=0)
    assert drafter.hears(verdict((1, 2, 5), 6, acked=2, acked_life=1)) == [Send(again)]


def test_a_target_that_was_opened_anew_gets_everything_at_once() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, incarnation=1, policy=PIPELINED))
    drafter.drafts(5, 6, 7)
    assert drafter.hears(verdict((1, 2), 5, incarnation=2, acked=3)) == []
    again = draft((1, 2, 5, 6), 7, first_number=1, number=4, num_steps=0)
    assert drafter.hears(verdict((1, 2, 5), 6, incarnation=3)) == [Send(again)]
    # What a late verdict of its earlier life acknowledges was for a tree that is gone.
    assert drafter.hears(verdict((1, 2), 5, incarnation=2, acked=3)) == []


def test_a_drafter_with_nothing_more_says_so_once_per_root() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    assert drafter.drafts(5, STOP) == [draft((1, 2), 5, number=1)]
    done = draft((1, 2), 5, STOP, first_number=1, number=2, done=True, num_steps=1)
    assert drafter.ticks() == [Send(done)]
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2), 5, acked=2, awaits=2))
    done = draft((1, 2, 5), STOP, first_number=1, number=3, done=True, num_steps=0)
    assert drafter.ticks() == [Send(done)]
    assert drafter.is_idle()


def test_a_drafter_that_has_enough_for_a_pass_need_not_say_that_it_is_done() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    assert len(drafter.drafts(5, 6, 7, 8)) == 2
    assert drafter.is_idle()


def test_a_stop_token_in_the_prompt_does_not_stop_it() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, STOP))
    assert drafter.drafts(5) == [draft((1, STOP), 5, number=1)]


def test_nothing_is_drafted_in_the_place_of_the_targets_own_token() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED, limits=Limits(5, ())))
    assert len(drafter.drafts(5, 6)) == 2
    assert drafter.is_idle()


def test_a_text_beyond_its_models_length_is_left_to_the_target() -> None:
    drafter = Drafter(max_len=3)
    drafter.hears(opening(1, 2, policy=PIPELINED))
    assert drafter.drafts(5) == [draft((1, 2), 5, number=1)]
    done = draft((1, 2), 5, first_number=1, number=2, done=True, num_steps=0)
    assert drafter.ticks() == [Send(done)]


def test_two_children_are_one_message_and_the_likelier_is_expanded() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    children = Children((5, 6), (-2.0, -0.25))
    (send,) = drafter.answers(compute.ticket, children, model_us=7)
    assert isinstance(send, Send)
    assert isinstance(send.message, Draft)
    assert (send.message.tokens, send.message.parents) == ((5, 6), (-1, -1))
    assert send.message.model_us == 7
    assert drafter.ticks() == [drafter.row(2, 6, 2, 2)]


def test_a_result_of_an_earlier_life_is_ignored() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.ticks()
    drafter.hears(opening(1, 2, 3, incarnation=2))
    assert drafter.ticks() == []  # one forward at a time, whosever it is
    assert drafter.proposes(1, 7) == []
    feed = Feed((3,), (2,), (2,), 2, (1,))
    assert drafter.ticks() == [drafter.asks(2, feed, number=1)]
    assert drafter.proposes(2, 7) == [Send(draft((1, 2, 3), 7, incarnation=2))]


def test_a_result_after_a_close_is_ignored() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.ticks()
    assert drafter.hears(Close(1, "stop")) == []
    assert drafter.dispatcher.marks == ()
    assert drafter.proposes(1, 7) == []
    assert drafter.is_idle()


def test_a_result_for_a_node_that_died_is_ignored() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(5, 6)
    drafter.ticks()
    drafter.hears(verdict((1, 2), 9))
    assert drafter.proposes(3, 7) == []
    assert drafter.ticks() == [drafter.row(4, 9, 2, 2)]


def test_an_open_that_is_not_newer_is_ignored() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, incarnation=2))
    drafter.hears(verdict((1, 2), 3))
    assert drafter.hears(opening(1, 2, incarnation=2)) == []
    assert drafter.hears(opening(1, incarnation=1)) == []
    assert drafter.machine.tree.text.tokens == [1, 2, 3]


def test_a_new_text_keeps_the_cached_prefix() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, 4))
    drafter.drafts(5)
    drafter.hears(Close(1, "stop"), opening(1, 2, 7, session=2))
    assert drafter.ticks() == [drafter.row(2, 7, 2, 2, number=1)]


def test_the_same_text_is_fed_from_its_last_token_on() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, 4))
    drafter.drafts(5)
    drafter.hears(opening(1, 2, 3, 4, incarnation=2))
    assert drafter.ticks() == [drafter.row(2, 4, 3, 3, number=1)]


def test_a_heartbeat_tells_what_was_missed() -> None:
    drafter = Drafter()
    assert drafter.hears(marked(1, 2)) == gap(0, 0)  # the Open was lost
    drafter.hears(opening(1, 2))
    assert drafter.hears(marked(1, 2)) == []
    assert drafter.hears(marked(1, 2, 3)) == gap(1, 2)  # the last verdict was lost
    drafter.hears(verdict((1, 2), 3, 4))
    assert drafter.hears(marked(1, 2, 3)) == []  # the coordinator is behind, which is no gap
    assert drafter.hears(marked(1, 2, 9)) == gap(1, 4)


def test_a_session_that_no_heartbeat_names_is_closed() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.ticks()
    drafter.now += HEARTBEAT_INTERVAL_S
    assert drafter.hears(Heartbeat((), 0, "")) == []
    assert drafter.dispatcher.marks == ()
    assert drafter.proposes(1, 5) == []


def test_its_mark_is_where_its_root_is() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, incarnation=4))
    drafter.drafts(5)
    assert drafter.dispatcher.marks == (SessionMark(1, 4, 2, name(1, 2), num_read=2),)
    assert drafter.machine.tree.text.key == KEY
    assert drafter.machine.opened.policy == SYNC_4


def test_verdicts_of_another_session_are_ignored() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, session=2))
    before: Sequence[int] = list(drafter.machine.tree.text.tokens)
    assert drafter.hears(verdict((1, 2), 3)) == []
    assert drafter.machine.tree.text.tokens == before


def test_the_last_events_of_a_text_are_left_for_people_who_look_for_a_mistake() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2))
    drafter.drafts(3)
    drafter.hears(verdict((1, 2), 3, 4))
    kinds = ["Open 2 0.000", "Proposed 0 0.000", "Verdict 2 0.000"]
    assert drafter.dispatcher.story(drafter.machine.opened.session).split(", ") == kinds
