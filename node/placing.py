"""Decides on which cores a pass runs, or whether both models take turns, by measured times (pure).

Theory of operation
-------------------
A target on CPUs has two places. `APART` is its own cores; the drafter has a core for itself and
drafts on while a pass runs. `SHARED` is these and the drafter's core; a pass has more of the
machine's memory bandwidth, but a drafter that computes meanwhile takes from it. Which is better
depends on the models, the machine and whatever else runs on it, and may change in mid-text. So it
is measured, in tokens a second, separately for each kind of pass (a `Contest`): beside a drafter
that drafts it is another question than alone.

    pass ended, on the standing place    its tokens and seconds are counted in a running mean
    its times differ from the known ones -> they are measured anew, and a trial follows
    enough time since the last trial     -> a trial: NUM_TRIAL passes on the other place
    trial ended                          -> if it was clearly faster, and by more than chance
                                            explains, the standing place is measured once more
    measured once more                   -> the other place stands if it was clearly faster than
                                            this too: a stall before the trial may have misled it
    a pass of the trial was far slower   -> the trial ends early

A trial that was lost is repeated after so much time that all trials together cost about SPENT of
it. The first one comes early, unless the times at load say that it would cost more, and at once in
a crowd. Tokens are the expected number by the chances of the drafts, because which drafts happen to
be right differs more from pass to pass than what places make of it.

On `SHARED` the models take turns under a policy that prices how many drafts are awaited: after each
verdict the drafter makes as many draft steps as the target waits for, and none while the pass runs
(`takes_turns`). A drafter that drafted on would slow the pass by more than its drafts are worth
(docs/LOG.md).

Two processes on one GPU have no cores to choose, but the same question: the two places are then
two ways. `APART`: the drafter drafts while a pass runs, and both are slower for it; `SHARED`: the
models take turns. Which is faster depends on the GPU, and on whether kernels of both overlap (MPS).

A target on devices that the user has named keeps its cores. Its places are then numbers of threads:
as many as timing has chosen (`SHARED`), and one less (`APART`), for when other work takes a core.

The first pass after a change of places is not counted: caches are cold then.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import log, sqrt

from node.costs import Measured

MEMORY = 32.0  # number of passes that a running mean remembers
NUM_TRIAL = 6  # passes of a trial that count
FIRST_S, LONGEST_S = 0.5, 60.0  # seconds from one trial to the next
SPENT = 0.01  # part of the time that lost trials may cost
CLEARLY = 1.04  # the other place must be so many times as fast to become the standing one
SURELY = 2.0  # and faster by so many standard errors
CHANGED = 1.4  # so many times as long or as short as known: something else runs here now
LEAST_VARIANCE = 0.02**2  # of a trial's gain; the machine's own ups and downs
FADED = 0.5  # what earlier trials count for when another begins
FAR = 3.0  # a trial ends early when it has cost so many passes of the standing place
WORTH = 1.25  # before any trial, the gain on all cores at which a pass with drafts runs there
USUAL_ROWS = 5  # rows of a pass with drafts, as assumed before the first text
MAX_KINDS = 64


class Place(IntEnum):
    """The cores on which a pass runs."""

    APART = 0
    SHARED = 1

    @property
    def other(self) -> "Place":
        """Return the other place."""
        return Place(1 - self)


@dataclass(slots=True)
class Speed:
    """Seconds per token of the last passes on one place; older passes count less and less.

    All fields but `num` are sums over the passes, of which each is weighted by its age.
    """

    num: int = 0  # passes that were counted
    passes: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squared_tokens: float = 0.0
    squared_seconds: float = 0.0
    products: float = 0.0  # of tokens and seconds

    def add(self, tokens: float, seconds: float) -> None:
        """Count a pass."""
        keep = 1 - 1 / MEMORY
        self.num += 1
        self.passes = keep * self.passes + 1
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.squared_tokens = keep * self.squared_tokens + tokens**2
        self.squared_seconds = keep * self.squared_seconds + seconds**2
        self.products = keep * self.products + tokens * seconds

    @property
    def pass_s(self) -> float:
        """Return the mean seconds of a pass; some pass was counted."""
        return self.seconds / self.passes

    @property
    def token_s(self) -> float:
        """Return the mean seconds per token; some pass was counted."""
        return self.seconds / self.tokens

    @property
    def variance(self) -> float:
        """Return the variance of the logarithm of `token_s`, which is a ratio of two means."""
        ratio = self.token_s
        squares = self.squared_seconds - 2 * ratio * self.products + ratio**2 * self.squared_tokens
        return max(0.0, squares) / self.seconds**2


@dataclass(slots=True)
class Evidence:
    """How much faster the other place is, by the trials so far; older ones count less and less.

    gain    natural logarithm of its speed over that of the standing place
    weight  inverse of the variance of `gain`; 0: there was no trial
    """

    gain: float = 0.0
    weight: float = 0.0

    def add(self, here: Speed, there: Speed) -> None:
        """Count a trial; forget the earlier ones if it contradicts them."""
        gain = log(here.token_s / there.token_s)
        weight = 1 / (here.variance + there.variance + LEAST_VARIANCE)
        old = 0.0 if abs(gain - self.gain) > log(CHANGED) else FADED * self.weight
        self.gain = (old * self.gain + weight * gain) / (old + weight)
        self.weight = old + weight

    @property
    def is_faster(self) -> bool:
        """True if the other place seems clearly faster."""
        return self.gain > log(CLEARLY)

    @property
    def is_sure(self) -> bool:
        """True if the other place is clearly faster, by more than chance explains."""
        return self.is_faster and self.gain * sqrt(self.weight) > SURELY


@dataclass(slots=True)
class Contest:
    """Finds the faster place for one kind of pass.

    standing  the place that is thought to be the faster one
    here      what passes on the standing place take
    trial     what those of the running trial take; None: no trial runs
    won       what those of a trial took that was faster, while `again` is measured; else None
    again     what passes on the standing place take after such a trial
    evidence  what the trials have shown
    known_s   seconds of a pass on the standing place at the end of the last trial, or of the first
              passes before any; 0: unknown
    spent_s   what this trial has cost so far: seconds beyond those of the standing place
    since_s   seconds since the last trial ended
    pause_s   seconds from then to the next trial
    latest    place of the latest pass
    """

    standing: Place
    here: Speed = field(default_factory=Speed)
    trial: Speed | None = None
    won: Speed | None = None
    again: Speed = field(default_factory=Speed)
    evidence: Evidence = field(default_factory=Evidence)
    known_s: float = 0.0
    spent_s: float = 0.0
    since_s: float = 0.0
    pause_s: float = FIRST_S
    latest: Place | None = None

    @property
    def place(self) -> Place:
        """Return where the next pass runs."""
        return self.standing if self.trial is None else self.standing.other

    def passed(self, place: Place, tokens: float, seconds: float) -> None:
        """Note a pass on `place`; `tokens` are its expected ones, `seconds` include its wait."""
        is_settled, self.latest = place == self.latest, place
        if place is not self.place or seconds <= 0:
            return
        if self.trial is not None:
            self._tried(self.trial, tokens, seconds, is_settled=is_settled)
            return
        self.since_s += seconds
        if not is_settled:
            return
        if self.won is not None:
            self._checked(self.won, tokens, seconds)
            return
        self.here.add(tokens, seconds)
        if self.here.num < NUM_TRIAL:
            return
        if not self.known_s:
            self.known_s = self.here.pass_s
        if not 1 / CHANGED < self.here.pass_s / self.known_s < CHANGED:
            self.here, self.evidence, self.known_s = Speed(), Evidence(), 0.0
            self.pause_s = FIRST_S
            self.since_s = FIRST_S  # a trial follows as soon as the new times are known
        elif self.since_s >= self.pause_s:
            self.trial, self.spent_s = Speed(), 0.0

    def _tried(self, trial: Speed, tokens: float, seconds: float, *, is_settled: bool) -> None:
        """Note a pass of the trial; end the trial if it was the last, or if it is in vain."""
        usual_s = self.here.token_s * tokens
        self.spent_s += seconds - usual_s
        if not is_settled:
            return
        trial.add(tokens, seconds)
        if trial.num < NUM_TRIAL and self.spent_s < FAR * usual_s:
            return
        self.evidence.add(self.here, trial)
        self.trial = None
        if self.evidence.is_sure:
            self.won, self.again = trial, Speed()
        else:
            self._lost(is_open=self.evidence.is_faster)

    def _checked(self, won: Speed, tokens: float, seconds: float) -> None:
        """Note a pass on the standing place after a trial that was faster; the last decides."""
        self.again.add(tokens, seconds)
        if self.again.num < NUM_TRIAL:
            return
        self.won = None
        if self.again.token_s > CLEARLY * won.token_s:
            self.standing, self.here = self.standing.other, won
            self.evidence.gain *= -1
            self.known_s, self.pause_s, self.since_s = won.pass_s, FIRST_S, 0.0
        else:
            self.here, self.evidence = self.again, Evidence()
            self._lost(is_open=False)

    def _lost(self, *, is_open: bool) -> None:
        """Keep the standing place until the next trial; is_open: that comes as soon as this one."""
        longer_s = self.pause_s if is_open else min(2 * self.pause_s, LONGEST_S)
        self.pause_s = min(LONGEST_S, max(FIRST_S, longer_s, self.spent_s / SPENT))
        self.known_s, self.since_s = self.here.pass_s, 0.0


class Placing:
    """Says for each pass on which place it runs.

    measured  seconds of passes by their rows, for each place, as timed at load
    fixed     the place of every pass with drafts; None: it is measured
    usual     where passes with drafts begin if nothing was timed
    has_drafters_core  True: the drafter's core is one of those of `SHARED`
    """

    def __init__(
        self,
        measured: Mapping[Place, Measured] | None = None,
        fixed: Place | None = None,
        usual: Place = Place.APART,
        *,
        has_drafters_core: bool = False,
    ) -> None:
        self.measured = measured or {}
        self.has_drafters_core = has_drafters_core
        self.fixed, self.usual = fixed, usual
        self._contests: dict[Hashable, Contest] = {}  # by kind; the one used last comes last

    def takes_turns(self, place: Place) -> bool:
        """Return whether the drafter should not compute while a pass runs on this place."""
        return self.has_drafters_core and place is Place.SHARED

    def place_for(self, kind: Hashable, *, is_drafted: bool) -> Place:
        """Return where the next pass of this kind runs.

        is_drafted  True: the drafter drafts for a text of the pass
        """
        if is_drafted and self.fixed is not None:
            return self.fixed
        contest = self._contests.get((kind, is_drafted))
        return self.first(is_drafted=is_drafted) if contest is None else contest.place

    def passed(
        self,
        kind: Hashable,
        place: Place,
        tokens: float,
        seconds: float,
        *,
        is_drafted: bool,
        is_crowd: bool = False,
    ) -> None:
        """Note a pass of this kind that has ended; see `Contest.passed`.

        is_crowd  several texts share it
        """
        contest = self._contest(kind, is_drafted=is_drafted, is_crowd=is_crowd)
        contest.passed(place, tokens, seconds)

    def _contest(self, kind: Hashable, *, is_drafted: bool, is_crowd: bool) -> Contest:
        key = (kind, is_drafted)
        contest = self._contests.pop(key, None)
        if contest is None:
            standing = self.first(is_drafted=is_drafted)
            # A crowd also keeps the coordinator busy, of which the times at load know nothing.
            known_s = self._first_pause_s(standing, is_drafted=is_drafted)
            contest = Contest(standing, pause_s=0.0 if is_crowd else known_s)
        self._contests[key] = contest
        if len(self._contests) > MAX_KINDS:
            del self._contests[next(iter(self._contests))]
        return contest

    def first(self, *, is_drafted: bool) -> Place:
        """Return where passes of a new kind run, by the times at load.

        Passes alone begin on all cores if nothing was timed. With drafts the gain must be WORTH it:
        a drafter that is not disturbed has its drafts ready earlier.
        """
        if is_drafted and self.fixed is not None:
            return self.fixed
        apart_s, shared_s = (self._pass_s(place, is_drafted=is_drafted) for place in Place)
        if not apart_s or not shared_s:
            return self.usual if is_drafted else Place.SHARED
        is_shared = apart_s > (WORTH if is_drafted else 1.0) * shared_s
        return Place.SHARED if is_shared else Place.APART

    def _first_pause_s(self, standing: Place, *, is_drafted: bool) -> float:
        """Return after how many seconds the first trial begins, by what it would cost.

        A text of a second or two would lose a tenth by a trial on a place that is half as fast.
        """
        here_s, there_s = (
            self._pass_s(place, is_drafted=is_drafted) for place in (standing, standing.other)
        )
        if not here_s or not there_s:
            return FIRST_S
        spent_s = min(FAR * here_s, NUM_TRIAL * (there_s - here_s))
        return min(LONGEST_S, max(FIRST_S, spent_s / SPENT))

    def _pass_s(self, place: Place, *, is_drafted: bool) -> float:
        """Return the seconds of a usual pass on a place as timed at load; 0: it was not timed."""
        return self.measured.get(place, {}).get(USUAL_ROWS if is_drafted else 1, 0.0)
