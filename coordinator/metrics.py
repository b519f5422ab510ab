"""What one text cost and what speculation did for it, counted from committed tokens only."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from coordinator.session import SessionCounts


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one text. Seconds unless the name says otherwise.

    mean_acceptance_length  1 + accepted / passes: tokens per target pass, the target's own included
    acceptance_rate         accepted / verified drafts
    target_busy             share of the time that the target's device was computing
    host_ms_per_pass        median time per pass that was neither in the model nor a wait for drafts
    fallbacks               passes that went without (enough) drafts, by cause, and a lost drafter
    """

    num_tokens: int
    elapsed_s: float
    tokens_per_second: float
    time_to_first_token_s: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_rate: float
    target_busy: float
    wait_s: float
    host_ms_per_pass: float
    num_rolled_back_tokens: int
    num_stale_tokens: int
    num_reopened: int
    num_diverged: int
    fallbacks: dict[str, int]
    drafter_lost_at: int | None

    @classmethod
    def of(
        cls,
        counts: SessionCounts,
        *,
        started: float,
        emitted: list[tuple[float, int]],
        drafter_lost_at: int | None,
    ) -> "Metrics":
        """From a session's counts and the times at which tokens came (at least one)."""
        elapsed = emitted[-1][0] - started
        num_tokens = sum(number for _, number in emitted)
        p50_ms, p99_ms = percentiles_ms(emitted)
        passes, drafted = counts.num_passes, counts.num_drafted
        return cls(
            num_tokens=num_tokens,
            elapsed_s=elapsed,
            tokens_per_second=num_tokens / elapsed if elapsed > 0 else 0.0,
            time_to_first_token_s=emitted[0][0] - started,
            inter_token_p50_ms=p50_ms,
            inter_token_p99_ms=p99_ms,
            num_target_passes=passes,
            num_draft_tokens=drafted,
            num_accepted_tokens=counts.num_accepted,
            mean_acceptance_length=1 + counts.num_accepted / passes if passes else 0.0,
            acceptance_rate=counts.num_accepted / drafted if drafted else 0.0,
            target_busy=min(1.0, counts.model_us / 1e6 / elapsed) if elapsed > 0 else 0.0,
            wait_s=counts.wait_us / 1e6,
            host_ms_per_pass=median(counts.host_us) / 1e3 if counts.host_us else 0.0,
            num_rolled_back_tokens=counts.num_rolled_back,
            num_stale_tokens=counts.num_stale,
            num_reopened=counts.num_reopened,
            num_diverged=counts.num_diverged,
            fallbacks={
                cause: number
                for cause, number in counts.causes.items()
                if cause in ("late", "quiet")
            },
            drafter_lost_at=drafter_lost_at,
        )


def percentiles_ms(emitted: list[tuple[float, int]]) -> tuple[float, float]:
    """Median and 99th percentile of the time between a token and the one before, in milliseconds.

    emitted  (time in seconds, number of tokens that came then); tokens of one pass come at once
    """
    gaps: list[float] = [0.0] * (emitted[0][1] - 1)
    for (before, _), (now, number) in pairwise(emitted):
        gaps += [(now - before) * 1e3] + [0.0] * (number - 1)
    if not gaps:
        return 0.0, 0.0
    return median(gaps), sorted(gaps)[int(0.99 * (len(gaps) - 1))]
