"""A text that was measured, shown again at a speed that one can follow (pure).

Everything is slowed down by one factor, that of the target alone: what was faster stays as much
faster as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from coordinator.api.request import Step
from coordinator.text.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Take:
    """One measured text.

    steps    with the time at which each came: seconds since the text was asked for
    metrics  of the whole text
    """

    steps: tuple[tuple[float, Step], ...]
    metrics: Metrics

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of the text's tokens."""
        steps = (step for _, step in self.steps)
        return tuple(token for step in steps for token in step.part.outputs[0].token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole time, the prompt's included."""
        return self.metrics.tokens_per_second


def middle(takes: Sequence[Take]) -> Take:
    """The one of median speed; of an even number the slower of the two in the middle."""
    speed = median_low(take.tokens_per_second for take in takes)
    return next(take for take in takes if take.tokens_per_second == speed)


def slowdown(plain: Take, pace_s: float) -> float:
    """How many times slower a pass of the target alone is shown than it was, at `pace_s` seconds.

    0: not slowed, but as fast as it can be written.
    """
    if pace_s == 0:
        return 0.0
    return max(1.0, pace_s * plain.tokens_per_second)


def scenes(take: Take, factor: float, show: Callable[[Step], str]) -> Iterator[tuple[float, str]]:
    """When something is shown, in seconds after the first of it, and what."""
    first = take.steps[0][0]
    for at, step in take.steps:
        yield (at - first) * factor, show(step)


def first_difference(takes: Sequence[Take]) -> int | None:
    """The index of the first token in which two of them differ; None: they do not."""
    texts = [take.token_ids for take in takes]
    for index, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return index
    lengths = {len(text) for text in texts}
    return min(lengths) if len(lengths) > 1 else None


def verdict(plain: Take, drafted: Take, difference: int | None) -> str:
    """The last line."""
    speed = f"{drafted.tokens_per_second / plain.tokens_per_second:.1f} x plain"
    if difference is None:
        return f"{speed}, text identical"
    return f"{speed}, but the text DIFFERS from token {difference + 1} on"
