"""The oracle itself, and the engine's rules against it."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from engine.choice.classical_rules import Distribution, Trial, block_trial, token_trial
from tests.noise import gumbel
from tests.theory.oracle import (
    Model,
    Outcomes,
    Rule,
    block_pass,
    blocks,
    coupled_acceptance,
    expected_accepted,
    joint,
    normalised,
    random_model,
    ratio_acceptance,
    target_joint,
    token_pass,
)

RULES = {"token": (token_pass, token_trial), "block": (block_pass, block_trial)}
CASES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 2)]


def models(vocab_size: int, seed: int) -> tuple[Model, Model]:
    """A target and a drafter."""
    return random_model(vocab_size, 2 * seed), random_model(vocab_size, 2 * seed + 1)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_the_text_is_exactly_the_targets(name: str, vocab_size: int, num_drafts: int) -> None:
    rule: Rule = RULES[name][0]
    for seed in range(4 if vocab_size < 4 else 1):
        p, q = models(vocab_size, seed)
        assert joint(rule, p, q, num_drafts, num_drafts + 1) == target_joint(p, num_drafts + 1)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_block_never_accepts_fewer_than_token(vocab_size: int, num_drafts: int) -> None:
    for seed in range(6):
        p, q = models(vocab_size, seed)
        token, block = (rule(p, q, num_drafts) for rule in (token_pass, block_pass))
        assert expected_accepted(block) >= expected_accepted(token)


def engine_outcomes(
    make_trial: type[Trial], p: Model, q: Model, num_drafts: int
) -> dict[tuple[int, ...], float]:
    """What the engine's rule makes of the same models."""

    def distribution(model: Model, text: tuple[int, ...]) -> Distribution:
        chances = model(text)
        return Distribution.of(range(len(chances)), [float(chance) for chance in chances])

    outcomes: dict[tuple[int, ...], float] = {}
    for drafts, chance in blocks(q, num_drafts):
        targets = [distribution(p, drafts[:i]) for i in range(num_drafts + 1)]
        proposals = [distribution(q, drafts[:i]) for i in range(num_drafts)]
        trial = make_trial(targets, drafts, proposals)
        for passed in product((True, False), repeat=num_drafts):
            share = float(chance)
            for test, ok in zip(trial.chances, passed, strict=True):
                share *= test if ok else 1.0 - test
            if share == 0.0:
                continue
            accepted = trial.num_accepted([0.0 if ok else 1.0 - 2**-53 for ok in passed])
            then = trial.following(accepted)
            for symbol, weight in zip(then.ids, then.probs / then.probs.sum(), strict=True):
                text = (*drafts[:accepted], int(symbol))
                outcomes[text] = outcomes.get(text, 0.0) + share * weight
    return outcomes


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_the_engine_does_what_the_oracle_does(name: str, vocab_size: int, num_drafts: int) -> None:
    exact_rule, make_trial = RULES[name]
    for seed in range(3):
        p, q = models(vocab_size, seed)
        exact: Outcomes = exact_rule(p, q, num_drafts)
        made = engine_outcomes(make_trial, p, q, num_drafts)  # type: ignore[arg-type]
        for text in {*exact, *made}:
            assert made.get(text, 0.0) == pytest.approx(float(exact.get(text, 0)), abs=1e-12)


def test_coupling_lies_between_its_bounds() -> None:
    for seed in range(200):
        p, q = random_model(4, seed)(()), random_model(4, seed + 1000)(())
        alike, coupled = ratio_acceptance(p, q), coupled_acceptance(p, q)
        assert alike / (2 - alike) <= coupled <= alike


def test_two_symbols_agree_as_often_as_the_ratio_test_accepts() -> None:
    for a, b in product(range(1, 8), repeat=2):
        p, q = normalised((Fraction(a), Fraction(3))), normalised((Fraction(5), Fraction(b)))
        assert coupled_acceptance(p, q) == ratio_acceptance(p, q)


def test_the_engines_noise_couples_as_the_formula_says() -> None:
    """50,000 draws: five standard deviations are 0.011."""
    p, q = random_model(4, 3)(()), random_model(4, 8)(())
    number = 50_000
    noise = gumbel(5, 0, range(number), np.tile(np.arange(4), (number, 1)))
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(chances, dtype=np.float64)) for chances in (p, q)]
    one, other = ((log + noise).argmax(axis=1) for log in logs)
    expected = float(coupled_acceptance(p, q))
    assert 0.1 < expected < 0.9
    assert (one == other).mean() == pytest.approx(expected, abs=0.0112)
