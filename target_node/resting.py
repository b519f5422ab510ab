"""Whether the drafter should rest, because the target writes faster alone (pure).

Theory of operation
-------------------
A drafter that runs beside the target costs it something: cores, memory bandwidth, a share of a GPU,
messages; and rows in its passes. If few drafts are right that is more than they bring, and no model
of the costs says so in advance. So both ways are measured, in stretches of passes: tokens per
second with the drafter, and now and then a short trial without it, or the other way round. What was
faster goes on, for twice as long as before each time that trials clearly confirm it, so that
trials cost less and less: under 4 % of the passes where nothing changes. Where both are nearly
alike, trials go on as often as at first: they cost nothing there, and the next one may tell.
Passes without drafts were timed when the model was loaded. Where the first drafts bring less than
those would, the first trial comes early: else a short run would be over before it. Where drafts
bring far more than those would, that stands for a trial, which would cost a short text a fifth of
its passes; the first stretch that is longest ends with one all the same.

The first passes of a stretch do not count: the drafter hears of it with the next verdict. After a
rest it has to read what it missed, so a stretch with it begins with the first draft that comes, if
one comes at all. What is known is kept for each kind of text (policy and temperature), since they
accept differently, and by how many share the passes; where drafts did not pay for few texts, more
texts begin without.

A stretch goes one of four ways, and when it ends:

    DRAFTING       -> TRYING_REST; DRAFTING again where such a trial is not worth its cost
    TRYING_REST    -> RESTING if it was clearly faster, else DRAFTING
    RESTING        -> TRYING_DRAFTS
    TRYING_DRAFTS  -> DRAFTING if it was clearly faster, else RESTING

Nothing here depends on what a draft is, only on how many were accepted before; and only coupled
texts ask, whose tokens do not depend on what is drafted.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

from node.economics import crowd
from proto.messages import Open, Rule

SETTLE_RESTING, SETTLE_DRAFTING = 2, 8  # passes at the start of a stretch that do not count
LONGEST_STRETCH = 1536
MEASURED = 96  # passes at the end of a stretch that count
TRIAL_OF_REST, TRIAL_OF_DRAFTS = 12, 48  # what drafts bring varies more
CLEARLY = 1.05  # so many times faster the other way must be
FORESEEN = 1.25  # likewise while only the costs are known: they may have been timed too slow
NUM_TO_SUSPECT = 16  # passes that count, before drafts can look slower than none
LONGEST_SILENCE = 512  # passes for which a drafter that wakes up is given time to read
MAX_KINDS = 64


class Way(Enum):
    """How a stretch of passes goes."""

    DRAFTING = auto()
    TRYING_REST = auto()
    RESTING = auto()
    TRYING_DRAFTS = auto()


@dataclass(slots=True, eq=False)
class Course:
    """What is known of one kind of text.

    way      of the stretch that goes on
    first    passes of the first stretch, and of one that begins with a change
    stretch  of the next stretch that is no trial
    """

    first: int
    stretch: int
    way: Way = Way.DRAFTING
    num_silent: int = LONGEST_SILENCE  # passes since it woke up without a draft from it
    num_passes: int = 0  # of this stretch
    num_counted: int = 0  # those that count
    num_tokens: float = 0.0  # of them
    seconds: float = 0.0  # likewise
    plain_s: float = 0.0  # what those would have taken without drafts, by what is known
    # Tokens per second with a rest and without, over the stretches so far, of which each counts
    # three times as much as the one before.
    rates: dict[bool, float] = field(default_factory=dict)

    @property
    def rests(self) -> bool:
        """Whether the drafter is to rest now."""
        return self.way in (Way.RESTING, Way.TRYING_REST)

    @property
    def is_trial(self) -> bool:
        """Whether the way is tried that was not the faster one."""
        return self.way in (Way.TRYING_REST, Way.TRYING_DRAFTS)

    @property
    def is_faster_alone(self) -> bool:
        """Whether that is what is known, whatever is being tried now."""
        return self.way in (Way.RESTING, Way.TRYING_DRAFTS)

    @property
    def length(self) -> int:
        """Passes of this stretch that may count."""
        if not self.is_trial:
            return self.stretch
        return min(self.first, TRIAL_OF_REST if self.rests else TRIAL_OF_DRAFTS)

    def heard(self) -> None:
        """A draft has come."""
        self.num_silent = LONGEST_SILENCE

    def passed(self, num_tokens: float, seconds: float, plain_s: float = 0.0) -> None:
        """A pass that could have verified drafts has made so many tokens of each text.

        seconds  that it took, waits included
        plain_s  that one without drafts is known to take; 0: it is not known
        """
        if not self.rests and self.num_silent < LONGEST_SILENCE:
            self.num_silent += 1
            return
        self.num_passes += 1
        settle = min(self.first, SETTLE_RESTING if self.rests else SETTLE_DRAFTING)
        left = settle + self.length - self.num_passes
        if self.num_passes <= settle or not 0 <= left < MEASURED:
            return
        self.num_counted += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.plain_s += plain_s
        if (left == 0 or self._looks_slow) and self.seconds > 0:
            self._next(self.num_tokens / self.seconds)

    @property
    def _looks_slow(self) -> bool:
        """Whether drafts seem to bring less than none would, and no trial has said otherwise."""
        if self.way is not Way.DRAFTING or self.num_counted < NUM_TO_SUSPECT:
            return False
        if True in self.rates and self.rates[True] <= self.rates[False]:
            return False
        return 0 < self.num_tokens * self.plain_s < self.num_counted * self.seconds

    def _next(self, rate: float) -> None:
        """A stretch has ended: try the other way, or judge what was tried."""
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
        """Whether a trial without drafts, which would be next, is not worth its cost."""
        is_tried = True in self.rates
        if self.way is not Way.DRAFTING or is_tried or self.stretch == LONGEST_STRETCH:
            return False
        return self.num_tokens * self.plain_s > FORESEEN * self.num_counted * self.seconds

    def _begin(self) -> None:
        """Count a stretch from its start."""
        self.num_passes = self.num_silent = self.num_counted = 0
        self.num_tokens = self.seconds = self.plain_s = 0.0


def _kind_of(opened: Open) -> Hashable | None:
    """What a text is taken for; None where the drafter never rests."""
    policy = opened.policy
    if not (policy.is_priced and policy.has_drafter and opened.rule is Rule.COUPLED):
        return None
    return policy, opened.sampling.temperature, opened.lookup is None


class Courses:
    """What is known of all kinds of texts, of those that were asked for last at least."""

    def __init__(self) -> None:
        self._courses: dict[tuple[Hashable, int], Course] = {}  # by kind and crowd

    def of(self, opened: Open, num_texts: int) -> Course | None:
        """What is known of texts of this kind where so many share the passes.

        None: of a kind for which the drafter never rests.
        """
        kind = _kind_of(opened)
        if kind is None:
            return None
        key, first = (kind, crowd(num_texts)), opened.policy.rest_after
        course = self._courses.pop(key, None)
        if course is None:
            way = Way.RESTING if self._rests_below(*key) else Way.DRAFTING
            course = Course(first, first, way)
        self._courses[key] = course  # the newest comes last
        if len(self._courses) > MAX_KINDS:
            del self._courses[next(iter(self._courses))]
        return course

    def _rests_below(self, kind: Hashable, size: int) -> bool:
        """Whether drafts of this kind do not pay in smaller crowds.

        Then they hardly will in a larger one, where each of its rows is one more beside many.
        """
        return any(
            known == kind and smaller < size and course.is_faster_alone
            for (known, smaller), course in self._courses.items()
        )
