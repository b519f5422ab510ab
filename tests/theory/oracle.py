"""Token and block verification once more, by enumeration in exact fractions.

It is written from the papers, and shares nothing with the engine's: either can judge the other. A
model is a function from what has been written to the chances of each next symbol.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from random import Random

Text = tuple[int, ...]
Chances = tuple[Fraction, ...]
Model = Callable[[Text], Chances]
# What one pass writes (the accepted drafts and one more symbol), and with which chance.
Outcomes = dict[Text, Fraction]
Rule = Callable[[Model, Model, int], Outcomes]

ZERO, ONE = Fraction(0), Fraction(1)


def fixed(*chances: Fraction | int | str) -> Model:
    """A model that says the same after every text."""
    made = tuple(map(Fraction, chances))
    assert sum(made) == 1
    return lambda _: made


def random_model(vocab_size: int, seed: int) -> Model:
    """A model with chances of small fractions, some of them zero."""

    @cache
    def model(text: Text) -> Chances:
        random = Random(f"{seed} {text}")
        weights = [random.choice((0, 1, 1, 2, 3, 5)) for _ in range(vocab_size)]
        weights[random.randrange(vocab_size)] += 1
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    return model


def after(model: Model, text: Text) -> Model:
    """The model of what follows `text`."""
    return lambda more: model(text + more)


def chance_of(model: Model, text: Text) -> Fraction:
    """The chance that the model alone writes `text`."""
    chance = ONE
    for index, symbol in enumerate(text):
        chance *= model(text[:index])[symbol]
    return chance


def positive(values: Iterator[Fraction]) -> Chances:
    """(values)+"""
    return tuple(max(value, ZERO) for value in values)


def normalised(weights: Chances) -> Chances:
    """The distribution that is proportional to `weights`."""
    return tuple(weight / sum(weights) for weight in weights)


def blocks(q: Model, num_drafts: int) -> Iterator[tuple[Text, Fraction]]:
    """Every block that the drafter can draft, and its chance."""
    for drafts in product(range(len(q(()))), repeat=num_drafts):
        if chance := chance_of(q, drafts):
            yield drafts, chance


def token_judgement(p: Model, q: Model, drafts: Text) -> Outcomes:
    """Token verification of one block (Leviathan et al., arXiv 2211.17192, algorithm 1)."""
    outcomes: Outcomes = {}
    left = ONE  # the chance that all drafts so far are accepted
    for index, draft in enumerate(drafts):
        here, there = p(drafts[:index]), q(drafts[:index])
        accept = min(ONE, here[draft] / there[draft])
        if accept < 1:
            rest = positive(a - b for a, b in zip(here, there, strict=True))
            _write(outcomes, drafts[:index], normalised(rest), left * (1 - accept))
        left *= accept
    _write(outcomes, drafts, p(drafts), left)
    return outcomes


def block_judgement(p: Model, q: Model, drafts: Text) -> Outcomes:
    """Block verification of one block (Sun et al., arXiv 2403.10444, algorithm 2)."""
    weights, rests = [ONE], []
    for index, draft in enumerate(drafts):
        here, there = p(drafts[:index]), q(drafts[:index])
        rests.append(positive(weights[-1] * a - b for a, b in zip(here, there, strict=True)))
        weights.append(min(ONE, weights[-1] * here[draft] / there[draft]))
    outcomes: Outcomes = {}
    left = ONE  # the chance that no longer part has been accepted
    for index in range(len(drafts), -1, -1):
        if index == len(drafts):
            accept, then = weights[-1], p(drafts)
        else:
            over, short = sum(rests[index], ZERO), 1 - weights[index]
            # No test decides about the part of length zero: it is what remains.
            accept = (over / (over + short) if over + short else ZERO) if index else ONE
            then = rests[index]
        if accept * left:
            _write(outcomes, drafts[:index], normalised(then), accept * left)
        left *= 1 - accept
    return outcomes


def _write(outcomes: Outcomes, accepted: Text, then: Chances, chance: Fraction) -> None:
    for symbol, share in enumerate(then):
        if chance * share:
            text = (*accepted, symbol)
            outcomes[text] = outcomes.get(text, ZERO) + chance * share


def _rule(judgement: Callable[[Model, Model, Text], Outcomes]) -> Rule:
    def rule(p: Model, q: Model, num_drafts: int) -> Outcomes:
        outcomes: Outcomes = defaultdict(Fraction)
        for drafts, chance in blocks(q, num_drafts):
            for text, share in judgement(p, q, drafts).items():
                outcomes[text] += chance * share
        return dict(outcomes)

    return rule


token_pass = _rule(token_judgement)
block_pass = _rule(block_judgement)


def expected_accepted(outcomes: Outcomes) -> Fraction:
    """Mean number of accepted drafts of a pass: all that it writes but the last symbol."""
    return sum(((len(text) - 1) * chance for text, chance in outcomes.items()), ZERO)


def joint(rule: Rule, p: Model, q: Model, num_drafts: int, length: int) -> Outcomes:
    """The distribution of the first `length` symbols that passes of `num_drafts` drafts write."""
    written: list[Outcomes] = [defaultdict(Fraction) for _ in range(length + 1)]
    written[0][()] = ONE
    for done in range(length):
        for text, chance in written[done].items():
            for more, share in rule(after(p, text), after(q, text), num_drafts).items():
                whole = (text + more)[:length]
                written[len(whole)][whole] += chance * share
    return dict(written[length])


def target_joint(p: Model, length: int) -> Outcomes:
    """The distribution of the first `length` symbols that the target alone writes."""
    texts = product(range(len(p(()))), repeat=length)
    return {text: chance for text in texts if (chance := chance_of(p, text))}


def ratio_acceptance(p: Chances, q: Chances) -> Fraction:
    """The chance that the ratio test accepts a draft: 1 - TV(p, q)."""
    return sum(map(min, p, q), ZERO)


def coupled_acceptance(p: Chances, q: Chances) -> Fraction:
    """The chance that two who share their Gumbel noise choose the same symbol.

    In the race of exponential times e_y / p_y both choose x if and only if no e_y is below
    e_x max(p_y / p_x, q_y / q_x); that has the chance 1 / sum over y of this maximum.
    """
    total = ZERO
    for x in range(len(p)):
        if p[x] and q[x]:
            total += 1 / sum((max(a / p[x], b / q[x]) for a, b in zip(p, q, strict=True)), ZERO)
    return total
