"""A text that is being written, or waits for it: its session, and what it cost (pure)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.text.metrics import Metrics
from coordinator.text.session import Session
from proto.codec import encode
from proto.errors import ConfigurationError, LocalProtocolError, NodeError, shown
from proto.messages import FinishReason, Role

# What goes wrong in the machine of one text, or in what it wants to say; the others are well.
MISHAPS = (
    LocalProtocolError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a text.

    until  the metrics of its first so many tokens, if the reader ended it there
    """

    reason: FinishReason
    metrics: Metrics
    until: Callable[[int], Metrics]


@dataclass(slots=True)
class Running:
    """Times are seconds of a monotonic clock."""

    machine: Session
    submitted: float
    started: float = 0.0  # when the nodes were told
    emitted: list[tuple[float, int]] = field(default_factory=list)  # (time, number of tokens)

    def result(self, reason: FinishReason) -> Result:
        """The end of the text."""
        return Result(reason, self._metrics(), self._metrics)

    def broken_off(self, error: Exception) -> NodeError:
        """For the reader, where one of MISHAPS ends the text."""
        failure = NodeError(
            f"the text ended after {self.machine.num_generated} tokens by a mistake of the "
            f"coordinator, {type(error).__name__}: {shown(str(error))}; ask for it again"
        )
        failure.__cause__ = error
        return failure

    def _metrics(self, num_tokens: int | None = None) -> Metrics:
        """Of the text that has ended, or of its first so many tokens."""
        counts, emitted = self.machine.counts, self.emitted
        if num_tokens is not None:
            counts, emitted = counts.until(num_tokens), _first(emitted, num_tokens)
        return Metrics.of(
            counts,
            started=self.started,
            emitted=emitted,
            drafter_lost_at=self.machine.drafter_lost_at,
            queued_s=self.started - self.submitted,
            num_spec_tokens=self.machine.policy.num_speculative_tokens,
            num_prompt_tokens=self.machine.num_prompt,
        )


def check_opening(machine: Session) -> None:
    """Raises ConfigurationError if a text cannot be put into a message."""
    try:
        encode(machine.opening(Role.TARGET))
    except LocalProtocolError as error:
        raise ConfigurationError(f"the nodes cannot be told of this text: {error}") from error


def _first(emitted: list[tuple[float, int]], num_tokens: int) -> list[tuple[float, int]]:
    """The times at which the first tokens came."""
    times: list[tuple[float, int]] = []
    for time_s, number in emitted:
        if num_tokens <= 0:
            break
        times.append((time_s, min(number, num_tokens)))
        num_tokens -= number
    return times
