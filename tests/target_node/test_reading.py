"""Logprobs and logits processors at the machines: what is read, said again and looked back at."""

from dataclasses import replace

from engine.layout.slots import Feed
from node.events import Allocate, Send
from node.rows import PREFILL_CHUNK
from proto.messages import (
    Cause,
    Close,
    Limits,
    Logprobs,
    Open,
    PromptLogprobs,
    SamplingSpec,
)
from target_node.compute import Action, Outcome, Part
from target_node.sending import Reports
from tests.drafter_node.drafter import Drafter
from tests.drafter_node.drafter import part_of as part_of_forward
from tests.target_node.target import Target, marked, part_of, said
from tests.texts import LIMITS, PIPELINED, draft, opening, verdict

SCORED = SamplingSpec(num_prompt_logprobs=0)
REPORTED = SamplingSpec(num_logprobs=0)


def asked(message: Open, sampling: SamplingSpec) -> Open:
    return replace(message, sampling=sampling)


def some(num_rows: int) -> Logprobs:
    """So many rows."""
    return Logprobs(tuple(range(num_rows)), (-1.0,) * num_rows, (1,) * num_rows)


def reports(target: Target, ticket: int, tokens: tuple[int, ...], num_rows: int) -> list[Action]:
    """The model has answered, with logprobs."""
    return target.answers(ticket, Outcome(tokens, logprobs=some(num_rows)))


def test_a_prompt_is_read_in_passes_of_its_own_if_its_logprobs_are_wanted() -> None:
    target = Target()
    target.hears(asked(opening(1, 2, 3), SCORED))
    feed = Feed((1, 2), (0, 1), (0, 1), 0, None)
    assert target.ticks() == [target.asks(1, feed, 0, (), scored=(2, 3))]
    assert reports(target, 1, (), 2) == [Send(PromptLogprobs(1, 1, 1, some(2)))]
    assert target.ticks() == [target.asks(2, Feed((3,), (2,), (2,), 2, (1,)), 1, (3,))]


def test_every_chunk_of_a_long_prompt_is_told_with_its_place() -> None:
    target = Target()
    prompt = tuple(range(PREFILL_CHUNK + 30))
    target.hears(asked(opening(*prompt, limits=Limits(900, ())), SCORED))
    assert part_of(target.ticks()).scored == prompt[1 : PREFILL_CHUNK + 1]
    reports(target, 1, (), PREFILL_CHUNK)
    assert part_of(target.ticks()).scored == prompt[PREFILL_CHUNK + 1 :]
    told = PromptLogprobs(1, 1, PREFILL_CHUNK + 1, some(29))
    assert reports(target, 2, (), 29) == [Send(told)]


def test_chunks_are_shorter_where_all_their_logits_are_wanted() -> None:
    for sampling, num_rows in ((SCORED, 10), (REPORTED, 40)):
        target = Target(scored_chunk=10)
        target.hears(asked(opening(*range(40), limits=Limits(900, ())), sampling))
        assert len(part_of(target.ticks()).feed.tokens) == num_rows


def test_a_cached_prompt_is_read_again_if_its_logprobs_are_wanted() -> None:
    target = Target()
    target.hears(opening(1, 2, 3))
    target.ticks()
    target.computes(1, 4)
    target.hears(Close(1, "stop"), asked(opening(1, 2, 3, session=2), SCORED))
    feed = Feed((1, 2), (0, 1), (0, 1), 0, None)
    assert target.ticks() == [target.asks(2, feed, 0, (), number=1, scored=(2, 3))]


def test_what_a_stop_cuts_off_has_no_logprobs() -> None:
    target = Target()
    target.hears(asked(opening(1, 2, policy=PIPELINED, limits=Limits(5, ())), REPORTED))
    target.ticks()
    expected = replace(verdict((1, 2), 3), logprobs=some(1))
    assert said(reports(target, 1, (3,), 1)).logprobs == expected.logprobs
    target.hears(draft((1, 2, 3), 4))
    target.ticks()
    assert said(reports(target, 2, (4, 5), 2)).logprobs == some(2)


def test_missed_tokens_are_said_again_with_their_logprobs() -> None:
    target = Target()
    target.hears(asked(opening(1, 2, policy=PIPELINED), REPORTED))
    target.ticks()
    reports(target, 1, (3,), 1)
    target.hears(draft((1, 2, 3), 4, 6))
    target.ticks()
    reports(target, 2, (4, 5, 9), 2)
    target.hears(marked(1, 2, 3))  # so far the coordinator has it
    again = asked(opening(1, 2, 3, incarnation=2, policy=PIPELINED, num_prompt=2), REPORTED)
    said_again = replace(
        verdict((1, 2, 3), 4, 5, incarnation=2, cause=Cause.ALONE, awaits=2), logprobs=some(2)
    )
    assert target.hears(again) == [Allocate(LIMITS.max_len), Send(said_again)]
    assert target.hears(replace(again, incarnation=3, tokens=(1, 2, 3, 4, 5))) == [
        Allocate(LIMITS.max_len)
    ]


def test_nothing_is_said_again_before_the_logprobs_of_the_prompt() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=PIPELINED))
    target.ticks()
    target.computes(1, 3)
    again = asked(opening(1, 2, incarnation=2, policy=PIPELINED), SCORED)
    assert target.hears(again) == [Allocate(LIMITS.max_len)]
    assert part_of(target.ticks()).scored == (2,)


def test_rows_of_tokens_that_were_said_differently_are_dropped() -> None:
    kept = Reports()
    first, second = Logprobs((1, 2), (-1.0, -2.0), (1, 2)), Logprobs((3,), (-3.0,), (3,))
    kept.add(5, first)
    kept.add(7, second)
    assert kept.rows(6, 8) == first.part(1, 2) + second
    assert kept.rows(6, 9) is None
    assert kept.rows(4, 6) is None
    kept.add(5, second)
    assert kept.rows(5, 7) is None
    assert kept.rows(5, 6) == second
    kept.forget(6)
    assert kept.rows(5, 6) is None


def test_a_chain_pass_says_which_drafts_come_before_each_choice() -> None:
    feed = Feed((3, 4, 5), (2, 3, 4), (2, 3, 4), 2, (1, 3, 7))
    message = asked(opening(1, 2, 3), REPORTED)
    assert Part(message, 1, (1, 2, 3), feed, 3, (3, 4, 5)).drafted == (4, 5)
    assert Part(message, 1, (1, 2, 3), feed, 1, (5,)).drafted == ()


def test_the_drafter_says_which_drafts_come_before_its_choice_if_anyone_looks() -> None:
    for sampling, expected in (
        (SamplingSpec(), [(), ()]),
        (SamplingSpec(min_tokens=1), [((),), ((4,),)]),
    ):
        drafter = Drafter()
        drafter.hears(asked(opening(1, 2, 3), sampling))
        seen = []
        for token in (4, 5):
            part = part_of_forward(drafter.ticks())
            seen.append(part.drafted)
            drafter.proposes(part.number, token)
        assert seen == expected
