"""What things take on this node and between it and the others, as measured (pure).

Facts go in, each as it happens; figures come out, and no question changes one. A node has one of
these for as long as it lives, whatever texts it serves.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from types import MappingProxyType

AVERAGE_WEIGHT = 0.1  # of the newest figure in a running mean, once there are ten
SPENT_ON_TRIALS = 0.02  # of the time, at most

PassCosts = Mapping[int, float]  # seconds of a pass by its rows
NOTHING_KNOWN: PassCosts = MappingProxyType({})


class Mean:
    """A running mean that begins as the plain mean; 0 while nothing is known."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0

    def add(self, value: float) -> None:
        """One more figure."""
        self.num += 1
        self.value += max(AVERAGE_WEIGHT, 1 / self.num) * (value - self.value)


class Costs:
    """Seconds of everything that a decision weighs.

    measured  passes by their rows, timed before the first text

    draft     of one drafted token, at the drafter
    reply     from a verdict to the drafts that answer it
    wait      of the waits that ended with drafts
    token     of a token of the text, waits included
    """

    def __init__(self, measured: PassCosts = NOTHING_KNOWN) -> None:
        self.draft = Mean()
        self.reply = Mean()
        self.wait = Mean()
        self.token = Mean()
        self.num_skipped = 0  # waits that could have been made, since the last one that was
        self.num_since_one_row = 0  # passes since the last one of a single row
        self.for_trials_s = 0.0  # saved up for passes whose rows do not seem to pay
        self._passes: dict[int, Mean] = {}  # by rows
        self._known: list[int] = []  # its keys, ascending
        self._usual = Mean()  # of a pass, whatever its rows
        for num_rows, seconds in measured.items():
            self._add(num_rows, seconds)

    def passed(self, num_rows: int, num_tokens: int, pass_s: float, round_s: float) -> None:
        """A decoding pass has made so many tokens; a round is it and the wait before it."""
        self._usual.add(pass_s)
        if pass_s <= 0:
            return
        self._add(num_rows, pass_s)
        self.token.add(round_s / max(1, num_tokens))
        if num_rows == 1:
            self.num_since_one_row = 0
            self.for_trials_s += SPENT_ON_TRIALS * pass_s
        else:
            self.num_since_one_row += 1
            self.for_trials_s = 0.0

    def waited(self, seconds: float) -> None:
        """Drafts have come after so long a wait."""
        self.wait.add(seconds)
        self.num_skipped = 0

    def skipped(self) -> None:
        """A pass has begun without a wait that could have been made."""
        self.num_skipped += 1

    def _add(self, num_rows: int, pass_s: float) -> None:
        if num_rows not in self._passes:
            self._passes[num_rows] = Mean()
            insort(self._known, num_rows)
        self._passes[num_rows].add(pass_s)

    @property
    def pass_s(self) -> float:
        """What a decoding pass has usually taken; 0: none was made."""
        return self._usual.value

    def pass_of(self, num_rows: int) -> float:
        """What a pass of so many rows is expected to take; 0: nothing is known.

        Between two numbers of rows that were seen, a straight line; beyond the largest, as much as
        that: so more rows are tried.
        """
        known = self._known
        index = bisect_left(known, num_rows)
        if index == len(known):
            return self._passes[known[-1]].value if known else 0.0
        above, above_s = known[index], self._passes[known[index]].value
        if above == num_rows or index == 0:
            return above_s
        below, below_s = known[index - 1], self._passes[known[index - 1]].value
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)
