"""Pearson's chi-square test of counts against expected probabilities, and its power."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, chisquare, ncx2

MIN_EXPECTED = 5.0  # cells with a smaller expected count are merged into one
Cell = TypeVar("Cell")


def p_value(counts: Counter[Cell], chances: Mapping[Cell, float]) -> float:
    """Return the p-value of the counts under these probabilities; 0 if a count is impossible."""
    if not set(counts) <= set(chances):
        return 0.0
    total = sum(counts.values())
    expected = np.array([chance * total for chance in chances.values()])
    seen = np.array([counts[cell] for cell in chances], dtype=float)
    rare = expected < MIN_EXPECTED
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(seen[~rare], seen[rare].sum())
    kept = expected > 0
    return float(chisquare(seen[kept], expected[kept] * seen.sum() / expected.sum()).pvalue)


def detectable(
    total: int, chances: Mapping[Cell, float], *, level: float, power: float = 0.95
) -> float:
    """Return the effect size (Cohen's w) that a test of `total` counts finds with chance `power`.

    level  significance level of the test
    """
    cells = sum(chance * total >= MIN_EXPECTED for chance in chances.values())
    limit = chi2.isf(level, cells)
    return float(brentq(lambda w: ncx2.sf(limit, cells, total * w**2) - power, 1e-3, 10.0))
