"""What things take on this node and between it and the others, as measured (pure).

Facts go in, each as it happens; figures come out, and no question changes one. A node has one of
these for as long as it lives, whatever texts it serves.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from proto.messages import Role

# -- rows ------------------------------------------------------------------------------------------

# Of how many rows forwards are: those that are timed and recorded at load, and prompts.

# Of a prompt, read at once: on a CPU few, because nobody else gets a turn meanwhile; a GPU is idle
# with so few.
PREFILL_CHUNK = 256
PREFILL_CHUNKS: Mapping[str, int] = {"cpu": PREFILL_CHUNK, "cuda": 2048}

TIMED_ROWS: Mapping[Role, tuple[int, ...]] = {
    Role.TARGET: (1, 2, 3, 5, 9, 16),
    Role.DRAFTER: (1, 2, 4, 8),
}
# By backend. A program costs half a minute and a copy of the weights, a graph next to nothing.
RECORDED_ROWS: Mapping[Role, Mapping[str, tuple[int, ...]]] = {
    Role.TARGET: {"compiled": (1, 9), "graphs": (1, 2, 3, 5, 9, 17)},
    Role.DRAFTER: {"compiled": (1, 4), "graphs": (1, 2, 4, 8, 16)},
}


# -- costs -----------------------------------------------------------------------------------------

AVERAGE_WEIGHT = 0.1  # of the newest figure in a running mean, once there are ten
NUM_REPLIES = 16  # the newest of which say how long one may take
SPENT_ON_TRIALS = 0.02  # of the time, at most

Measured = Mapping[int, float]  # seconds of a pass by its rows
NOTHING_KNOWN: Measured = MappingProxyType({})


class Mean:
    """A running mean that begins as the plain mean; 0 while nothing is known."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0

    def add(self, value: float) -> None:
        """One more figure."""
        self.num += 1
        self.value += max(AVERAGE_WEIGHT, 1 / self.num) * (value - self.value)


class Replies:
    """How long a peer takes to answer: in the mean, and when it takes long."""

    def __init__(self) -> None:
        self._mean = Mean()
        self._newest_s: deque[float] = deque(maxlen=NUM_REPLIES)

    @property
    def value(self) -> float:
        """Seconds in the running mean."""
        return self._mean.value

    @property
    def num(self) -> int:
        """Replies so far."""
        return self._mean.num

    def add(self, seconds: float) -> None:
        """One more has come."""
        self._mean.add(seconds)
        self._newest_s.append(seconds)

    @property
    def quickest_s(self) -> float:
        """Seconds of the quickest of the newest; at least one has come."""
        return min(self._newest_s)

    @property
    def slow_s(self) -> float:
        """Three of four take no longer. The few that are late because a message was lost, and
        said again, do not count.
        """
        if not self._newest_s:
            return 0.0
        return sorted(self._newest_s)[3 * (len(self._newest_s) - 1) // 4]


class Passes:
    """What passes of so many texts have taken.

    token             seconds of a token, of whichever text, waits included
    num_since_plain   passes since the last one without drafts
    for_trials_s      saved up for passes whose rows do not seem to pay
    """

    def __init__(self, measured: Measured) -> None:
        self.token = Mean()
        self.num_since_plain = 0
        self.for_trials_s = 0.0
        self._means: dict[int, Mean] = {}  # by rows
        self._known: list[int] = []  # its keys, ascending
        for num_rows, seconds in measured.items():
            self.took(num_rows, seconds)

    def passed(
        self, num_rows: int, num_tokens: int, pass_s: float, round_s: float, *, is_plain: bool
    ) -> None:
        """A pass has made so many tokens; a round is it and the wait before it."""
        self.took(num_rows, pass_s)
        self.token.add(round_s / max(1, num_tokens))
        if is_plain:
            self.num_since_plain = 0
            self.for_trials_s += SPENT_ON_TRIALS * pass_s
        else:
            self.num_since_plain += 1
            self.for_trials_s = 0.0

    def took(self, num_rows: int, pass_s: float) -> None:
        """A pass of so many rows has taken so long."""
        if num_rows not in self._means:
            self._means[num_rows] = Mean()
            insort(self._known, num_rows)
        self._means[num_rows].add(pass_s)

    def of(self, num_rows: int) -> float:
        """What a pass of so many rows is expected to take; 0: nothing is known.

        Between two numbers of rows that were seen, a straight line; beyond the largest, as much as
        that: so more rows are tried.
        """
        known = self._known
        index = bisect_left(known, num_rows)
        if index == len(known):
            return self._means[known[-1]].value if known else 0.0
        above, above_s = known[index], self._means[known[index]].value
        if above == num_rows or index == 0:
            return above_s
        below, below_s = known[index - 1], self._means[known[index - 1]].value
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)


class Costs:
    """Seconds of everything that a decision weighs.

    measured  passes by their rows, timed before the first text

    draft     of a draft step
    reply     from a verdict to the drafts that answer it
    wait      of the waits that ended with drafts
    """

    def __init__(self, measured: Measured = NOTHING_KNOWN) -> None:
        self.draft = Mean()
        self.reply = Replies()
        self.wait = Mean()
        self.num_skipped = 0  # waits that could have been made, since the last one that was
        self._measured = measured
        self._usual = Mean()  # of a pass, whatever its rows and texts
        self._passes = {1: Passes(measured)}  # by `crowd`

    @property
    def pass_s(self) -> float:
        """What a decoding pass has usually taken; 0: none was made."""
        return self._usual.value

    def passes(self, num_texts: int) -> Passes:
        """What is known of passes of about so many texts."""
        known = self._passes.get(crowd(num_texts))
        return Passes(self._measured) if known is None else known

    def passed(
        self,
        num_texts: int,
        num_rows: int,
        num_tokens: int,
        pass_s: float,
        round_s: float,
        *,
        is_plain: bool,
    ) -> None:
        """A decoding pass has ended; as for `Passes.passed`."""
        self._usual.add(pass_s)
        if pass_s > 0:
            passes = self._passes.setdefault(crowd(num_texts), self.passes(num_texts))
            passes.passed(num_rows, num_tokens, pass_s, round_s, is_plain=is_plain)

    def waited(self, seconds: float) -> None:
        """Drafts have come after so long a wait."""
        self.wait.add(seconds)
        self.num_skipped = 0

    def skipped(self) -> None:
        """A pass has begun without a wait that could have been made."""
        self.num_skipped += 1


def crowd(num_texts: int) -> int:
    """So many texts are alike in what they cost: 1, 2, up to 4, up to 8 ..."""
    return 1 << (num_texts - 1).bit_length()
