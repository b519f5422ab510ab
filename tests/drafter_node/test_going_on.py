"""Steps whose drafts would not be sent yet follow each other at once."""

from dataclasses import replace

import pytest

from drafter_node.compute import Compute, Part
from engine.layout.slots import Feed
from node.events import Send
from proto.messages import Rule
from proto.policies import POLICIES
from tests.drafter_node.drafter import Drafter, chosen, part_of, parts_of
from tests.policies import synchronous
from tests.texts import PIPELINED, STOP, draft, opening, verdict

SYNC = synchronous(4)


def after_a_verdict(**changes: object) -> Drafter:
    """A drafter that has heard a verdict: five tokens are there, and the last is to be fed."""
    drafter = Drafter(goes_on=True)
    drafter.hears(replace(opening(1, 2, 3, policy=SYNC), **changes))  # type: ignore[arg-type]
    for token in (4, 5):
        (compute, *_) = drafter.ticks()
        assert isinstance(compute, Compute)
        drafter.proposes(compute.ticket, token)
    drafter.hears(verdict((1, 2, 3), 4, 9, acked=1, awaits=4))
    return drafter


def go_on(part: Part, *tokens: int) -> list[Feed]:
    """The feeds of the steps that a worker makes if the model chooses these tokens."""
    feeds, made = [part.feed], []
    for token in tokens:
        made.append(chosen(token))
        if not part.is_followed(made):
            break
        feeds.append(part.after(made).feed)
    return feeds


def test_the_drafts_of_a_round_are_made_in_one_go_and_sent_together() -> None:
    drafter = after_a_verdict()
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    part = part_of([compute])
    first, *others = go_on(part, 10, 11, 12, 13)
    assert (first.tokens, first.slots, first.prefix_len) == ((9,), (4,), 4)
    assert [feed.tokens for feed in others] == [(10,), (11,), (12,)]
    assert [feed.positions for feed in others] == [(5,), (6,), (7,)]
    assert [feed.slots for feed in others] == [(5,), (6,), (7,)]
    assert [feed.masks for feed in others] == [(0b1,), (0b11,), (0b111,)]
    assert all(feed.prefix_len == 5 for feed in others)
    made = tuple(map(chosen, (10, 11, 12, 13)))
    (send,) = drafter.answers_rows(compute.ticket, made)
    assert send == Send(draft((1, 2, 3, 4, 9), 10, 11, 12, 13, number=2, num_steps=5))
    # What has been fed on the way is in the cache, by the names that it has now.
    drafter.hears(verdict((1, 2, 3, 4, 9), 10, 11, 12, 14, acked=2))
    feed = part_of(drafter.ticks()).feed
    assert (feed.tokens, feed.positions, feed.prefix_len) == ((14,), (8,), 8)


def test_a_message_ends_it_and_what_was_made_is_kept() -> None:
    drafter = after_a_verdict()
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert drafter.answers_rows(compute.ticket, (chosen(10), chosen(11))) == []
    part = part_of(drafter.ticks())
    assert (part.feed.tokens, part.feed.slots, part.feed.masks) == ((11,), (6,), (0b11,))
    assert len(part.ahead) == 1


def test_it_ends_at_a_token_that_ends_the_text_and_below_what_is_hardly_likely() -> None:
    drafter = after_a_verdict()
    part = part_of(drafter.ticks())
    assert len(go_on(part, 10, STOP, 12)) == 2
    drafter = after_a_verdict(policy=replace(SYNC, min_score=-1.2))
    part = part_of(drafter.ticks())
    assert len(go_on(part, 10, 11, 12, 13)) == 3  # e^-0.5 each


def test_a_verdict_that_comes_meanwhile_leaves_what_still_lives() -> None:
    drafter = after_a_verdict()
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    drafter.hears(verdict((1, 2, 3, 4, 9), 20, acked=1))  # the target wrote alone
    assert drafter.answers_rows(compute.ticket, (chosen(10), chosen(11))) == []
    feed = part_of(drafter.ticks()).feed
    assert (feed.tokens, feed.prefix_len) == ((20,), 5)


def test_a_chain_that_runs_ahead_goes_on_up_to_the_draft_that_will_be_sent() -> None:
    drafter = Drafter(goes_on=True)
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, launch_min=2, group=3)))
    lengths, token = [], 4
    while token < 12:
        (compute,) = drafter.ticks()
        assert isinstance(compute, Compute)
        part = part_of([compute])
        made = tuple(chosen(token + index) for index in range(1 + len(part.ahead)))
        (send,) = drafter.answers_rows(compute.ticket, made)
        assert isinstance(send, Send)
        lengths.append(len(made))
        token += len(made)
    assert lengths == [1, 1, 3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": Rule.TOKEN},
        {"policy": POLICIES["tree"].make()},
        {"policy": POLICIES["auto"].make()},
        {"sampling": replace(opening(1).sampling, repetition_penalty=1.2)},
    ],
    ids=["classical", "tree", "auto", "processors"],
)
def test_where_every_draft_is_sent_or_drafts_branch_nothing_follows(changes: dict) -> None:  # type: ignore[type-arg]
    drafter = Drafter(goes_on=True)
    drafter.hears(replace(opening(1, 2, 3, policy=SYNC), **changes))
    for token in (4, 5, 6):
        (compute, *_) = drafter.ticks()
        assert isinstance(compute, Compute)
        assert not any(part.ahead for part in compute.parts)
        rows = tuple(chosen(token) for _ in range(compute.parts[0].num_asked))
        drafter.answers_rows(compute.ticket, rows)


def test_nothing_follows_while_another_text_waits() -> None:
    drafter = Drafter(num_lanes=2, goes_on=True)
    drafter.hears(opening(1, 2, 3, policy=SYNC), opening(1, 2, 3, session=2, policy=SYNC))
    for _ in range(6):
        compute = drafter.ticks()[-1]
        if not isinstance(compute, Compute):
            break
        assert not any(part.ahead for part in parts_of([compute]))
        drafter.answers(compute.ticket, *(chosen(4) for _ in compute.parts))
