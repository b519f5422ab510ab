"""The worked examples of docs/speculative-decoding.md: two passes, token by token, and their cost.

All probabilities and times here are made up.
"""

from dataclasses import dataclass
from fractions import Fraction

from tests.theory.closed_forms import synchronous
from tests.theory.oracle import ONE, ZERO, Chances, normalised, positive, ratio_acceptance

STEP_MS, PASS_MS, NUM_TOKENS, K = 2, 20, 100, 4
ACCEPTANCES = tuple(Fraction(n, 10) for n in (5, 6, 7, 8, 9))


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted token: what drafter and target give it, and the luck of its test."""

    word: str
    q: Fraction
    p: Fraction
    luck: Fraction

    @property
    def ratio(self) -> Fraction:
        """The chance that it is accepted."""
        return min(ONE, self.p / self.q)


def _draft(word: str, q: str, p: str, luck: str) -> Draft:
    return Draft(word, Fraction(q), Fraction(p), Fraction(luck))


# "The apple doesn't fall": all four are accepted.
APPLE = (
    _draft("far", "0.70", "0.80", "0.63"),
    _draft("from", "0.85", "0.90", "0.97"),
    _draft("the", "0.80", "0.95", "0.12"),
    _draft("tree", "0.60", "0.90", "0.55"),
)
# "Not all heroes": two are accepted, the third is not, and nobody looks at the fourth.
HEROES = (
    _draft("wear", "0.60", "0.75", "0.42"),
    _draft("capes", "0.50", "0.40", "0.31"),
    _draft("and", "0.50", "0.10", "0.77"),
    _draft("hats", "0.70", "0.60", "0.05"),
)
# What may stand in the third place, and the luck of the correction.
WORDS = (".", ",", "and", "but", "or")
THIRD_P: Chances = tuple(Fraction(n, 100) for n in (55, 15, 10, 15, 5))
THIRD_Q: Chances = tuple(Fraction(n, 100) for n in (20, 10, 50, 5, 15))
CORRECTION_LUCK = Fraction("0.40")


def accepted(drafts: tuple[Draft, ...]) -> tuple[Draft, ...]:
    """Those before the first whose luck is not below its ratio."""
    for index, draft in enumerate(drafts):
        if draft.luck >= draft.ratio:
            return drafts[:index]
    return drafts


def cost_ms(num_tokens: int, r: Fraction, k: int) -> Fraction:
    """N / (r (K + 1)) x (K t_d + t_t): so many tokens, a share r of a pass's rows being text."""
    return num_tokens / (r * (k + 1)) * (k * STEP_MS + PASS_MS)


def share_of_rows(a: Fraction, k: int) -> Fraction:
    """r, where each draft is accepted with chance `a`: E(K) / (K + 1)."""
    return sum((a**i for i in range(k + 1)), ZERO) / (k + 1)


def facts() -> list[str]:
    """What the page must say of the examples, word for word."""
    return [*_apple(), *_heroes(), *_cost()]


def _row(draft: Draft, outcome: str) -> str:
    numbers = (draft.q, draft.p, draft.ratio, draft.luck)
    return f"| {draft.word} | {_cells(numbers)} | {outcome} |"


def _cells(values: tuple[Fraction, ...]) -> str:
    return " | ".join(f"{float(value):.2f}" for value in values)


def _apple() -> list[str]:
    assert accepted(APPLE) == APPLE
    assert all(draft.ratio == 1 for draft in APPLE)
    num_tokens = len(APPLE) + 1
    together = len(APPLE) * STEP_MS + PASS_MS
    alone = num_tokens * PASS_MS
    assert cost_ms(num_tokens, ONE, len(APPLE)) == together
    return [
        *(_row(draft, "accepted") for draft in APPLE),
        f"A draft step takes {STEP_MS} ms and a pass {PASS_MS} ms",
        f"{len(APPLE)} x {STEP_MS} + {PASS_MS} = {together} ms for five tokens; "
        f"alone the target needs {num_tokens} x {PASS_MS} = {alone} ms",
    ]


def _heroes() -> list[str]:
    taken = accepted(HEROES)
    assert [draft.word for draft in taken] == ["wear", "capes"]
    assert (HEROES[2].p, HEROES[2].q) == (THIRD_P[2], THIRD_Q[2])
    rest = positive(a - b for a, b in zip(THIRD_P, THIRD_Q, strict=True))
    correction = normalised(rest)
    assert correction[0] > CORRECTION_LUCK  # so the luck chooses the first word
    tv = 1 - ratio_acceptance(THIRD_P, THIRD_Q)
    assert tv == sum(rest)
    kept = min(THIRD_P[0], THIRD_Q[0])
    assert kept + tv * correction[0] == THIRD_P[0]
    tokens = len(taken) + 1
    return [
        *(_row(draft, "accepted") for draft in taken),
        _row(HEROES[2], "rejected"),
        f"| p | {_cells(THIRD_P)} |",
        f"| q | {_cells(THIRD_Q)} |",
        f"| (p - q)+ | {_cells(rest)} |",
        f"| divided by their sum, {float(tv):.2f} | {_cells(correction)} |",
        f"the number {float(CORRECTION_LUCK):.2f} falls into the first {float(correction[0]):.2f}",
        f"{float(kept):.2f} + {float(tv):.2f} x {float(correction[0]):.2f} = "
        f"{float(THIRD_P[0]):.2f}",
        f"{len(HEROES)} x {STEP_MS} + {PASS_MS} = {len(HEROES) * STEP_MS + PASS_MS} ms for three "
        f"tokens; alone the target needs {tokens} x {PASS_MS} = {tokens * PASS_MS} ms",
    ]


def _cost() -> list[str]:
    alone = NUM_TOKENS * PASS_MS
    one, two = cost_ms(NUM_TOKENS, ONE, K), cost_ms(NUM_TOKENS, Fraction(3, 5), K)
    lines = [
        f"with `K = 4`, {STEP_MS} ms a step and {PASS_MS} ms a pass, {NUM_TOKENS} tokens take "
        f"{float(one):.0f} ms if every pass goes as in the first example (r = 1), and "
        f"{float(two):.0f} ms if every pass goes as in the second (r = 3/5); alone the target "
        f"takes {alone} ms",
        f"r is above {float(Fraction(K * STEP_MS + PASS_MS, (K + 1) * PASS_MS)):.2f}",
    ]
    for a in ACCEPTANCES:
        r = share_of_rows(a, K)
        time = cost_ms(NUM_TOKENS, r, K)
        closed = NUM_TOKENS * STEP_MS * synchronous(float(a), K, PASS_MS / STEP_MS, 0.0)
        assert abs(float(time) - closed) < 1e-9
        of_drafts = (r * (K + 1) - 1) / K
        lines.append(
            f"| {float(a):.1f} | {float(r * (K + 1)):.2f} | {float(r):.2f} | "
            f"{float(of_drafts):.2f} | {float(time):.0f} ms | {float(alone / time):.2f} x |"
        )
    return lines
