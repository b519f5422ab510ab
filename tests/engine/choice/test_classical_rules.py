"""The classical rules, enumerated: the joint distribution of what is written is the target's."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from engine.choice.classical_rules import (
    Distribution,
    Purpose,
    Trial,
    block_trial,
    token_trial,
    truncated,
    uniform,
)
from rehearsal.lossless.careless_target import careless_trial

Model = Callable[[tuple[int, ...]], Distribution]
Rule = Callable[..., Trial]
RULES = {"token": token_trial, "block": block_trial}


def random_model(vocab_size: int, seed: int, *, zeros: float = 0.0) -> Model:
    """A next-token distribution for every prefix; some tokens of some prefixes have no chance."""

    @cache
    def model(prefix: tuple[int, ...]) -> Distribution:
        random = np.random.default_rng([seed, *prefix, len(prefix)])
        weights = random.gamma(0.7, size=vocab_size) + 1e-3
        weights[random.random(vocab_size) < zeros] = 0.0
        weights[random.integers(vocab_size)] += 0.01
        return Distribution.of(range(vocab_size), weights)

    return model


def outcomes(
    rule: Rule, p: Model, q: Model, num_drafts: int, vocab_size: int
) -> Iterator[tuple[float, tuple[int, ...], int]]:
    """Every outcome of one pass: chance, committed tokens, how many of them were drafted."""
    for drafts in product(range(vocab_size), repeat=num_drafts):
        prefixes = [drafts[:i] for i in range(num_drafts + 1)]
        proposals = [q(prefix) for prefix in prefixes[:-1]]
        chance = np.prod([d.of_token(x) for d, x in zip(proposals, drafts, strict=True)])
        if chance == 0.0:
            continue
        trial = rule([p(prefix) for prefix in prefixes], drafts, proposals)
        for passed in product((True, False), repeat=num_drafts):
            luck = [0.0 if ok else 1.0 - 2**-53 for ok in passed]
            certain = [c if ok else 1.0 - c for c, ok in zip(trial.chances, passed, strict=True)]
            weight = chance * np.prod(certain)
            if weight == 0.0:
                continue
            # A test that cannot fail or cannot succeed has weight zero above, so the luck is real.
            n = trial.num_accepted(luck)
            following = trial.following(n)
            total = following.probs.sum()
            for token, share in zip(following.ids, following.probs, strict=True):
                yield weight * share / total, (*drafts[:n], int(token)), n


def joint(
    rule: Rule, p: Model, q: Model, num_drafts: int, vocab_size: int, length: int
) -> dict[tuple[int, ...], float]:
    """The distribution of the first `length` tokens that passes of `num_drafts` drafts write."""
    mass: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in range(length + 1)]
    mass[0][()] = 1.0
    for done in range(length):
        for prefix, chance in mass[done].items():
            here = [partial(_after, prefix, model) for model in (p, q)]
            for weight, tokens, _ in outcomes(rule, *here, num_drafts, vocab_size):
                text = (prefix + tokens)[:length]
                mass[len(text)][text] += chance * weight
    return mass[length]


def _after(prefix: tuple[int, ...], model: Model, path: tuple[int, ...]) -> Distribution:
    return model(prefix + path)


def exact(p: Model, vocab_size: int, length: int) -> dict[tuple[int, ...], float]:
    """The target's own joint distribution."""
    return {
        text: float(np.prod([p(text[:i]).of_token(text[i]) for i in range(length)]))
        for text in product(range(vocab_size), repeat=length)
    }


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """The largest difference of two joint distributions."""
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


CASES = [
    (vocab_size, num_drafts, seed)
    for vocab_size, num_drafts, seeds in ((2, 1, 6), (2, 2, 6), (2, 3, 4), (3, 2, 4), (4, 2, 1))
    for seed in range(seeds)
]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts", "seed"), CASES)
def test_the_joint_distribution_is_the_targets(
    name: str, vocab_size: int, num_drafts: int, seed: int
) -> None:
    zeros = 0.3 if seed % 2 else 0.0
    p = random_model(vocab_size, 2 * seed, zeros=zeros)
    q = random_model(vocab_size, 2 * seed + 1, zeros=zeros)
    length = num_drafts + 2
    written = joint(RULES[name], p, q, num_drafts, vocab_size, length)
    assert distance(written, exact(p, vocab_size, length)) < 1e-9


BAD = 0  # behind it the target has no distribution, so no text goes on behind it


def cut_outcomes(
    rule: Rule, p: Model, q: Model, num_drafts: int, vocab_size: int
) -> Iterator[tuple[float, tuple[int, ...], int]]:
    """As `outcomes`, where a chain ends with its first BAD: what follows that is not asked."""
    nothing = Distribution(np.zeros(1, dtype=np.int64), np.ones(1))

    def cut(targets: Sequence[Distribution], drafts: Any, proposals: Any) -> Trial:
        if BAD not in drafts:
            return rule(targets, drafts, proposals)
        end = drafts.index(BAD) + 1
        trial = rule([*targets[:end], nothing], drafts[:end], proposals[:end])
        # The rest is never reached, and nothing follows a BAD that is accepted.
        left = len(drafts) - end
        fillers = (0.0,) * left
        behind = [nothing] * left
        return replace(
            trial,
            targets=[*trial.targets, *behind],
            proposals=[*trial.proposals, *[nothing] * left],
            chances=(*trial.chances, *fillers),
            weights=(*trial.weights, *fillers),
        )

    for weight, tokens, num_accepted in outcomes(cut, p, q, num_drafts, vocab_size):
        end = tokens.index(BAD) + 1 if BAD in tokens else len(tokens)
        yield weight, tokens[:end], min(num_accepted, end)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts", "seed"), CASES)
def test_a_chain_that_ends_with_a_token_keeps_the_law_of_the_text_up_to_it(
    name: str, vocab_size: int, num_drafts: int, seed: int
) -> None:
    p, q, length = random_model(vocab_size, 2 * seed), random_model(vocab_size, 2 * seed + 1), 3
    mass: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in range(length + 1)]
    mass[0][()] = 1.0
    ended: dict[tuple[int, ...], float] = defaultdict(float)
    for done in range(length):
        for prefix, chance in mass[done].items():
            here = [partial(_after, prefix, model) for model in (p, q)]
            for weight, tokens, _ in cut_outcomes(RULES[name], *here, num_drafts, vocab_size):
                text = (prefix + tokens)[:length]
                into = ended if BAD in text else mass[len(text)]
                into[text] += chance * weight
    want: dict[tuple[int, ...], float] = defaultdict(float)
    for text, chance in exact(p, vocab_size, length).items():
        want[text[: text.index(BAD) + 1] if BAD in text else text] += chance
    assert distance({**mass[length], **ended}, want) < 1e-9


@pytest.mark.parametrize("name", RULES)
def test_three_drafts_of_four_symbols_in_one_pass(name: str) -> None:
    p, q = random_model(4, 90), random_model(4, 91)
    written = joint(RULES[name], p, q, 3, 4, 3)
    assert distance(written, exact(p, 4, 3)) < 1e-9


def expected_accepted(rule: Rule, p: Model, q: Model, num_drafts: int, vocab_size: int) -> float:
    """Mean number of accepted drafts of one pass."""
    return sum(w * n for w, _, n in outcomes(rule, p, q, num_drafts, vocab_size))


@pytest.mark.parametrize(("vocab_size", "num_drafts", "seed"), CASES)
def test_block_accepts_no_fewer_than_token(vocab_size: int, num_drafts: int, seed: int) -> None:
    p, q = random_model(vocab_size, seed), random_model(vocab_size, 77 + seed)
    token = expected_accepted(token_trial, p, q, num_drafts, vocab_size)
    block = expected_accepted(block_trial, p, q, num_drafts, vocab_size)
    assert block >= token - 1e-12


def test_the_two_symbol_example_has_the_exact_numbers() -> None:
    def p(_: tuple[int, ...]) -> Distribution:
        return Distribution.of((0, 1), (1 / 3, 2 / 3))

    def q(_: tuple[int, ...]) -> Distribution:
        return Distribution.of((0, 1), (2 / 3, 1 / 3))

    assert expected_accepted(token_trial, p, q, 2, 2) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(block_trial, p, q, 2, 2) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_luck_of_zero_does_not_accept_what_the_target_never_says(name: str) -> None:
    never = Distribution.of((0, 1), (0.0, 1.0))
    both = Distribution.of((0, 1), (0.5, 0.5))
    trial = RULES[name]([never, both], (0,), [both])
    assert trial.chances == (0.0,)
    assert trial.num_accepted((0.0,)) == 0
    assert trial.following(0).pick(0.0) == 1


class _Residual(Trial):
    def following(self, num_accepted: int) -> Distribution:
        """The target's distribution where the rest of it belongs."""
        return self.targets[num_accepted]


def biased_correction(targets: object, drafts: object, proposals: object) -> Trial:
    """Another: a rejection is corrected from p itself."""
    t = token_trial(targets, drafts, proposals)  # type: ignore[arg-type]
    return _Residual(t.targets, t.proposals, t.chances, t.weights, t.whole)


def biased_block_weights(targets: object, drafts: object, proposals: object) -> Trial:
    """A third: block verification that corrects as token verification does."""
    t = block_trial(targets, drafts, proposals)  # type: ignore[arg-type]
    return Trial(t.targets, t.proposals, t.chances, (1.0,) * len(t.weights), whole=True)


@pytest.mark.parametrize("rule", [careless_trial, biased_correction, biased_block_weights])
def test_the_enumeration_sees_a_biased_rule(rule: Rule) -> None:
    p, q = random_model(3, 1), random_model(3, 2)
    assert distance(joint(rule, p, q, 2, 3, 3), exact(p, 3, 3)) > 1e-3


def test_truncated_proposals_keep_the_rules_exact() -> None:
    p = random_model(4, 5)
    full = random_model(4, 6)

    def q(prefix: tuple[int, ...]) -> Distribution:
        return Distribution.of(*truncated(full(prefix), 2))

    for rule in RULES.values():
        assert distance(joint(rule, p, q, 2, 4, 3), exact(p, 4, 3)) < 1e-9


def test_truncated_keeps_the_likeliest_as_float32() -> None:
    ids, weights = truncated(Distribution.of((9, 4, 7, 2), (0.4, 0.3, 0.2, 0.1)), 2)
    assert ids.tolist() == [4, 9]
    assert weights.dtype == np.float32
    assert weights == pytest.approx([3 / 7, 4 / 7], abs=1e-7)
    assert len(truncated(Distribution.of(range(1000), np.ones(1000)))[0]) == 64
    assert truncated(Distribution.of((1, 2, 3), (0.9, 0.2, 0.1)), 1)[1].tolist() == [1.0]


def test_pick_never_takes_a_token_without_a_chance() -> None:
    distribution = Distribution.of((3, 5, 8, 9), (0.0, 0.25, 0.75, 0.0))
    assert [distribution.pick(u) for u in (0.0, 0.249, 0.25, 1 - 2**-53)] == [5, 5, 8, 8]


def test_uniform_numbers_of_two_purposes_lives_numbers_and_seeds_differ() -> None:
    numbers = {
        uniform(seed, purpose, life, number, index)
        for seed in (1, 2)
        for purpose in Purpose
        for life in (1, 2)
        for number in (1, 2)
        for index in (0, 1)
    }
    assert len(numbers) == 48
    assert all(0.0 <= u < 1.0 for u in numbers)
    many = [uniform(7, Purpose.ACCEPT, 1, n) for n in range(20_000)]
    assert np.mean(many) == pytest.approx(0.5, abs=0.01)
