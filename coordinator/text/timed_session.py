"""A text that is generated or waits for its turn: its session, and when its tokens came (pure)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.text.metrics import Metrics
from coordinator.text.session import Session
from proto.codec import encode
from proto.errors import ConfigurationError, LocalProtocolError, NodeError, shown
from proto.messages import FinishReason, Role

# Errors in the state machine or the messages of one text that end only this text, not the others.
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
    """How and why a text ended, with its metrics.

    until  returns the metrics of the first n tokens, for a reader who ended the text there
    """

    reason: FinishReason
    metrics: Metrics
    until: Callable[[int], Metrics]


@dataclass(slots=True)
class TimedSession:
    """A session, with the times at which its tokens came. Monotonic seconds."""

    machine: Session
    submitted: float
    started: float = 0.0  # when the nodes were told of the text
    emitted: list[tuple[float, int]] = field(default_factory=list)  # (time, number of tokens)

    def result(self, reason: FinishReason) -> Result:
        """Return the Result of a text that has ended for this reason."""
        return Result(reason, self._metrics(), self._metrics)

    def broken_off(self, error: Exception) -> NodeError:
        """Return the NodeError for the reader of a text that one of MISHAPS has ended."""
        failure = NodeError(
            f"the text ended after {self.machine.num_generated} tokens by a mistake of the "
            f"coordinator, {type(error).__name__}: {shown(str(error))}; ask for it again"
        )
        failure.__cause__ = error
        return failure

    def _metrics(self, num_tokens: int | None = None) -> Metrics:
        """Return the metrics of the whole text, or of its first `num_tokens` tokens."""
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
    """Raise ConfigurationError if the text cannot be encoded as an Open message."""
    try:
        encode(machine.opening(Role.TARGET))
    except LocalProtocolError as error:
        raise ConfigurationError(f"the nodes cannot be told of this text: {error}") from error


def _first(emitted: list[tuple[float, int]], num_tokens: int) -> list[tuple[float, int]]:
    """Return (time, number of tokens) of the first `num_tokens` tokens only."""
    times: list[tuple[float, int]] = []
    for time_s, number in emitted:
        if num_tokens <= 0:
            break
        times.append((time_s, min(number, num_tokens)))
        num_tokens -= number
    return times
