"""What has happened since the coordinator started, counted for whoever asks (pure)."""

from collections import Counter
from dataclasses import dataclass, field

from coordinator.text.running import Result
from proto.errors import ClosedError, SlipstreamError
from proto.messages import Role

MAX_CAUSES = 16
OTHERS = "other causes"
# One node makes several connections, and tries again.
NO_KEY = "a connection without a key that is known here (one node makes several)"
NAME_IN_USE = "a second process under a name that is in use"
OTHER_NAME = "a node that has another node's key"


@dataclass(slots=True)
class Tally:
    """Of one coordinator.

    restarts  processes that were started in the place of one that had ended, by role
    refusals  peers that were refused, by what they were told: at most MAX_CAUSES of them
    """

    num_complete: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    restarts: Counter[Role] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def ended(self, last: Result | SlipstreamError) -> None:
        """A text has ended."""
        if isinstance(last, Result):
            self.num_complete += 1
        elif isinstance(last, ClosedError):
            self.num_cancelled += 1
        else:
            self.num_failed += 1

    def restarted(self, role: Role) -> None:
        """A node is started again."""
        self.restarts[role] += 1

    def refused(self, cause: str, number: int = 1) -> None:
        """A peer was refused."""
        if cause not in self.refusals and len(self.refusals) >= MAX_CAUSES - 1:
            cause = OTHERS
        self.refusals[cause] += number


def ending_of(last: Result | SlipstreamError) -> str:
    """How a text has ended, for the log: never with anything of its content."""
    if isinstance(last, Result):
        metrics = last.metrics
        return (
            f"complete ({last.reason}): {metrics.num_tokens} tokens after a prompt of "
            f"{metrics.num_prompt_tokens}, in {metrics.elapsed_s:.2f} s"
        )
    if last.__cause__ is not None:  # what is said of a mistake may hold anything
        return f"failed by a mistake of the coordinator ({type(last.__cause__).__name__})"
    return f"ended: {last}"
