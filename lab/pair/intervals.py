"""Computes shares with intervals from what is known of each text."""

import random
from collections.abc import Sequence

from lab.pair.record import Chances, SeenText, Share
from rehearsal.acceptance import NUM_RANKS

NUM_DRAWS = 1000
LOW, HIGH = 0.025, 0.975


def share_of(texts: Sequence[Sequence[float]]) -> Share:
    """Return the mean of all values, and its 95 % interval by a bootstrap over texts.

    Tokens of one text resemble each other, so whole texts are drawn, with replacement (Efron,
    "Bootstrap methods", 1979); the interval ends at the percentiles of the means. With one text
    the interval is a point, and says nothing.
    """
    sums = [(sum(text), len(text)) for text in texts if text]
    draw = random.Random(0)
    means = []
    for _ in range(NUM_DRAWS):
        drawn = draw.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(number for _, number in drawn))
    means.sort()
    mean = sum(total for total, _ in sums) / sum(number for _, number in sums)
    return Share(mean, means[int(LOW * NUM_DRAWS)], means[int(HIGH * NUM_DRAWS)])


def chances_of(temperature: float, texts: Sequence[SeenText]) -> Chances:
    """Return alpha and the chance of each rank on some texts; at least one is not empty."""
    ranks = tuple(
        share_of([[float(found == rank) for found in text.ranks] for text in texts])
        for rank in range(NUM_RANKS)
    )
    alpha = share_of([text.overlaps for text in texts])
    return Chances(temperature, sum(len(text.ranks) for text in texts), alpha, ranks, tuple(texts))
