"""The examples of docs/speculative-decoding.md against the engine, and the page's numpy code."""

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from engine.choice.classical_rules import Distribution, token_trial
from tests.theory import large_pairs
from tests.theory.examples import (
    APPLE,
    CORRECTION_LUCK,
    HEROES,
    PASS_MS,
    STEP_MS,
    THIRD_P,
    THIRD_Q,
    WORDS,
    Draft,
    cost_ms,
    share_of_rows,
)
from tests.theory.numbers import ACCEPTANCES, ROOT, tokens_per_pass
from tests.theory.oracle import Model, blocks, fixed, token_pass
from tests.theory.test_oracle import engine_outcomes

PAGE = ROOT / "docs" / "speculative-decoding.md"
DRAFTED, OTHER = 0, 1
# Every p / q is a multiple of 1/12, so 12 numbers in the middle of the twelfths stand for all luck.
P, Q, NUM_LUCKS = fixed("1/6", "3/6", "2/6"), fixed("2/6", "1/6", "3/6"), 12

Verify = Callable[[Any, Any, Sequence[int], Any], list[int]]


def two_words(chance: float) -> Distribution:
    """The drafted word and all others together."""
    return Distribution.of((DRAFTED, OTHER), (chance, 1 - chance))


def judged(drafts: Sequence[Draft]) -> tuple[int, tuple[float, ...]]:
    """How many of them the engine accepts with their luck, and the chances of their tests."""
    targets = [two_words(float(draft.p)) for draft in drafts]
    proposals = [two_words(float(draft.q)) for draft in drafts]
    trial = token_trial([*targets, two_words(0.5)], [DRAFTED] * len(drafts), proposals)
    return trial.num_accepted([float(draft.luck) for draft in drafts]), trial.chances


def test_the_apple_falls_far_from_the_tree_in_one_pass() -> None:
    number, chances = judged(APPLE)
    assert number == 4
    assert chances == (1.0, 1.0, 1.0, 1.0)


def test_not_all_heroes_wear_capes() -> None:
    number, chances = judged(HEROES)
    assert number == 2
    assert chances[:3] == pytest.approx([1.0, 0.8, 0.2])


def test_the_engine_corrects_the_third_word_as_the_page_does() -> None:
    ids = range(len(WORDS))
    p, q = (Distribution.of(ids, list(map(float, chances))) for chances in (THIRD_P, THIRD_Q))
    trial = token_trial([p, p], [WORDS.index("and")], [q])
    rest = trial.following(0)
    assert rest.probs / rest.probs.sum() == pytest.approx([0.7, 0.1, 0.0, 0.2, 0.0])
    assert WORDS[rest.pick(float(CORRECTION_LUCK))] == "."


def test_a_pass_makes_so_many_tokens_by_the_share_of_its_rows_and_by_the_closed_form() -> None:
    for a, k in product(ACCEPTANCES, range(1, 9)):
        r = share_of_rows(a, k)
        assert r * (k + 1) == tokens_per_pass(a, k)
        assert cost_ms(7, r, k) == 7 * (k * STEP_MS + PASS_MS) / tokens_per_pass(a, k)


# -- the code --------------------------------------------------------------------------------------


def code_of_page() -> Verify:
    """The function that the page shows."""
    found = re.search(r"^    import numpy as np\n(?:    .*\n|\n)*", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in found[0].splitlines()), names)
    verify: Verify = names["verify"]
    return verify


class Luck:
    """In the place of a random generator: given luck, and the weights that it was to choose by."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = list(numbers)
        self.weights: Any = None

    def random(self) -> float:
        """The next given number."""
        return self._numbers.pop(0)

    def choice(self, count: int, p: Any) -> int:
        """Any token; what counts are the weights."""
        assert count == len(p)
        self.weights = p
        return 0


def enumerated(verify: Verify, p: Model, q: Model, num_drafts: int) -> dict[tuple[int, ...], float]:
    """What a pass writes, and how often, over all drafts and all luck."""
    outcomes: dict[tuple[int, ...], float] = {}
    lucks = [(index + 0.5) / NUM_LUCKS for index in range(NUM_LUCKS)]
    for drafts, chance in blocks(q, num_drafts):
        rows = [np.array([float(x) for x in model(())]) for model in (p, q)]
        targets, proposals = np.tile(rows[0], (num_drafts + 1, 1)), np.tile(rows[1], (9, 1))
        for numbers in product(lucks, repeat=num_drafts):
            luck = Luck(numbers)
            taken = verify(targets, proposals, drafts, luck)[:-1]
            for token, weight in enumerate(luck.weights):
                text = (*taken, token)
                share = float(chance) * float(weight) / NUM_LUCKS**num_drafts
                outcomes[text] = outcomes.get(text, 0.0) + share
    return outcomes


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_usual_code_does_what_the_engine_and_the_exact_rule_do(num_drafts: int) -> None:
    shown = enumerated(code_of_page(), P, Q, num_drafts)
    engine = engine_outcomes(token_trial, P, Q, num_drafts)  # type: ignore[arg-type]
    exact = token_pass(P, Q, num_drafts)
    for text in {*shown, *engine, *exact}:
        assert shown.get(text, 0.0) == pytest.approx(engine.get(text, 0.0), abs=1e-12)
        assert shown.get(text, 0.0) == pytest.approx(float(exact.get(text, 0)), abs=1e-12)


# -- large pairs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_plan_predicts_of_large_shapes_what_the_page_says() -> None:
    made = [
        tuple(round(large_pairs.gain(policy, case), 1) for policy in ("sync", "auto"))
        for case in (large_pairs.case_of_shapes(*pair[:2]) for pair in large_pairs.SHAPES)
    ]
    assert tuple(made) == large_pairs.SYNC_AND_AUTO


@pytest.mark.long
def test_plan_predicts_of_chinchillas_costs_what_the_page_says() -> None:
    cases = [large_pairs.case_of_chinchilla(measured) for _, measured in large_pairs.CHINCHILLA]
    made = tuple(round(large_pairs.gain("auto", case), 1) for case in cases)
    assert made == large_pairs.AUTO_OF_CHINCHILLA
