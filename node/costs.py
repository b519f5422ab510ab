"""Measures on this node how long passes, draft steps and answers of the other node take (pure).

A target has one `Costs` as long as it lives, for all texts; a drafter has a `Passes` of its steps
and its `Answers` (`drafter_node/sending.py`). They are told of every event as it happens, and
return estimates; asking changes nothing. What they decide: `node/economics.py`.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

AVERAGE_WEIGHT = 0.1  # weight of the newest value in a running mean, once there are ten
NUM_REPLIES = 16  # the newest replies, from which it is computed how long a slow one takes
NUM_TRUSTED = 10  # of so many passes a mean is as good as of more
MOST_SLOWED = 3.0  # the times at load are raised at most so many times
SPENT_ON_TRIALS = 0.01  # most of the time that goes into passes whose rows do not seem to pay

Measured = Mapping[int, float]  # seconds of a pass by its number of rows
NOTHING_KNOWN: Measured = MappingProxyType({})


class Mean:
    """A running mean: plain for the first ten values, then exponential; 0 without values."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0

    def add(self, value: float) -> None:
        """Add one value to the moving average."""
        self.num += 1
        self.value += max(AVERAGE_WEIGHT, 1 / self.num) * (value - self.value)


class Replies:
    """The times that a peer took to answer: their running mean, and how long a slow one takes."""

    def __init__(self) -> None:
        self._mean = Mean()
        self._newest_s: deque[float] = deque(maxlen=NUM_REPLIES)

    @property
    def value(self) -> float:
        """Return the running mean in seconds; 0 if there was none."""
        return self._mean.value

    @property
    def num(self) -> int:
        """Return the number of replies so far."""
        return self._mean.num

    def add(self, seconds: float) -> None:
        """Add one reply that took so many seconds."""
        self._mean.add(seconds)
        self._newest_s.append(seconds)

    @property
    def quickest_s(self) -> float:
        """Return the seconds of the quickest of the newest replies; there must be at least one."""
        return min(self._newest_s)

    @property
    def slow_s(self) -> float:
        """Return the upper quartile of the newest replies in seconds; 0: there are none.

        Three of four replies are faster. The few replies that are late because a message was lost
        and sent again do not count so.
        """
        if not self._newest_s:
            return 0.0
        return sorted(self._newest_s)[3 * (len(self._newest_s) - 1) // 4]


class Passes:
    """How long passes with a certain number of texts take, by their number of rows.

    token             mean seconds for each token, of whichever text, waits included
    num_since_plain   number of passes since the last one without drafts
    for_trials_s      seconds saved up for passes whose rows do not seem to pay
    """

    def __init__(self, measured: Measured, *, is_alone: bool = False) -> None:
        """Begin with what was timed at load.

        is_alone  True: no drafter computes beside the passes. Then whatever slows those that were
                  made slows all, so that the times at load of other numbers of rows are raised as
                  much. A drafter beside them would slow no plain pass
        """
        self._at_load: dict[int, float] = dict(measured) if is_alone else {}
        self.token = Mean()
        self.num_since_plain = 0
        self.for_trials_s = 0.0
        self._means: dict[int, Mean] = {}  # seconds, by number of rows
        self._known: list[int] = []  # keys of `_means`, ascending
        self._curve: list[float] | None = None  # expected seconds for each key; None: out of date
        self._untried: set[int] = set()  # of the numbers timed at load, those without a pass since
        for num_rows, seconds in measured.items():
            self.took(num_rows, seconds)
        self._untried |= self._at_load.keys()

    def passed(
        self, num_rows: int, num_tokens: int, pass_s: float, round_s: float, *, is_plain: bool
    ) -> None:
        """Note a pass that has made `num_tokens`; its round is the pass and the wait before it.

        is_plain  True: the pass had no drafts
        """
        self.took(num_rows, pass_s)
        self.token.add(round_s / max(1, num_tokens))
        if is_plain:
            self.num_since_plain = 0
            self.for_trials_s += SPENT_ON_TRIALS * pass_s
        else:
            self.num_since_plain += 1
            self.for_trials_s = 0.0

    def took(self, num_rows: int, pass_s: float) -> None:
        """Note that a pass of `num_rows` rows has taken `pass_s` seconds."""
        if num_rows in self._untried:
            self._untried.discard(num_rows)
            self._means[num_rows] = Mean()
        if num_rows not in self._means:
            self._means[num_rows] = Mean()
            insort(self._known, num_rows)
        self._means[num_rows].add(pass_s)
        self._curve = None

    def of(self, num_rows: int) -> float:
        """Return the expected seconds of a pass of `num_rows` rows; 0 if none was measured.

        More rows never take less: where fewer seem to take longer, `rising` decides. A number of
        rows that was timed only at load, in another state of the machine, would look dear for ever.
        Between two measured numbers of rows it is interpolated linearly; beyond the largest it is
        the same as for the largest, so that more rows are tried.
        """
        known = self._known
        if self._curve is None:
            self._curve = rising(self._values())
        index = bisect_left(known, num_rows)
        if index == len(known):
            return self._curve[-1] if known else 0.0
        above, above_s = known[index], self._curve[index]
        if above == num_rows or index == 0:
            return above_s
        below, below_s = known[index - 1], self._curve[index - 1]
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)

    def _values(self) -> list[tuple[float, int]]:
        """Return seconds and weight for each known number of rows, ascending."""
        slowed = self._slowed()
        return [
            (mean.value * (slowed if rows in self._untried else 1.0), min(mean.num, NUM_TRUSTED))
            for rows, mean in ((rows, self._means[rows]) for rows in self._known)
        ]

    def _slowed(self) -> float:
        """Return how many times as long passes take as at load, within 1 .. MOST_SLOWED."""
        most = max(self._at_load, default=0)  # what more rows take was not timed
        tried = [rows for rows in self._known if rows <= most and rows not in self._untried]
        if not self._untried or not tried:
            return 1.0
        weights = [min(self._means[rows].num, NUM_TRUSTED) for rows in tried]
        ratios = [self._means[rows].value / _between(self._at_load, rows) for rows in tried]
        mean = sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights)
        return min(MOST_SLOWED, max(1.0, mean))


def _between(timed: Measured, num_rows: int) -> float:
    """Return the seconds of so many rows, between those that were timed; the ends go on level."""
    below = max((rows for rows in timed if rows <= num_rows), default=min(timed))
    above = min((rows for rows in timed if rows >= num_rows), default=max(timed))
    if above <= below:
        return timed[below]
    return timed[below] + (timed[above] - timed[below]) * (num_rows - below) / (above - below)


class Durations:
    """How long forwards of any kind take, roughly: for limits, where `Passes` is for prices.

    measured  seconds of forwards by their rows, timed at load

    Forwards whose numbers of rows are within the same power of 2 count as alike.
    """

    def __init__(self, measured: Measured = NOTHING_KNOWN) -> None:
        self._means: dict[int, Mean] = {}  # seconds, by the bit length of the number of rows
        for num_rows, seconds in measured.items():
            self.took(num_rows, seconds)

    def took(self, num_rows: int, seconds: float) -> None:
        """Note that a forward of `num_rows` rows has taken so long."""
        self._means.setdefault(num_rows.bit_length(), Mean()).add(seconds)

    def of(self, num_rows: int) -> float:
        """Return the expected seconds of a forward; 0 if none was measured.

        Where none of about so many rows was, it is in proportion to those of fewer rows.
        """
        size = num_rows.bit_length()
        known = max((one for one in self._means if one <= size), default=None)
        if known is not None:
            return self._means[known].value * 2.0 ** (size - known)
        return min((mean.value for mean in self._means.values()), default=0.0)


def rising(values: Sequence[tuple[float, float]]) -> list[float]:
    """Return the values that never fall and are nearest to these, by squared errors.

    values  each with its weight, above 0

    The weighted mean replaces values that fall (isotonic regression: pool adjacent violators).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in values:
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, before, number = pools.pop()
            both = before + pool[1]
            pool = ((mean * before + pool[0] * pool[1]) / both, both, number + pool[2])
        pools.append(pool)
    return [mean for mean, _, number in pools for _ in range(number)]


class Costs:
    """Measured times in seconds of everything that a decision weighs.

    Passes are counted for each place (the CPU cores on which they run) by itself. A place is what
    the caller calls it; 0 is the only one where there is no choice.

    measured  seconds of passes by their rows at place 0, timed before the first text
    elsewhere  the same at other places

    draft     mean of a draft step
    reply     from a verdict to the drafts that answer it
    wait      mean of the waits that ended with drafts
    """

    def __init__(
        self,
        measured: Measured = NOTHING_KNOWN,
        elsewhere: Mapping[int, Measured] = MappingProxyType({}),
        *,
        is_alone: bool = False,
    ) -> None:
        """Begin with what was timed at load, by place; `is_alone` as for `Passes`."""
        self.draft = Mean()
        self.reply = Replies()
        self.wait = Mean()
        self.num_skipped = 0  # passes that began without a possible wait, since the last wait
        self._measured = {0: measured, **elsewhere}
        self._usual: dict[int, Mean] = {}  # seconds of a pass, whatever its rows and texts
        # By the place at which it runs, and the `crowd` of its texts.
        self._is_alone = is_alone
        self._passes = {(0, 1): Passes(measured, is_alone=is_alone)}

    def pass_s(self, place: int = 0) -> float:
        """Return the mean seconds of a decoding pass; 0 if there was none.

        Where none has run at this place yet, those at the others count.
        """
        usual = self._usual.get(place) or next(iter(self._usual.values()), None)
        return 0.0 if usual is None else usual.value

    def at(self, place: int = 0) -> "Prices":
        """Return what things cost while passes run at this place."""
        return Prices(self, place)

    def passes(self, num_texts: int, place: int = 0) -> Passes:
        """Return what was measured of passes with about `num_texts` texts."""
        known = self._passes.get((place, crowd(num_texts)))
        if known is not None:
            return known
        return Passes(self._measured.get(place, self._measured[0]), is_alone=self._is_alone)

    def passed(
        self,
        num_texts: int,
        num_rows: int,
        num_tokens: int,
        pass_s: float,
        round_s: float,
        *,
        is_plain: bool,
        place: int = 0,
    ) -> None:
        """Note a decoding pass of `num_texts` texts that has ended; see `Passes.passed`."""
        self._usual.setdefault(place, Mean()).add(pass_s)
        if pass_s > 0:
            key = place, crowd(num_texts)
            passes = self._passes.setdefault(key, self.passes(num_texts, place))
            passes.passed(num_rows, num_tokens, pass_s, round_s, is_plain=is_plain)

    def waited(self, seconds: float) -> None:
        """Note that drafts have come after a wait of so many seconds."""
        self.wait.add(seconds)
        self.num_skipped = 0

    def skipped(self) -> None:
        """Note that a pass has begun without a wait that would have been possible."""
        self.num_skipped += 1


class Prices:
    """What a decision weighs, as measured so far: `Costs` while passes run at one place.

    draft, reply, wait  as in `Costs`
    """

    def __init__(self, costs: Costs, place: int) -> None:
        self._costs, self._place = costs, place
        self.draft, self.reply, self.wait = costs.draft, costs.reply, costs.wait

    @property
    def pass_s(self) -> float:
        """Return the mean seconds of a decoding pass; 0 if there was none."""
        return self._costs.pass_s(self._place)

    @property
    def num_skipped(self) -> int:
        """Return how many passes have begun without a possible wait, since the last wait."""
        return self._costs.num_skipped

    def passes(self, num_texts: int) -> Passes:
        """Return what was measured of passes with about `num_texts` texts."""
        return self._costs.passes(num_texts, self._place)


def crowd(num_texts: int) -> int:
    """Return num_texts rounded up to a power of 2; passes of such numbers of texts cost alike."""
    return 1 << (num_texts - 1).bit_length()
