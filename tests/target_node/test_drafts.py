"""What the drafts of a text were worth: what became of the first token of each pass."""

from dataclasses import replace

from proto.messages import Hit
from proto.policies import POLICIES
from tests.target_node.target import Target, ready, said
from tests.texts import draft, opening


def test_a_first_token_that_was_verified_is_a_hit() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    assert said(target.computes(2, 4, 7, 8)).hit is Hit.HIT


def test_a_first_token_that_nobody_drafted_is_a_miss_of_content() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    assert said(target.computes(2, 9, 7, 8)).hit is Hit.CONTENT


def test_a_first_token_that_came_during_the_pass_is_a_miss_of_timing() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.hears(draft((1, 2, 3), 9, number=2))
    assert said(target.computes(2, 9, 7, 8)).hit is Hit.TIMING


def test_a_first_token_that_was_there_and_not_verified_is_a_miss_of_width() -> None:
    target = Target()
    tree = replace(POLICIES["tree"].make(1, 16), launch_min=1, launch_hit=1)
    target.hears(opening(1, 2, policy=tree))
    target.ticks()
    target.computes(1, 3)
    target.hears(draft((1, 2, 3), 4), draft((1, 2, 3), 9, number=2))
    target.ticks()
    assert said(target.computes(2, 9, 7)).hit is Hit.WIDTH


def test_a_pass_without_drafts_whose_drafts_came_too_late_is_a_miss_of_timing() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.hears(draft((1, 2), 9))
    assert said(target.computes(1, 3)).hit is Hit.TIMING


def test_a_pass_that_had_nothing_at_hand_is_a_miss_of_timing() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    assert said(target.computes(1, 3)).hit is Hit.TIMING
