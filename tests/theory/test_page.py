"""docs/speculative-decoding.md says what the script computes, and no other number."""

import re

from tests.theory.figure import PATH, figure
from tests.theory.numbers import (
    DEVICES,
    ROOT,
    WORST_P,
    WORST_Q,
    facts,
    rows_until_compute,
    tokens_per_pass,
)
from tests.theory.oracle import ONE, coupled_acceptance, ratio_acceptance

PAGE = ROOT / "docs" / "speculative-decoding.md"
NUMBER = re.compile(r"\d+(?:[./]\d+)*")
# Papers, headings of tables, code, and the temperature 0 are not results.
NO_RESULTS = (
    r"(arXiv )?\b\d{4}\.\d{5}\b",
    r"`[^`]*`",
    r"^    .*$",
    r"\bE\(4\)",
    r"10\^12|16-bit|bfloat16|temperature 0",
)


def text_of_page() -> str:
    return PAGE.read_text(encoding="utf-8")


def unwrapped(text: str) -> str:
    """All white space is one blank."""
    return " ".join(text.split())


def without_what_is_no_result(text: str) -> str:
    """The text, unwrapped, without code, papers and the like."""
    for pattern in NO_RESULTS:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    return unwrapped(text)


def test_the_page_says_every_fact() -> None:
    page = unwrapped(text_of_page())
    assert [fact for fact in facts() if unwrapped(fact) not in page] == []


def test_the_page_has_no_other_number() -> None:
    page = without_what_is_no_result(text_of_page())
    for fact in sorted(map(without_what_is_no_result, facts()), key=len, reverse=True):
        page = page.replace(fact, "")
    assert [page[max(0, n.start() - 30) : n.end() + 30] for n in NUMBER.finditer(page)] == []


def test_the_figure_is_drawn_from_the_numbers() -> None:
    assert PATH.read_text(encoding="utf-8") == figure()
    assert "figures/correction.svg" in text_of_page()


def test_compute_takes_over_at_150_to_160_rows_on_a_usual_a100() -> None:
    rows = [rows_until_compute(peak, bandwidth) for _, peak, bandwidth in DEVICES[:2]]
    assert [150 < row < 162 for row in rows] == [True, True]


def test_a_perfect_drafter_makes_one_token_more_than_it_drafts() -> None:
    assert tokens_per_pass(ONE, 4) == 5


def test_the_worst_pair_reaches_the_lower_bound_of_coupling() -> None:
    p, q = WORST_P(()), WORST_Q(())
    ratio = ratio_acceptance(p, q)
    assert coupled_acceptance(p, q) == ratio / (2 - ratio)
