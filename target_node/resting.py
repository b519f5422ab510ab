"""Decides whether the drafter should rest, because plain decoding is faster (pure).

Theory of operation
-------------------
A drafter that runs beside the target costs it something: cores, memory bandwidth, a share of a GPU,
messages; and rows in its passes. If few drafts are right, this is more than they save, and no model
of the costs can tell that in advance. So both ways are measured, in stretches of passes: tokens per
second with the drafter, and now and then a short trial without it, or the other way round. The
faster way goes on, for twice as long as before each time that a trial clearly confirms it, and for
so long that the next one, if it is lost too, costs no more than SPENT of the time. If both ways are
nearly equally fast, trials go on as often as at first: they cost nothing then, and the next one may
be clear. Passes without drafts were timed when the model was loaded. If the first drafts make fewer
tokens a second than such passes would, the first trial comes early: else a short run would end
before it. If drafts make far more, no trial is made, since it would cost a short text a fifth of
its passes; the first stretch of the greatest length ends with a trial all the same. Where the last
passes with drafts were far slower than plain ones were in a trial, the next trial comes at once.

What trials have found is an `Outcome`, which is kept for later starts (`remembering.py`): a process
that writes one short text would end before it knows anything. A new process goes on in the middle
of a stretch where an earlier one has ended, so that the next trial comes as soon as if all passes
were those of one process. Where the end of a process cuts a trial short, the next process makes it
early. If that ends too soon as well, the next trial comes after another stretch.

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

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum, auto
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from node.costs import crowd
from proto.messages import Open, Policy, Rule

SETTLE_RESTING, SETTLE_DRAFTING = 2, 8  # passes at the start of a stretch that do not count
SETTLE_IN_CROWD = 40  # the same at the start of a rest where several texts share the passes
LONGEST_STRETCH = 1536  # in passes, where trials cost little
LONGEST_OF_ALL = 12_288  # whatever a trial costs
SPENT = 0.01  # of the time may go into trials that are lost
FIRST_TIMES = 8  # so many times the first stretch is the longest that no second trial has confirmed
MEASURED = 96  # passes at the end of a stretch that count
TRIAL_OF_REST, TRIAL_OF_DRAFTS = 12, 48  # passes of a trial; with drafts the speed varies more
FAR = 1.25  # a trial of drafts is cut short where plain passes are so many times faster
CLEARLY = 1.05  # one way must be so many times faster than the other to be clearly faster
FORESEEN = 1.25  # the same where plain passes were only timed at load, perhaps too slow
NUM_TO_SUSPECT = 16  # passes that must count before drafts can look slower than none
NUM_IN_CROWD = 6  # the same where each pass has several texts, so that chance averages out
SURELY = 1.5  # so many times slower they look so after NUM_IN_CROWD passes in any case
LEAST_COUNTED = 16  # passes of a stretch that a new process makes before the stretch ends
LONGEST_SILENCE = 512  # most passes that are not counted while a drafter reads after its rest
MAX_KINDS = 64


class Way(Enum):
    """The way a stretch of passes goes: with drafts or resting, as the faster way or as a trial."""

    DRAFTING = auto()
    TRYING_REST = auto()
    RESTING = auto()
    TRYING_DRAFTS = auto()


class Outcome(NamedTuple):
    """What trials have found of one kind of text, for later starts.

    kind        of text, in words
    num_texts   most texts that share the passes (`crowd`)
    rests       plain decoding was faster
    stretch     length in passes of the present stretch of the faster way, and
    num_passes  how many of them were made
    alone, drafted  without the drafter and with it: tokens of each text a second, seconds of a pass
    """

    kind: str
    num_texts: int
    rests: bool
    stretch: int
    num_passes: int
    alone: tuple[float, float]
    drafted: tuple[float, float]


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
    # Tokens of each text and seconds of a pass: running means over the last passes of this stretch.
    recent: tuple[float, float] = (0.0, 0.0)
    num_recent: int = 0  # passes in them
    # Tokens per second with a rest (True) and without (False): a running mean over the stretches
    # so far, in which the newest has a weight of 2/3. And the seconds of a pass in the newest.
    rates: dict[bool, float] = field(default_factory=dict)
    pass_s: dict[bool, float] = field(default_factory=dict)
    is_new: bool = False  # a stretch has ended since the outcome was said
    is_early: bool = False  # this process began with the end of a stretch: its trial comes early

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
        if self.num_passes > settle:
            self._note_recent(num_tokens, seconds)
        if self._is_far_behind:
            self._next(self.recent[0] / self.recent[1], self.recent[1])
            return
        left = settle + self.length - self.num_passes
        if self.num_passes <= settle or not 0 <= left < MEASURED:
            return
        self.num_counted += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.plain_s += plain_s
        is_over = left == 0 or self._looks_slow or self._is_clear
        if is_over and self.seconds > 0:
            self._next(self.num_tokens / self.seconds, self.seconds / self.num_counted)

    def _note_recent(self, num_tokens: float, seconds: float) -> None:
        self.num_recent += 1
        weight = 1 / min(self.num_recent, NUM_TO_SUSPECT)
        tokens, spent_s = self.recent
        self.recent = (
            tokens + weight * (num_tokens - tokens),
            spent_s + weight * (seconds - spent_s),
        )

    @property
    def _settle(self) -> int:
        return self._settle_of(rests=self.rests)

    def _settle_of(self, *, rests: bool) -> int:
        if not rests:
            return SETTLE_DRAFTING
        return SETTLE_IN_CROWD if self.is_crowd else SETTLE_RESTING

    @property
    def _num_to_suspect(self) -> int:
        return NUM_IN_CROWD if self.is_crowd else NUM_TO_SUSPECT

    @property
    def _looks_slow(self) -> bool:
        """True if drafts seem slower than plain passes, and no trial has shown otherwise."""
        if self.way is not Way.DRAFTING or self.num_counted < NUM_IN_CROWD:
            return False
        if True in self.rates and self.rates[True] <= self.rates[False]:
            return False
        slower = 1.0 if self.num_counted >= self._num_to_suspect else SURELY
        return 0 < slower * self.num_tokens * self.plain_s < self.num_counted * self.seconds

    @property
    def _is_clear(self) -> bool:
        """True if a trial of drafts is so much slower or faster that it need not go on."""
        if self.way is not Way.TRYING_DRAFTS or self.num_counted < self._num_to_suspect:
            return False
        usual = self.rates[True] * self.seconds
        return not usual / FAR <= self.num_tokens <= usual * FAR

    @property
    def _is_far_behind(self) -> bool:
        """True if the last passes with drafts were far slower than plain ones that were measured.

        Texts of one kind differ, and what paid on average may not on this one.
        """
        if self.way is not Way.DRAFTING or True not in self.rates:
            return False
        tokens, seconds = self.recent
        is_known = self.num_recent >= NUM_TO_SUSPECT
        return is_known and SURELY * tokens < self.rates[True] * seconds

    def _next(self, rate: float, pass_s: float) -> None:
        """End a stretch: try the other way, or compare both ways after a trial.

        rate, pass_s  tokens of each text a second in it, and seconds of a pass
        """
        self.rates[self.rests] = (self.rates.get(self.rests, rate) + 2 * rate) / 3
        self.pass_s[self.rests] = pass_s
        self.is_new = True
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
            self.is_early = False
            usual = longer if is_slower else self.first
            most = LONGEST_OF_ALL if is_slower else FIRST_TIMES * self.first
            self.stretch = max(usual, min(self._num_to_pay, most))
        self._begin()

    @property
    def _num_to_pay(self) -> int:
        """Return after how many passes of this way a trial of the other costs SPENT of the time."""
        here, there = self.rates[self.rests], self.rates[not self.rests]
        num_counted = TRIAL_OF_REST
        if self.rests:
            is_cut_short = there * FAR < here
            num_counted = self._num_to_suspect if is_cut_short else TRIAL_OF_DRAFTS
        num_passes = self._settle_of(rests=not self.rests) + num_counted
        lost_s = num_passes * self.pass_s[not self.rests] * (1 - there / here)
        return ceil(lost_s / SPENT / self.pass_s[self.rests])

    @property
    def _is_foreseen(self) -> bool:
        """True if the trial without drafts that would come next is not worth its cost."""
        is_tried = True in self.rates
        if self.way is not Way.DRAFTING or is_tried or self.stretch >= LONGEST_STRETCH:
            return False
        return self.num_tokens * self.plain_s > FORESEEN * self.num_counted * self.seconds

    def _begin(self) -> None:
        """Reset the counts for a new stretch."""
        self.num_passes = self.num_silent = self.num_counted = 0
        self.num_tokens = self.seconds = self.plain_s = 0.0
        self.recent, self.num_recent = (0.0, 0.0), 0

    def outcome(self, kind: str, num_texts: int) -> Outcome | None:
        """Return what trials have found; None: there was none yet."""
        if len(self.rates) < len((True, False)):
            return None
        num_passes = min(self.num_passes, self.stretch)
        if self.is_trial:  # if this is the end, the next process tries it early, but only once
            num_passes = 0 if self.is_early else self.stretch
        alone, drafted = ((self.rates[rests], self.pass_s[rests]) for rests in (True, False))
        found = self.is_faster_alone, self.stretch, num_passes
        return Outcome(kind, num_texts, *found, alone, drafted)

    @classmethod
    def resumed(cls, earlier: Outcome, first: int) -> "Course":
        """Return the measurements of a process that goes on where an earlier one has ended."""
        way = Way.RESTING if earlier.rests else Way.DRAFTING
        course = cls(first, earlier.stretch, way, is_crowd=earlier.num_texts > 1)
        most = min(first, course._settle) + earlier.stretch - LEAST_COUNTED
        course.num_passes = max(0, min(earlier.num_passes, most))
        course.is_early = earlier.num_passes >= most
        for rests, (rate, pass_s) in ((True, earlier.alone), (False, earlier.drafted)):
            course.rates[rests], course.pass_s[rests] = rate, pass_s
        return course


@lru_cache(MAX_KINDS)
def _kind(policy: Policy, temperature: float, *, copies: bool) -> str:
    """Return the words for a kind of text: it is the same if they are."""
    numbers = " ".join(f"{value:g}" for value in astuple(policy)[1:])
    return f"{policy.name} {numbers} at {temperature:g}{', with copies' if copies else ''}"


def _kind_of(opened: Open) -> str | None:
    """Return the kind of a text, by which it is measured; None if its drafter never rests."""
    policy = opened.policy
    if not (policy.may_rest and policy.has_drafter and opened.rule is Rule.COUPLED):
        return None
    return _kind(policy, opened.sampling.temperature, copies=opened.lookup is not None)


class Courses:
    """The measurements of the kinds of texts that were used last, by how many share a pass.

    earlier  what earlier processes have found
    """

    def __init__(self, earlier: Sequence[Outcome] = ()) -> None:
        self._earlier = {(one.kind, one.num_texts): one for one in earlier}
        self._courses: dict[tuple[str, int], Course] = {}  # by kind of text and crowd

    def of(self, opened: Open, num_texts: int) -> Course | None:
        """Return the measurements of texts like this one where `num_texts` texts share the passes.

        Makes them if there are none yet. None: the drafter never rests (stops drafting) for texts
        of this kind.
        """
        kind = _kind_of(opened)
        if kind is None:
            return None
        key = kind, crowd(num_texts)
        course = self._courses.pop(key, None) or self._begun(key, opened.policy.rest_after)
        self._courses[key] = course  # the newest comes last
        if len(self._courses) > MAX_KINDS:
            del self._courses[next(iter(self._courses))]
        return course

    def _begun(self, key: tuple[str, int], first: int) -> Course:
        """Return the measurements of a kind that was not used lately."""
        if (earlier := self._earlier.get(key)) is not None:
            return Course.resumed(earlier, first)
        is_known = self._rests_below(*key)
        way, stretch = (Way.RESTING, FIRST_TIMES * first) if is_known else (Way.DRAFTING, first)
        return Course(first, stretch, way, is_crowd=key[1] > 1)

    def _rests_below(self, kind: str, size: int) -> bool:
        """True if drafts of this kind do not pay in a smaller crowd (number of texts in a pass).

        Then they hardly will in a larger one, where each of its rows is one more beside many.
        """
        here = {key: course.is_faster_alone for key, course in self._courses.items()}
        before = {key: one.rests for key, one in self._earlier.items()}
        return any(
            known == kind and smaller < size and rests
            for (known, smaller), rests in {**before, **here}.items()
        )

    def news(self, *, is_end: bool = False) -> Sequence[Outcome]:
        """Return everything that was found if there is something new, to be kept; else ().

        is_end  a text has come to its end: perhaps its process does, too
        """
        if not (is_end or any(course.is_new for course in self._courses.values())):
            return ()
        found = dict(self._earlier)
        for key, course in self._courses.items():
            course.is_new = False
            if (outcome := course.outcome(*key)) is not None:
                found.pop(key, None)
                found[key] = outcome  # the newest comes last
        found = dict(tuple(found.items())[-MAX_KINDS:])
        if found == self._earlier:
            return ()
        self._earlier = found
        return tuple(found.values())
