"""Every number of docs/speculative-decoding.md, computed: as the lines and phrases it stands in."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

from tests.theory import examples, large_pairs
from tests.theory.oracle import (
    ONE,
    ZERO,
    Chances,
    Model,
    Outcomes,
    Text,
    block_judgement,
    block_pass,
    coupled_acceptance,
    expected_accepted,
    fixed,
    joint,
    normalised,
    positive,
    ratio_acceptance,
    target_joint,
    token_judgement,
    token_pass,
)

ROOT = Path(__file__).resolve().parents[2]

# The example of the figure: five symbols.
FIGURE_P = tuple(Fraction(n, 100) for n in (35, 30, 20, 10, 5))
FIGURE_Q = tuple(Fraction(n, 100) for n in (20, 45, 10, 20, 5))
TWO_P, TWO_Q = fixed("1/3", "2/3"), fixed("2/3", "1/3")
WORST_P, WORST_Q = fixed("1/2", "1/2", 0), fixed("1/2", 0, "1/2")

ACCEPTANCES = tuple(Fraction(n, 10) for n in (5, 6, 7, 8, 9))
DRAFTS = (1, 2, 3, 4, 6, 8)
SPEEDS = (5, 10, 20)  # draft steps in the time of a pass

# (name, 10^12 FLOP/s in bfloat16 without sparsity, 10^12 bytes/s), from the data sheets.
DEVICES = (
    ("A100 80 GB SXM", 312, "2.039"),
    ("A100 80 GB PCIe", 312, "1.935"),
    ("A100 40 GB", 312, "1.555"),
    ("H100 SXM", 989, "3.35"),
    ("H200", 989, "4.8"),
)


def decimal(value: Fraction, places: int = 3) -> str:
    """A number with so many places."""
    return f"{float(value):.{places}f}"


def tokens_per_pass(a: Fraction, k: int) -> Fraction:
    """E(K): the mean number of tokens of a pass, each draft accepted with chance `a`."""
    made = sum((a**i for i in range(k + 1)), ZERO)
    assert made * (1 - a) == 1 - a ** (k + 1)
    return made


def best_length(a: Fraction, c: int) -> tuple[int, Fraction]:
    """The K of the fastest synchronous speculation, and by how much it is faster than none."""
    rates = {k: c * tokens_per_pass(a, k) / (k + c) for k in range(1, 65)}
    best = max(rates, key=lambda k: rates[k])
    return best, rates[best]


def rows_until_compute(peak: int, bandwidth: str, bytes_per_parameter: int = 2) -> Fraction:
    """The number of rows at which arithmetic takes as long as reading the weights."""
    return peak * bytes_per_parameter / (2 * Fraction(bandwidth))


def largest_error(made: Outcomes, exact: Outcomes) -> Fraction:
    """The largest difference of two distributions."""
    return max(abs(made.get(text, ZERO) - exact.get(text, ZERO)) for text in {*made, *exact})


def joint_with_noise_of_the_position(
    judgement: Callable[[Model, Model, Text], Outcomes], num_drafts: int, length: int
) -> Outcomes:
    """What is written where a position is drafted with the same noise however often.

    The pair is the two-symbol one: its q is the same everywhere, so the same noise is the same
    draft.
    """
    total: Outcomes = defaultdict(Fraction)
    for drafts in product(range(2), repeat=length + num_drafts):
        written: list[Outcomes] = [defaultdict(Fraction) for _ in range(length + 1)]
        written[0][()] = ONE
        for draft in drafts:
            written[0][()] *= TWO_Q(())[draft]
        for done in range(length):
            for text, chance in written[done].items():
                block = drafts[done : done + num_drafts]
                for more, share in judgement(TWO_P, TWO_Q, block).items():
                    whole = (text + more)[:length]
                    written[len(whole)][whole] += chance * share
        for text, chance in written[length].items():
            total[text] += chance
    return total


def chance_if_unlikely_drafts_are_left_out() -> Fraction:
    """Of the first symbol, if the two-symbol pair's second one is never offered for judgement."""
    p, q = TWO_P(()), TWO_Q(())
    judged = token_judgement(TWO_P, TWO_Q, (0,))
    offered = sum((chance for text, chance in judged.items() if text[0] == 0), ZERO)
    return q[0] * offered + q[1] * p[0]


def chance_of_the_middle_if_luck_is_used_twice() -> Fraction:
    """Of the second of three equal symbols, where a text is offered what its seed said before.

    Both were chosen with one luck: the first by p, the correction by (p - q)+, symbol by symbol.
    """
    p, chance = Fraction(1, 3), ZERO
    for low, high in pairwise((ZERO, p, Fraction(1, 2), 2 * p, ONE)):
        copied = int(low / p)
        corrected = [symbol for symbol in range(3) if symbol != copied][int(2 * low)]
        chance += (high - low) * (p * (copied == 1) + (1 - p) * (corrected == 1))
    return chance


def measured(row: str) -> Fraction:
    """A figure of the table in models/README.md."""
    text = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(row)} \| (\S+?),? ", text, re.MULTILINE)
    assert found is not None, row
    return Fraction(found[1])


def facts() -> list[str]:
    """What the page must say, word for word."""
    return [
        *examples.facts(),
        *_correction(),
        *_lengths(),
        *_two_symbols(),
        *_randomness(),
        *_coupling(),
        *_roofline(),
        *large_pairs.facts(),
    ]


def _correction() -> list[str]:
    p, q = FIGURE_P, FIGURE_Q
    alike = ratio_acceptance(p, q)
    rest = positive(a - b for a, b in zip(p, q, strict=True))
    correction = normalised(rest)
    assert all(min(a, b) + (1 - alike) * c == a for a, b, c in zip(p, q, correction, strict=True))
    wrong = min(p[0], q[0]) + (1 - alike) * p[0]
    shares = " and ".join(decimal(share, 1) for share in correction if share)
    names = " and ".join("ABCDE"[i] for i, share in enumerate(correction) if share)
    return [
        f"| p | {_cells(p)} |",
        f"| q | {_cells(q)} |",
        f"| min(p, q): accepted | {_cells(tuple(map(min, p, q)))} |",
        f"| (p - q)+: to be corrected | {_cells(rest)} |",
        f"| p - q | {_cells(tuple(a - b for a, b in zip(p, q, strict=True)))} |",
        f"accepted with chance {decimal(alike, 2)}; the other {decimal(1 - alike, 2)} are "
        f"corrected with {names}, in the shares {shares}",
        f"A would have the chance {decimal(wrong, 4)} instead of {decimal(p[0], 2)}",
    ]


def _cells(values: Chances) -> str:
    return " | ".join(decimal(value, 2) for value in values)


def _lengths() -> list[str]:
    lines = ["| a | " + " | ".join(f"K = {k}" for k in DRAFTS) + " |"]
    for a in ACCEPTANCES:
        values = " | ".join(decimal(tokens_per_pass(a, k), 2) for k in DRAFTS)
        lines.append(f"| {decimal(a, 1)} | {values} |")
    lines.append("| a | " + " | ".join(f"c = {c}" for c in SPEEDS) + " |")
    for a in ACCEPTANCES:
        best = [best_length(a, c) for c in SPEEDS]
        cells = " | ".join(f"K = {k}: {decimal(rate, 2)} x" for k, rate in best)
        lines.append(f"| {decimal(a, 1)} | {cells} |")
    limit = 1 / (1 - ACCEPTANCES[3])
    lines.append(f"at a = {decimal(ACCEPTANCES[3], 1)} the mean stays below {limit} tokens a pass")
    return lines


def _two_symbols() -> list[str]:
    lines = []
    for k in range(1, 6):
        token = expected_accepted(token_pass(TWO_P, TWO_Q, k))
        block = expected_accepted(block_pass(TWO_P, TWO_Q, k))
        assert token == sum((Fraction(2, 3) ** i for i in range(1, k + 1)), ZERO)
        lines.append(f"| {k} | {token} | {block} | {token + 1} | {block + 1} |")
        for rule in (token_pass, block_pass) if k < 4 else ():
            assert joint(rule, TWO_P, TWO_Q, k, 3) == target_joint(TWO_P, 3)
    p, q = TWO_P(()), TWO_Q(())
    f_token, f_block = [], []
    for x, y in product(range(2), repeat=2):
        f_token.append(min(p[x], q[x]) * min(p[y], q[y]))
        f_block.append(min(q[x] * q[y], min(p[x], q[x]) * p[y]))
    lines += [
        f"p = ({p[0]}, {p[1]}) and q = ({q[0]}, {q[1]})",
        f"a single draft is accepted with chance {ratio_acceptance(p, q)}",
        f"| token | {' | '.join(map(str, f_token))} | {sum(f_token)} |",
        f"| block | {' | '.join(map(str, f_block))} | {sum(f_block)} |",
    ]
    for name, f in (("token", f_token), ("block", f_block)):
        one, two = ratio_acceptance(p, q), sum(f, ZERO)
        rule = {"token": token_pass, "block": block_pass}[name]
        assert one + two == expected_accepted(rule(TWO_P, TWO_Q, 2))
        lines.append(f"{one} + {two} = {one + two} drafts accepted by {name} verification")
    lines.append("19/9 and 20/9 tokens a pass")
    assert [1 + sum(f, Fraction(2, 3)) for f in (f_token, f_block)] == [
        Fraction(19, 9),
        Fraction(20, 9),
    ]
    return lines


def _randomness() -> list[str]:
    exact = target_joint(TWO_P, 3)
    block = largest_error(joint_with_noise_of_the_position(block_judgement, 2, 3), exact)
    token = largest_error(joint_with_noise_of_the_position(token_judgement, 2, 3), exact)
    assert token == 0
    left_out = chance_if_unlikely_drafts_are_left_out()
    return [
        f"off by {block}, or {decimal(block)}, of a text of three symbols",
        f"the chance {left_out} instead of {TWO_P(())[0]}",
        "of three equal symbols the one in the middle gets the chance "
        f"{chance_of_the_middle_if_luck_is_used_twice()}",
    ]


def _coupling() -> list[str]:
    lines = []
    pairs: Sequence[tuple[str, Chances, Chances]] = (
        ("two symbols, as above", TWO_P(()), TWO_Q(())),
        ("five symbols, as in the figure", FIGURE_P, FIGURE_Q),
        ("(1/2, 1/2, 0) against (1/2, 0, 1/2)", WORST_P(()), WORST_Q(())),
    )
    for name, p, q in pairs:
        ratio, coupled = ratio_acceptance(p, q), coupled_acceptance(p, q)
        bound = ratio / (2 - ratio)
        assert bound <= coupled <= ratio
        values = " | ".join(decimal(value) for value in (ratio, coupled, bound))
        lines.append(f"| {name} | {values} |")
    ratio = measured("acceptance at temperature 1, ratio test")
    coupled = measured("acceptance at temperature 1, coupling")
    bound = ratio / (2 - ratio)
    assert bound < coupled < ratio
    values = " | ".join(decimal(value) for value in (ratio, coupled, bound))
    made = [tokens_per_pass(a, 4) for a in (ratio, coupled)]
    lines += [
        f"| the embedded pair, temperature 1 | {values} |",
        f"{decimal(made[0], 2)} tokens a pass for the ratio test and {decimal(made[1], 2)} for "
        f"coupling, {decimal(100 * (1 - made[1] / made[0]), 0)} % fewer",
    ]
    return lines


def _roofline() -> list[str]:
    lines = []
    for name, peak, bandwidth in DEVICES:
        rows = rows_until_compute(peak, bandwidth)
        lines.append(f"| {name} | {peak} | {bandwidth} | {decimal(rows, 0)} |")
    name, peak, bandwidth = DEVICES[0]
    parameters = 8 * 10**9
    read_ms = parameters * 2 / (Fraction(bandwidth) * 10**9)
    compute_ms = 5 * 2 * parameters / Fraction(peak * 10**9)
    lines += [
        f"{name} reads the weights of a model of 8 billion parameters in {decimal(read_ms, 2)} ms; "
        f"the arithmetic of 5 rows takes {decimal(compute_ms, 2)} ms",
        f"with 8-bit weights, at {decimal(rows_until_compute(peak, bandwidth, 1), 0)}",
    ]
    return lines
