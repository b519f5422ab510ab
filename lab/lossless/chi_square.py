"""Pearson's chi-square test of what was counted against what is expected, and its power."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, chisquare, ncx2

MIN_EXPECTED = 5.0  # cells that are expected less often are counted together
Cell = TypeVar("Cell")


def p_value(counts: Counter[Cell], chances: Mapping[Cell, float]) -> float:
    """The chance of counts at least so far from what is expected; 0 if some are impossible."""
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
    """The effect size (Cohen's w) that a test at `level` of `total` counts sees so often."""
    cells = sum(chance * total >= MIN_EXPECTED for chance in chances.values())
    limit = chi2.isf(level, cells)
    return float(brentq(lambda w: ncx2.sf(limit, cells, total * w**2) - power, 1e-3, 10.0))
