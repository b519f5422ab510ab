"""How many drafts a pass verifies, by what rows cost and what they bring (pure).

Theory of operation
-------------------
Drafts that are there need not be worth their rows. On some processors a pass of several rows takes
as long as one of a single row, on others five times as long; and what is copied from earlier text
is hardly ever right where the text is sampled. So passes are measured by their number of rows, and
with lambda tokens a second as the text is written now, a pass of T(n) seconds for n rows takes so
many drafts k as make the most of

    1 + p1 + p1 p2 + ... + p1...pk - lambda T(missing + k)

Of a number of rows that was not seen yet, its neighbours say what it costs; beyond the largest one
that was seen, more rows are taken to cost nothing more, so they are tried. What is not done is not
measured, and one figure that was wrong would stay so: as much as a fiftieth of the time may go into
passes whose rows do not seem to pay, and where drafts always pay a pass without them is made now
and then. How often drafts are right needs no such trials: they are compared
with the text also where no pass verified them.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from types import MappingProxyType

AVERAGE_WEIGHT = 0.1  # of the newest figure in a running mean, once there are ten
SPENT_ON_TRIALS = 0.02  # of the time, at most
NUM_BETWEEN = 256  # passes with drafts in a row, at most

PassCosts = Mapping[int, float]  # seconds of a pass by its rows
NOTHING_KNOWN: PassCosts = MappingProxyType({})


class _Mean:
    """A running mean that begins as the plain mean."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        self.value += max(AVERAGE_WEIGHT, 1 / self._num) * (value - self.value)


class Rows:
    """What passes have cost by their number of rows, over all texts.

    measured  before the first text
    """

    def __init__(self, measured: PassCosts) -> None:
        self._seconds: dict[int, _Mean] = {}  # of a pass, by rows
        self._known: list[int] = []  # its keys, ascending
        self._token_s = _Mean()  # of a token of the text, waits included
        self._num_since = 0  # passes since the last one of one row
        self._for_trials_s = 0.0  # saved up since the last one of several
        for num_rows, seconds in measured.items():
            self._add(num_rows, seconds)

    def passed(self, num_rows: int, num_tokens: int, pass_s: float, round_s: float) -> None:
        """A decoding pass has made so many tokens; a round is it and the wait before it."""
        if pass_s <= 0:
            return
        self._add(num_rows, pass_s)
        self._token_s.add(round_s / max(1, num_tokens))
        if num_rows == 1:
            self._num_since = 0
            self._for_trials_s += SPENT_ON_TRIALS * pass_s
        else:
            self._num_since += 1
            self._for_trials_s = 0.0

    def _add(self, num_rows: int, pass_s: float) -> None:
        if num_rows not in self._seconds:
            self._seconds[num_rows] = _Mean()
            insort(self._known, num_rows)
        self._seconds[num_rows].add(pass_s)

    def seconds(self, num_rows: int) -> float:
        """What a pass is expected to take; 0: nothing is known."""
        known = self._known
        index = bisect_left(known, num_rows)
        if index == len(known):
            return self._seconds[known[-1]].value if known else 0.0
        above, above_s = known[index], self._seconds[known[index]].value
        if above == num_rows or index == 0:
            return above_s
        below, below_s = known[index - 1], self._seconds[known[index - 1]].value
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)

    def num_worth(self, chances: Sequence[float], num_missing: int) -> int:
        """How many drafts of a chain to verify, whose chances, each given those before, are these.

        num_missing  rows of the pass besides: committed tokens
        """
        alone_s = self.seconds(num_missing)
        if not chances or not alone_s:
            return len(chances)
        if self._num_since >= NUM_BETWEEN:
            return 0
        token_s = min(self._token_s.value or alone_s, alone_s)  # one a pass is always to be had
        values = [
            sum_of - self.seconds(num_missing + k) / token_s
            for k, sum_of in enumerate(accumulate(accumulate(chances, mul), initial=0.0))
        ]
        best = max(range(len(values)), key=values.__getitem__)
        costs_s = self.seconds(num_missing + len(chances)) - alone_s
        if best == 0 and self._for_trials_s >= costs_s:
            return len(chances)
        return best
