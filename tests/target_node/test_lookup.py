"""The target drafts by itself what was written before, alone and besides a drafter."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.economics import FIRST_OF_MODEL, Acceptance
from node.events import WaitUntil
from proto.messages import (
    MODEL_SOURCE,
    NGRAM_SOURCE,
    Cause,
    Limits,
    Lookup,
    Open,
    Policy,
    Proposal,
    Rule,
    SamplingSpec,
    Verdict,
)
from proto.policies import without_drafter, without_prices
from proto.tree import SpeculationTree
from target_node.lookup import LookupSource
from tests.policies import pipelined, synchronous
from tests.target_node.target import Target, part_of, said
from tests.texts import KEY, LIMITS, PIPELINED, draft, opening, verdict

ALONE = without_drafter(synchronous(4))
UP_TO_3 = Lookup(1, 3)
TEXT = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3)


def opened(
    *tokens: int,
    policy: Policy = ALONE,
    lookup: Lookup | None = UP_TO_3,
    limits: Limits = LIMITS,
) -> Open:
    """Open of this text, with drafts of the target's own."""
    return replace(opening(*tokens, policy=policy, limits=limits), lookup=lookup)


def drafted(target: Target) -> tuple[int, ...]:
    """The drafts of the pass that starts now."""
    return part_of(target.ticks()).drafted


def drafted_for(message: Open) -> tuple[int, ...]:
    """The drafts of the first pass."""
    target = Target()
    target.hears(message)
    return drafted(target)


def test_what_followed_the_last_tokens_before_is_drafted() -> None:
    target = Target()
    target.hears(opened(*TEXT))
    assert drafted(target) == (4, 5, 6, 7)
    sent = said(target.computes(1, 4, 5, 6, 9, 9))
    assert (sent.cause, sent.num_drafted, sent.num_accepted) == (Cause.READY, 4, 3)
    assert sent.tokens == (4, 5, 6, 9)
    assert sent.sources == (NGRAM_SOURCE,) * 3
    assert sent.rejected == (7,)


def test_what_the_text_has_become_is_looked_up_in_the_next_pass() -> None:
    target = Target()
    target.hears(opened(1, 2, 3))
    assert drafted(target) == ()
    assert said(target.computes(1, 1)) == verdict((1, 2, 3), 1, cause=Cause.ALONE)
    assert target.ticks() == [target.rows(2, (1, 2, 3, 1, 2), 3)]


def test_a_text_without_lookup_has_no_such_drafts() -> None:
    assert drafted_for(opened(*TEXT, lookup=None)) == ()


def test_a_reference_is_copied_from() -> None:
    assert drafted_for(opened(1, 2, 3, lookup=Lookup(2, 3, reference=(2, 3, 8, 9)))) == (8, 9)


def test_a_copy_goes_on_behind_its_end_while_there_is_room() -> None:
    assert drafted_for(opened(1, 2, 1, 2)) == (1, 2, 1, 2)


def test_nothing_is_drafted_past_the_end_of_the_longest_text() -> None:
    assert drafted_for(opened(*TEXT, limits=Limits(13, ()))) == (4, 5)


def test_a_draft_of_the_drafter_is_continued() -> None:
    target = Target()
    target.hears(opened(9, *TEXT, 8, policy=PIPELINED), draft((9, *TEXT, 8), 3, 4))
    assert drafted(target) == (3, 4, 5, 6, 7, 1, 2, 3)
    sent = said(target.computes(1, 3, 4, 5, 0, 0, 0, 0, 0, 0))
    assert sent.sources == (MODEL_SOURCE, MODEL_SOURCE, NGRAM_SOURCE)


def test_accepted_drafts_of_the_drafter_alone_need_no_sources() -> None:
    target = Target()
    target.hears(opened(1, 2, 3, policy=PIPELINED), draft((1, 2, 3), 4, 5))
    assert drafted(target) == (4, 5)
    assert said(target.computes(1, 4, 5, 6)).sources == ()


def test_a_good_match_is_worth_starting_without_the_drafter() -> None:
    target = Target()
    target.hears(opened(*TEXT, policy=PIPELINED), draft((1,), 2))  # stale, but it is heard
    assert drafted(target)[:4] == (4, 5, 6, 7)


def test_a_poor_match_waits_for_the_drafter_and_then_competes_with_its_drafts() -> None:
    text = (1, 4, 5, 6, 7, 2, 3, 0, 2, 1)
    target = Target()
    target.hears(opened(*text, policy=PIPELINED, lookup=Lookup(1, 1)), draft((1,), 4))
    assert [type(action) for action in target.ticks()] == [WaitUntil]
    target.hears(draft(text, 8, number=2))
    assert [type(action) for action in target.ticks()] == [WaitUntil]
    target.hears(draft((*text, 8), 9, number=3))
    # Two drafts of chance e^-0.5 each are worth 0.97 tokens, eight of a half each 0.996.
    assert drafted(target)[:4] == (4, 5, 6, 7)


def test_what_is_found_wrong_again_and_again_is_not_trusted_any_more() -> None:
    acceptance = Acceptance()
    source = LookupSource(acceptance, opened(*TEXT), TEXT)
    assert source.is_worth_starting(4)
    assert not source.is_worth_starting(9), "so many tokens did not follow"
    tree = SpeculationTree(KEY, TEXT, max_nodes=16)
    for _ in range(100):
        tree.clear()
        source.grow(tree, 4)
        chain = tree.best_chain(4)
        assert [node.token for node in chain] == [4, 5, 6, 7]
        acceptance.add(source.kinds[chain[0].key], right=False)
        source.check(tree)
    assert math.exp(chain[0].score) < 0.1
    assert not source.is_worth_starting(4)


def test_a_match_must_be_right_as_often_as_the_drafter() -> None:
    acceptance = Acceptance()
    source = LookupSource(acceptance, opened(*TEXT), TEXT)
    assert source.is_worth_starting(4)
    for _ in range(50):
        acceptance.add(FIRST_OF_MODEL, right=True)
    assert not source.is_worth_starting(4)


def test_a_text_that_is_opened_anew_is_looked_up_anew() -> None:
    target = Target()
    target.hears(opened(*TEXT), replace(opened(5, 6, 7, 8, 5), incarnation=2))
    assert drafted(target) == (6, 7, 8, 5)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_under_the_classical_rules_a_copy_is_certain_of_itself(rule: Rule) -> None:
    target = Target()
    target.hears(replace(opened(*TEXT), rule=rule, sampling=SamplingSpec(temperature=1.0)))
    judge = part_of(target.ticks()).judge
    assert judge is not None
    assert judge.drafts == (4, 5, 6, 7)
    assert judge.proposals == tuple(Proposal((token,), (1.0,)) for token in (4, 5, 6, 7))


def test_the_same_text_has_the_same_drafts_in_every_life() -> None:
    message = opened(1, 5, 1, 6, 1, 7, 1, 8, 1)
    assert drafted_for(message) == drafted_for(message)
    others = {drafted_for(replace(message, sampling=SamplingSpec(seed=seed))) for seed in range(20)}
    assert len(others) > 1


def text_of(target: Target, pass_s: Callable[[int], float], num_passes: int) -> list[Verdict]:
    """Write on by chance, where a pass of n rows takes `pass_s(n)` seconds."""
    draw = random.Random(3)
    verdicts = []
    for _ in range(num_passes):
        part = part_of(target.ticks())
        num_rows = len(part.feed.tokens)
        choices = [draw.randrange(16) for _ in range(num_rows)]
        actions = target.computes(part.number, *choices, pass_s=pass_s(num_rows))
        verdicts.append(said(actions[:1]))
    return verdicts


ADAPTIVE = without_drafter(pipelined(8, 16))
LONG = Limits(max_len=900, stop_ids=())


def test_copies_that_cost_more_than_they_bring_are_hardly_ever_verified() -> None:
    target = Target(pass_s={1: 0.001})
    target.hears(replace(opened(*TEXT, policy=ADAPTIVE), limits=LONG))
    verdicts = text_of(target, lambda rows: 0.001 if rows == 1 else 0.005, 600)
    assert verdicts[0].num_drafted > 0, "what rows cost was not known"
    drafted_in = sum(verdict.num_drafted > 0 for verdict in verdicts[50:])
    assert 1 <= drafted_in <= 550 * 0.02 / 4 + 1, "a fiftieth of the time may go into trials"


def test_copies_whose_rows_cost_nothing_are_verified() -> None:
    target = Target()
    target.hears(replace(opened(*TEXT, policy=ADAPTIVE), limits=LONG))
    verdicts = text_of(target, lambda rows: 0.001, 100)
    assert sum(verdict.num_drafted > 0 for verdict in verdicts) > 80


def test_copies_are_always_verified_where_nothing_adapts() -> None:
    target = Target()
    policy = without_prices(ADAPTIVE)
    target.hears(replace(opened(*TEXT, policy=policy), limits=LONG))
    verdicts = text_of(target, lambda rows: 0.001 if rows == 1 else 0.05, 30)
    assert sum(verdict.num_drafted > 0 for verdict in verdicts) > 20


def test_copies_that_turn_right_again_are_verified_again() -> None:
    target = Target(pass_s={1: 0.001})
    target.hears(replace(opened(*TEXT, policy=ADAPTIVE), limits=LONG))
    text_of(target, lambda rows: 0.001 if rows == 1 else 0.003, 100)
    sent = []
    for _ in range(60):  # 1, 2, 3, 1, 2, 3 ... from here on
        part = part_of(target.ticks())
        follows = {1: 2, 2: 3, 3: 1}
        choices = [follows.get(token, 1) for token in part.feed.tokens]
        num_rows = len(choices)
        actions = target.computes(part.number, *choices, pass_s=0.001 if num_rows == 1 else 0.003)
        sent.append(said(actions[:1]))
    assert sent[0].num_drafted == 0
    assert sum(verdict.num_accepted == 8 for verdict in sent[-8:]) >= 7
