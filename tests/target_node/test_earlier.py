"""The target copies what stood in earlier texts, and keeps each text for later ones."""

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.layout.earlier import PIECE_LEN, EarlierTexts
from node.economics import FIRST_OF_MODEL, Acceptance, kind_of_earlier
from node.events import WaitUntil
from proto.messages import (
    EARLIER_SOURCE,
    Cause,
    Close,
    Limits,
    Lookup,
    Open,
    Policy,
)
from proto.policies import POLICIES, without_drafter
from proto.tree import SpeculationTree
from target_node.compute import Compute, Part
from target_node.lookup import LookupSource
from tests.policies import synchronous
from tests.target_node.target import Target, part_of, parts_of, said
from tests.texts import KEY, LIMITS, PIPELINED, STOP, draft, opening

ALONE = without_drafter(synchronous(4))
TREE = without_drafter(POLICIES["tree"].make(4))
LONG = Limits(900, ())
REMEMBERING = Lookup(2, 4, remember=True)
EARLIER = (1, 2, 3, 4, 5, 6, 7)


def opened(
    *tokens: int,
    session: int = 1,
    policy: Policy = ALONE,
    lookup: Lookup = REMEMBERING,
    limits: Limits = LIMITS,
) -> Open:
    """Open of a text that copies from others."""
    message = opening(*tokens, session=session, policy=policy, limits=limits)
    return replace(message, lookup=lookup)


def closed(session: int) -> Close:
    return Close(session, "")


def target_with(*texts: Sequence[int]) -> Target:
    """A target that has seen these texts, each closed by the coordinator."""
    target = Target()
    for session, tokens in enumerate(texts, 101):
        target.hears(opened(*tokens, session=session), closed(session))
    target.known.earlier.check()
    return target


def next_pass(target: Target) -> tuple[int, Part]:
    """Ticket and part of the next pass that asks for tokens; the prompt is read."""
    while True:
        (compute,) = target.ticks()
        assert isinstance(compute, Compute)
        (part,) = compute.parts
        if part.num_asked:
            return compute.ticket, part
        target.computes(compute.ticket)


def drafted_after(target: Target, message: Open) -> tuple[int, ...]:
    """The drafts of the first pass of a text: what it feeds behind the last token."""
    target.hears(message)
    return part_of(target.ticks()).feed.tokens[len(message.tokens) :]


# -- drafts ---------------------------------------------------------------------------------------


def test_what_followed_in_an_earlier_text_is_drafted() -> None:
    target = target_with(EARLIER)
    assert drafted_after(target, opened(9, 2, 3)) == (4, 5, 6, 7)
    sent = said(target.computes(1, 4, 5, 0, 0, 0))
    assert (sent.cause, sent.num_drafted, sent.num_accepted) == (Cause.READY, 4, 2)
    assert sent.tokens == (4, 5, 0)
    assert sent.sources == (EARLIER_SOURCE,) * 2
    assert sent.rejected == (6, 7)


def test_a_text_that_does_not_ask_for_it_neither_copies_nor_is_kept() -> None:
    forgetful = replace(REMEMBERING, remember=False)
    target = target_with(EARLIER)
    assert drafted_after(target, opened(9, 2, 3, lookup=forgetful)) == ()
    target = Target()
    target.hears(opened(*EARLIER, session=101, lookup=forgetful), closed(101))
    assert drafted_after(target, opened(9, 2, 3)) == ()


def test_as_many_tokens_must_match_as_for_n_grams() -> None:
    lookup = replace(REMEMBERING, ngram_min=3)
    assert drafted_after(target_with(EARLIER), opened(9, 2, 3, lookup=lookup)) == ()
    assert drafted_after(target_with(EARLIER), opened(1, 2, 3, lookup=lookup)) == (4, 5, 6, 7)


def test_of_copies_of_both_kinds_the_chain_of_which_most_is_expected_is_verified() -> None:
    text = (2, 3, 5, 6, 7, 2, 3)
    assert drafted_after(target_with((8, 8, 2, 3, 4, 4)), opened(*text)) == (5, 6, 7, 2)
    assert drafted_after(target_with((6, 7, 2, 3, 4, 4, 1, 1)), opened(*text)) == (4, 4, 1, 1)


def test_where_earlier_texts_differ_a_tree_is_verified() -> None:
    texts = ((1, 2, 3, 4), (9, 1, 2, 3, 4), (8, 1, 2, 5))
    target = target_with(*texts)
    target.hears(opened(0, 1, 2, policy=TREE))
    part = part_of(target.ticks())
    assert part.feed.tokens == (0, 1, 2, 3, 4, 5)
    assert part.parents == (0, 1, 0)
    sent = said(target.computes(1, 5, 0, 0, 6)[:1])
    assert sent.tokens == (5, 6)
    assert sent.sources == (EARLIER_SOURCE,)


def test_a_policy_of_chains_and_a_pass_of_fixed_rows_take_the_most_frequent_alone() -> None:
    texts = ((1, 2, 3, 4), (9, 1, 2, 3, 4), (8, 1, 2, 5))
    assert drafted_after(target_with(*texts), opened(0, 1, 2)) == (3, 4)
    fixed = Target(fixed_rows=16)
    for session, tokens in enumerate(texts, 101):
        fixed.hears(opened(*tokens, session=session), closed(session))
    fixed.hears(opened(1, 2, policy=TREE))
    _, part = next_pass(fixed)
    assert part.drafted == (3, 4)


def test_a_draft_of_the_drafter_is_continued() -> None:
    target = target_with(EARLIER)
    target.hears(opened(9, 8, policy=PIPELINED), draft((9, 8), 3, 4))
    assert part_of(target.ticks()).drafted == (3, 4, 5, 6, 7)


def test_a_good_match_is_worth_starting_without_the_drafter() -> None:
    line = range(20, 30)
    target = target_with((*line, *EARLIER))
    target.hears(opened(*line, policy=PIPELINED), draft((1,), 2))  # stale, but it is heard
    assert part_of(target.ticks()).drafted[:7] == EARLIER


def test_a_poor_match_waits_for_the_drafter() -> None:
    target = target_with((1, 2, 3, 9), (5, 1, 2, 4), (6, 1, 2, 7), (7, 1, 2, 8))
    target.hears(opened(9, 1, 2, policy=PIPELINED), draft((1,), 2))
    assert [type(action) for action in target.ticks()] == [WaitUntil]


def test_what_is_found_wrong_again_and_again_is_not_trusted_any_more() -> None:
    acceptance, earlier = Acceptance(), EarlierTexts(1 << 10)
    earlier.add(EARLIER)
    text = (9, 2, 3)
    source = LookupSource(acceptance, opened(*text), text, earlier)
    assert not source.is_worth_starting(4)
    kind = kind_of_earlier(2, 1.0)
    for _ in range(20):
        acceptance.add(kind, right=True)
    assert source.is_worth_starting(4)
    assert not source.is_worth_starting(5), "so many tokens did not follow"
    tree = SpeculationTree(KEY, text, max_nodes=16)
    for _ in range(200):
        tree.clear()
        source.grow(tree, 4)
        chain = tree.best_chain(4)
        assert [node.token for node in chain] == [4, 5, 6, 7]
        assert source.kinds[chain[0].key] == kind
        acceptance.add(source.kinds[chain[0].key], right=False)
        source.check(tree)
    assert math.exp(chain[0].score) < 0.1
    assert acceptance.chance(kind) < acceptance.chance(FIRST_OF_MODEL)
    assert not source.is_worth_starting(4)


def test_a_longer_match_and_a_larger_share_are_likelier_before_anything_is_known() -> None:
    chance = Acceptance().chance
    lengths = [chance(kind_of_earlier(length, 1.0)) for length in (2, 4, 8, 16, 32)]
    shares = [chance(kind_of_earlier(8, share)) for share in (0.1, 0.3, 0.6, 1.0)]
    for chances in (lengths, shares):
        assert chances == sorted(chances)
        assert 0.0 < chances[0] < chances[-1] < 1.0


# -- what is kept ---------------------------------------------------------------------------------


def test_a_text_is_kept_when_it_ends() -> None:
    target = Target()
    target.hears(opened(1, 2, session=101))
    target.ticks()
    target.computes(1, 3)
    target.ticks()
    assert len(target.known.earlier) == 0
    target.computes(2, STOP)
    assert len(target.known.earlier) == 4
    target.hears(closed(101))
    assert len(target.known.earlier) == 4
    assert drafted_after(target, opened(9, 1, 2)) == (3, STOP)


def test_a_long_text_is_kept_while_it_is_written_a_piece_with_a_verdict() -> None:
    target = Target(num_lanes=2)
    text = tuple(range(100, 100 + 2 * PIECE_LEN))
    target.hears(opened(*text, session=101, limits=LONG))
    lengths = []
    for _ in range(3):
        ticket, part = next_pass(target)
        target.computes(ticket, *range(part.num_asked))
        lengths.append(len(target.known.earlier))
    assert lengths == [PIECE_LEN, 2 * PIECE_LEN, 2 * PIECE_LEN]
    target.hears(opened(9, 150, 151, session=102))
    parts = {part.opened.session: part for part in parts_of(target.ticks())}
    assert parts[102].drafted == (152, 153, 154, 155)


def test_nothing_is_kept_twice_however_often_a_text_is_opened() -> None:
    target = Target()
    message = opened(*range(100, 100 + PIECE_LEN + 50), session=101, limits=LONG)
    for incarnation in (1, 2, 3):
        target.hears(replace(message, incarnation=incarnation))
        ticket, part = next_pass(target)
        target.computes(ticket, *range(part.num_asked))
        assert len(target.known.earlier) == PIECE_LEN
    text = target.machine.tree.text
    target.hears(closed(101))
    target.known.earlier.check()
    assert len(target.known.earlier) == len(text) > PIECE_LEN + 50


# -- the text -------------------------------------------------------------------------------------


def written(target: Target, session: int, prompt: Sequence[int], lookup: Lookup) -> list[int]:
    """A text of a model whose next token follows from the last three, as far as it may go."""
    target.hears(opened(*prompt, session=session, policy=TREE, lookup=lookup))
    text = target.machine
    while not text.finished:
        ticket, part = next_pass(target)
        paths = [(*part.committed, *path) for path in part.paths()]
        target.computes(ticket, *(sum(path[-3:]) * 7 % 5 for path in paths))
    target.hears(closed(session))
    return text.tree.text.tokens


def test_texts_are_the_same_with_and_without_a_memory_and_take_fewer_passes() -> None:
    plain, remembering = Target(), Target()
    forgetful = replace(REMEMBERING, remember=False)
    for session, prompt in enumerate([(1, 2, 3), (4, 2, 1), (1, 2, 3), (0, 1, 2), (3, 3, 3)], 1):
        text = written(plain, session, prompt, forgetful)
        assert written(remembering, session, prompt, REMEMBERING) == text
        assert len(text) == LIMITS.max_len
    remembering.known.earlier.check()
    remembering.hears(opened(0, session=9))
    plain.hears(opened(0, session=9))
    assert next_pass(remembering)[0] < next_pass(plain)[0]
