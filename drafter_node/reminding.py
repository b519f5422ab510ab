"""When drafts that no verdict has answered are said again (pure).

A lost draft is usually missed by the verdicts that follow, and sent again then. But a target that
waits for that very draft says nothing until its own limit, which is long where answers have been
slow. So a drafter that has said all it can, and hears nothing for much longer than an answer has
taken before, says it again by itself: the target knows what it has already, so a reminder that was
not needed costs one message. Each further one waits twice as long.
"""

from node.costs import Replies
from node.price import overdue_s

WAIT_S_MIN, WAIT_S_FIRST, WAIT_S_MAX = 0.02, 0.5, 2.0


class Answers:
    """How long answers have taken, over all texts."""

    def __init__(self) -> None:
        self._replies = Replies()

    def add(self, seconds: float) -> None:
        """One more has come."""
        self._replies.add(seconds)

    @property
    def limit_s(self) -> float:
        """Much longer than one takes."""
        if not self._replies.num:
            return WAIT_S_FIRST
        # The quickest is what link and pass take: many things make an answer late.
        limit_s = overdue_s(self._replies.quickest_s, self._replies.slow_s)
        return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))


class Reminder:
    """How long the newest drafts of one life of a text have been unanswered."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._since: float | None = None  # when the first draft after a verdict was sent
        self._due_at = 0.0  # means something while _since does
        self._wait_s = 0.0  # of the next reminder, likewise

    def said(self, now: float) -> None:
        """A draft is sent."""
        if self._since is None:
            self._since = now
            self._wait_s = self._answers.limit_s
            self._due_at = now + self._wait_s

    def answered(self, now: float) -> None:
        """A verdict has come."""
        if self._since is not None:
            self._answers.add(now - self._since)
            self._since = None

    def due_at(self) -> float | None:
        """When to say it again; None: nothing is unanswered."""
        return None if self._since is None else self._due_at

    def reminded(self, now: float) -> None:
        """It was said again."""
        self._wait_s = min(WAIT_S_MAX, 2 * self._wait_s)
        self._due_at = now + self._wait_s
