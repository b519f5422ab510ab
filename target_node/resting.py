"""Whether the drafter should rest, because the target writes faster alone (pure).

Theory of operation
-------------------
A drafter that runs beside the target costs it something: cores, memory bandwidth, a share of a GPU,
messages; and rows in its passes. If few drafts are right that is more than they bring, and no model
of the costs says so in advance. So both ways are measured, in stretches of passes: tokens per
second with the drafter, and now and then a short trial without it, or the other way round. What was
faster goes on, for twice as long as before each time that a trial clearly confirms it, so that
trials cost less and less: under 4 % of the passes where nothing changes. Where both are nearly
alike, trials go on as often as at first: they cost nothing there, and the next one may tell.

The first passes of a stretch do not count: the drafter hears of it with the next verdict. After a
rest it has to read what it missed, so a stretch with it begins with the first draft that comes, if
one comes at all. What is known is kept for each kind of text (policy and temperature), since they
accept differently, and by how many share the passes; where drafts did not pay for few texts, more
texts begin without.

Nothing here depends on what a draft is, only on how many were accepted before; and only coupled
texts ask, whose tokens do not depend on what is drafted.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from node.costs import crowd
from proto.messages import Open, Rule

SETTLE_RESTING, SETTLE_DRAFTING = 2, 8  # passes at the start of a stretch that do not count
LONGEST_STRETCH = 1536
MEASURED = 96  # passes at the end of a stretch that count
TRIAL_OF_REST, TRIAL_OF_DRAFTS = 12, 48  # what drafts bring varies more
CLEARLY = 1.05  # so many times faster the other way must be
LONGEST_SILENCE = 512  # passes for which a drafter that wakes up is given time to read
MAX_KINDS = 64


@dataclass(slots=True, eq=False)
class Course:
    """What is known of one kind of text.

    rests    the drafter is to rest now
    other    tokens per second of the way that a trial is compared with; 0: this is no trial
    first    passes of the first stretch, and of one that begins with a change
    stretch  of the next stretch that is no trial
    """

    first: int
    stretch: int
    rests: bool = False
    other: float = 0.0
    num_silent: int = LONGEST_SILENCE  # passes since it woke up without a draft from it
    num_passes: int = 0  # of this stretch
    num_tokens: float = 0.0  # of its passes that count
    seconds: float = 0.0  # likewise

    @property
    def is_faster_alone(self) -> bool:
        """Whether that is what is known, whatever is being tried now."""
        return self.rests is not bool(self.other)

    @property
    def length(self) -> int:
        """Passes of this stretch that may count."""
        if not self.other:
            return self.stretch
        return min(self.first, TRIAL_OF_REST if self.rests else TRIAL_OF_DRAFTS)

    def heard(self) -> None:
        """A draft has come."""
        self.num_silent = LONGEST_SILENCE

    def passed(self, num_tokens: float, seconds: float) -> None:
        """A pass that could have verified drafts has made so many tokens of each text, waits
        included."""
        if not self.rests and self.num_silent < LONGEST_SILENCE:
            self.num_silent += 1
            return
        self.num_passes += 1
        settle = min(self.first, SETTLE_RESTING if self.rests else SETTLE_DRAFTING)
        left = settle + self.length - self.num_passes
        if self.num_passes <= settle or not 0 <= left < MEASURED:
            return
        self.num_tokens += num_tokens
        self.seconds += seconds
        if left == 0 and self.seconds > 0:
            self._next(self.num_tokens / self.seconds)

    def _next(self, rate: float) -> None:
        """A stretch has ended: try the other way, or judge what was tried."""
        if not self.other:
            self.other = rate
            self.rests = not self.rests
        else:
            if rate > CLEARLY * self.other:
                self.stretch = self.first
            else:
                self.rests = not self.rests
                is_clear = self.other > CLEARLY * rate
                self.stretch = min(2 * self.stretch, LONGEST_STRETCH) if is_clear else self.first
            self.other = 0.0
        self.num_passes = self.num_silent = 0
        self.num_tokens = self.seconds = 0.0


def _kind_of(opened: Open) -> Hashable | None:
    """What a text is taken for; None where the drafter never rests."""
    policy = opened.policy
    if not (policy.rest_after and policy.has_drafter and opened.rule is Rule.COUPLED):
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
        course = self._courses.pop(key, None) or Course(first, first, self._rests_below(*key))
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
