"""Decides whether the drafter should rest, because plain decoding is faster (pure).

Theory of operation
-------------------
A drafter that runs beside the target costs it something: cores, memory bandwidth, a share of a GPU,
messages; and rows in its passes. If few drafts are right, this is more than they save, and no model
of the costs can tell that in advance. So both ways are measured, in stretches of passes: tokens per
second with the drafter, and now and then a short trial without it, or the other way round. The
faster way goes on, for twice as long as before each time that a trial clearly confirms it, so that
trials cost less and less: under 4 % of the passes if nothing changes. If both ways are nearly
equally fast, trials go on as often as at first: they cost nothing then, and the next one may be
clear. Passes without drafts were timed when the model was loaded. If the first drafts make fewer
tokens a second than such passes would, the first trial comes early: else a short run would end
before it. If drafts make far more, no trial is made, since it would cost a short text a fifth of
its passes; the first stretch of the greatest length ends with a trial all the same.

The first passes of a stretch do not count, because the drafter learns only from the next verdict
whether it rests. In a crowd more of them do not count: first it has to be found out on which cores
passes without drafts are fastest there (`node/placing.py`). After a rest it first has to read the
text that it missed, so a stretch with it begins with the first draft that arrives, if one arrives
at all. Measurements are kept for each kind of text (policy and temperature), since acceptance
differs between kinds, and by how many texts share the passes (their crowd); if drafts did not pay
in a small crowd, a larger one begins without, and for long: a trial wakes the drafter for every
text.

A stretch goes one of four ways, and when it ends:

    DRAFTING       -> TRYING_REST; DRAFTING again if such a trial is not worth its cost
    TRYING_REST    -> RESTING if it was clearly faster, else DRAFTING
    RESTING        -> TRYING_DRAFTS
    TRYING_DRAFTS  -> DRAFTING if it was clearly faster, else RESTING; cut short if far slower

No decision here depends on the token of a draft, only on how many drafts were accepted before; and
only texts under coupled verification use it, whose tokens do not depend on the drafts.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

from node.costs import crowd
from proto.messages import Open, Rule

SETTLE_RESTING, SETTLE_DRAFTING = 2, 8  # passes at the start of a stretch that do not count
SETTLE_IN_CROWD = 40  # the same at the start of a rest where several texts share the passes
LONGEST_STRETCH = 1536
MEASURED = 96  # passes at the end of a stretch that count
TRIAL_OF_REST, TRIAL_OF_DRAFTS = 12, 48  # passes of a trial; with drafts the speed varies more
FAR = 1.25  # a trial of drafts is cut short where plain passes are so many times faster
CLEARLY = 1.05  # one way must be so many times faster than the other to be clearly faster
FORESEEN = 1.25  # the same where plain passes were only timed at load, perhaps too slow
NUM_TO_SUSPECT = 16  # passes that must count before drafts can look slower than none
NUM_IN_CROWD = 6  # the same where each pass has several texts, so that chance averages out
LONGEST_SILENCE = 512  # most passes that are not counted while a drafter reads after its rest
MAX_KINDS = 64


class Way(Enum):
    """The way a stretch of passes goes: with drafts or resting, as the faster way or as a trial."""

    DRAFTING = auto()
    TRYING_REST = auto()
    RESTING = auto()
    TRYING_DRAFTS = auto()


@dataclass(slots=True, eq=False)
class Course:
    """The measurements of one kind of text, and whether its drafter should rest now.

    way      of the current stretch
    is_crowd  several texts share the passes
    first    length in passes of the first stretch, and of one that begins after a change
    stretch  length of the next stretch that is no trial
    """

    first: int
    stretch: int
    way: Way = Way.DRAFTING
    is_crowd: bool = False
    num_silent: int = LONGEST_SILENCE  # passes since the drafter's rest without a draft from it
    num_passes: int = 0  # passes of this stretch
    num_counted: int = 0  # those of them that count
    num_tokens: float = 0.0  # tokens of each text in the passes that count
    seconds: float = 0.0  # seconds of these passes
    plain_s: float = 0.0  # seconds that they would have taken without drafts, as measured
    # Tokens per second with a rest (True) and without (False): a running mean over the stretches
    # so far, in which the newest has a weight of 2/3.
    rates: dict[bool, float] = field(default_factory=dict)

    @property
    def rests(self) -> bool:
        """True if the drafter should draft nothing now: it rests, or resting is being tried."""
        return self.way in (Way.RESTING, Way.TRYING_REST)

    @property
    def is_trial(self) -> bool:
        """True if the way that was not the faster one is being tried."""
        return self.way in (Way.TRYING_REST, Way.TRYING_DRAFTS)

    @property
    def is_faster_alone(self) -> bool:
        """True if resting is the faster way by what is known, whatever is being tried now."""
        return self.way in (Way.RESTING, Way.TRYING_DRAFTS)

    @property
    def length(self) -> int:
        """Return the number of passes of this stretch that may count."""
        if not self.is_trial:
            return self.stretch
        return min(self.first, TRIAL_OF_REST if self.rests else TRIAL_OF_DRAFTS)

    def heard(self) -> None:
        """Note that a draft has arrived."""
        self.num_silent = LONGEST_SILENCE

    def passed(self, num_tokens: float, seconds: float, plain_s: float = 0.0) -> None:
        """Note a pass that could have verified drafts, and has made `num_tokens` of each text.

        seconds  of the pass, waits included
        plain_s  seconds that a pass without drafts takes; 0: unknown
        """
        if not self.rests and self.num_silent < LONGEST_SILENCE:
            self.num_silent += 1
            return
        self.num_passes += 1
        settle = min(self.first, self._settle)
        left = settle + self.length - self.num_passes
        if self.num_passes <= settle or not 0 <= left < MEASURED:
            return
        self.num_counted += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.plain_s += plain_s
        if (left == 0 or self._looks_slow or self._has_failed) and self.seconds > 0:
            self._next(self.num_tokens / self.seconds)

    @property
    def _settle(self) -> int:
        if not self.rests:
            return SETTLE_DRAFTING
        return SETTLE_IN_CROWD if self.is_crowd else SETTLE_RESTING

    @property
    def _num_to_suspect(self) -> int:
        return NUM_IN_CROWD if self.is_crowd else NUM_TO_SUSPECT

    @property
    def _looks_slow(self) -> bool:
        """True if drafts seem slower than plain passes, and no trial has shown otherwise."""
        if self.way is not Way.DRAFTING or self.num_counted < self._num_to_suspect:
            return False
        if True in self.rates and self.rates[True] <= self.rates[False]:
            return False
        return 0 < self.num_tokens * self.plain_s < self.num_counted * self.seconds

    @property
    def _has_failed(self) -> bool:
        """True if a trial of drafts is so much slower than plain passes that it need not go on."""
        if self.way is not Way.TRYING_DRAFTS or self.num_counted < self._num_to_suspect:
            return False
        return self.num_tokens * FAR < self.rates[True] * self.seconds

    def _next(self, rate: float) -> None:
        """End a stretch: try the other way, or compare both ways after a trial."""
        self.rates[self.rests] = (self.rates.get(self.rests, rate) + 2 * rate) / 3
        longer = min(2 * self.stretch, LONGEST_STRETCH)
        if self._is_foreseen:
            self.stretch = longer
        elif self.way is Way.DRAFTING:
            self.way = Way.TRYING_REST
        elif self.way is Way.RESTING:
            self.way = Way.TRYING_DRAFTS
        else:
            here, there = self.rates[self.rests], self.rates[not self.rests]
            is_faster, is_slower = here > CLEARLY * there, there > CLEARLY * here
            self.way = Way.RESTING if self.rests is is_faster else Way.DRAFTING
            self.stretch = longer if is_slower else self.first
        self._begin()

    @property
    def _is_foreseen(self) -> bool:
        """True if the trial without drafts that would come next is not worth its cost."""
        is_tried = True in self.rates
        if self.way is not Way.DRAFTING or is_tried or self.stretch == LONGEST_STRETCH:
            return False
        return self.num_tokens * self.plain_s > FORESEEN * self.num_counted * self.seconds

    def _begin(self) -> None:
        """Reset the counts for a new stretch."""
        self.num_passes = self.num_silent = self.num_counted = 0
        self.num_tokens = self.seconds = self.plain_s = 0.0


def _kind_of(opened: Open) -> Hashable | None:
    """Return the kind of a text, by which it is measured; None if its drafter never rests."""
    policy = opened.policy
    if not (policy.may_rest and policy.has_drafter and opened.rule is Rule.COUPLED):
        return None
    return policy, opened.sampling.temperature, opened.lookup is None


class Courses:
    """The measurements of the kinds of texts that were used last, by how many share a pass."""

    def __init__(self) -> None:
        self._courses: dict[tuple[Hashable, int], Course] = {}  # by kind of text and crowd

    def of(self, opened: Open, num_texts: int) -> Course | None:
        """Return the measurements of texts like this one where `num_texts` texts share the passes.

        Makes them if there are none yet. None: the drafter never rests (stops drafting) for texts
        of this kind.
        """
        kind = _kind_of(opened)
        if kind is None:
            return None
        key, first = (kind, crowd(num_texts)), opened.policy.rest_after
        course = self._courses.pop(key, None)
        if course is None:
            is_known = self._rests_below(*key)
            way, stretch = (Way.RESTING, 8 * first) if is_known else (Way.DRAFTING, first)
            course = Course(first, stretch, way, is_crowd=key[1] > 1)
        self._courses[key] = course  # the newest comes last
        if len(self._courses) > MAX_KINDS:
            del self._courses[next(iter(self._courses))]
        return course

    def _rests_below(self, kind: Hashable, size: int) -> bool:
        """True if drafts of this kind do not pay in a smaller crowd (number of texts in a pass).

        Then they hardly will in a larger one, where each of its rows is one more beside many.
        """
        return any(
            known == kind and smaller < size and course.is_faster_alone
            for (known, smaller), course in self._courses.items()
        )
