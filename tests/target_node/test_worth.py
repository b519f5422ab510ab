"""Whether to wait for drafts: what the formula says, and what is learnt."""

import random

import pytest

from target_node.worth import NUM_FIRST, NUM_SKIPPED_MAX, Worth, tokens_per_second


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_the_formula_is_what_a_simulated_text_comes_to(p: float, first: int) -> None:
    draw = random.Random(1)
    most, pass_s, wait_s = 4, 3.0, 1.0
    tokens, time_s, has_drafts = 0, 0.0, False
    for _ in range(200_000):
        time_s += pass_s + (0.0 if has_drafts else wait_s)
        drafts = most if has_drafts else first
        accepted = next((i for i in range(drafts) if draw.random() >= p), drafts)
        tokens += accepted + 1
        has_drafts = accepted == drafts and draw.random() < p
    expected = tokens_per_second(p, first, most, pass_s, wait_s)
    assert tokens / time_s == pytest.approx(expected, rel=0.01)


def learnt(wait_s: float, p: float) -> Worth:
    worth = Worth()
    draw = random.Random(2)
    for _ in range(200):
        worth.judged(1, int(draw.random() < p))
    for _ in range(NUM_FIRST):
        assert worth.pays(2, 4, 3.0), "nothing is known yet"
        worth.waited(wait_s)
    return worth


def test_a_wait_that_is_short_beside_a_pass_pays_and_a_long_one_does_not() -> None:
    assert learnt(0.3, 0.6).pays(2, 4, 3.0)
    assert not learnt(2.0, 0.6).pays(2, 4, 3.0)
    # What is hardly ever right is worth no wait, what is nearly always right comes by itself.
    assert not learnt(0.3, 0.05).pays(2, 4, 3.0)


def test_what_is_not_waited_for_is_tried_again_now_and_then() -> None:
    worth = learnt(2.0, 0.6)
    for _ in range(NUM_SKIPPED_MAX):
        assert not worth.pays(2, 4, 3.0)
        worth.skipped()
        worth.judged(1, 0)
        worth.judged(1, 1)
    assert worth.pays(2, 4, 3.0)
    worth.waited(0.01)
    assert not worth.pays(2, 4, 3.0), "one short wait among long ones"
    for _ in range(60):
        worth.waited(0.01)
    assert worth.pays(2, 4, 3.0)


@pytest.mark.parametrize(("p", "least", "most"), [(0.95, 1, 3), (0.6, 4, 7), (0.3, 8, 20)])
def test_drafts_that_should_have_been_there_are_waited_for(p: float, least: int, most: int) -> None:
    worth = learnt(9.0, p)
    num_skipped = 0
    while not worth.pays(2, 4, 3.0):
        worth.skipped()
        num_skipped += 1
    assert least <= num_skipped <= most
    worth.judged(2, 1)
    assert not worth.pays(2, 4, 3.0)


def test_drafts_that_are_hardly_ever_right_are_not_missed() -> None:
    worth = learnt(9.0, 0.02)
    for _ in range(NUM_SKIPPED_MAX):
        assert not worth.pays(2, 4, 3.0)
        worth.skipped()
