"""What one text cost and what speculation did for it, counted from committed tokens only."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Self

from coordinator.text.counts import SessionCounts
from coordinator.text.simulated import Simulated

MISSES = ("timing", "content", "width")


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """Acceptance in the names that vLLM reports and benchmark clients read.

    A step is a target pass with at least one draft; passes without drafts are not in these figures.

    mean_acceptance_length  1 + accepted / steps: tokens of a step, the target's own included
    acceptance_histogram    [j]: steps that accepted exactly j drafts, j = 0..num_spec_tokens
    acceptance_histogram_by_draft_length  [k][j]: steps that accepted j of k drafts
    acceptance_by_position  [j]: share of the steps that accepted more than j drafts
    num_spec_tokens         most drafts in a step (the policy's K)
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_by_position: list[float]

    @classmethod
    def of(cls, acceptance: Counter[tuple[int, int]], num_spec_tokens: int) -> Self:
        """From the number of steps for each (drafted, accepted)."""
        by_length: dict[int, list[int]] = {}
        histogram = [0] * (num_spec_tokens + 1)
        for (drafted, accepted), number in sorted(acceptance.items()):
            by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += number
            histogram[accepted] += number
        steps = sum(histogram)
        drafts = sum(drafted * number for (drafted, _), number in acceptance.items())
        accepts = sum(accepted * number for accepted, number in enumerate(histogram))
        return cls(
            mean_acceptance_length=1 + accepts / steps if steps else 1.0,
            draft_acceptance_rate=accepts / drafts if drafts else 0.0,
            acceptance_histogram=histogram,
            acceptance_histogram_by_draft_length=by_length,
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepts,
            num_draft_tokens=drafts,
            num_spec_tokens=num_spec_tokens,
            acceptance_by_position=[
                sum(histogram[position + 1 :]) / steps if steps else 0.0
                for position in range(num_spec_tokens)
            ],
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one text, from when the nodes began with it. Seconds unless the name says other.

    queued_s                before that, from the start of the call that asked for it
    tokens_per_pass         1 + accepted / passes: of a target pass, its own included; the passes
                            without drafts count too (not in `mean_acceptance_length`)
    acceptance_rate         accepted / verified drafts
    target_busy             share of the time that the target's device was computing
    drafter_busy            the same of the drafter's, by the drafts that came
    target_idle             share in which the target neither computed nor waited for drafts
    speedup                 tokens per second in those of plain decoding, by what a pass without
                            drafts takes; 0: not known
    hit_rate                share of the passes for which anybody drafted whose first token had been
                            drafted and was verified
    misses                  the other such passes: `timing` (nothing was there yet), `content`
                            (nothing of it was right), `width` (the right one was not verified)
    host_ms_per_pass        median time per pass that was neither in the model nor a wait for drafts
    no_model_ms_per_pass    the same and what of the wait neither model was at work for
    fallbacks               passes that went without (enough) drafts, by cause
    drafter_lost_at         tokens that were there when the drafter went away; 0: it was away
    speculative_decoding    None if the policy has no drafter
    simulated               of the hardware; None: nothing, the figures are of this machine
    accepted_by_source      accepted drafts, by who drafted them (`origins.SOURCES`)
    hits_by_source          passes whose first token had been drafted, likewise

    `tokens_per_second` is over the whole time. Apart:

    prompt_tokens_per_second   the prompt's tokens in the time until the first of the text came
    writing_s                  from then on, until the last came
    writing_tokens_per_second  the tokens that came meanwhile in that time; 0: all came at once
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
    tokens_per_pass: float
    acceptance_rate: float
    target_busy: float
    drafter_busy: float
    target_idle: float
    speedup: float
    hit_rate: float
    misses: dict[str, int]
    wait_s: float
    host_ms_per_pass: float
    no_model_ms_per_pass: float
    num_rolled_back_tokens: int
    num_stale_tokens: int
    num_reopened: int
    num_diverged: int
    fallbacks: dict[str, int]
    drafter_lost_at: int | None
    queued_s: float
    speculative_decoding: SpeculativeDecoding | None
    simulated: Simulated | None = None
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    hits_by_source: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    prompt_tokens_per_second: float = 0.0
    writing_s: float = 0.0
    writing_tokens_per_second: float = 0.0

    @classmethod
    def of(
        cls,
        counts: SessionCounts,
        *,
        started: float,
        emitted: list[tuple[float, int]],
        drafter_lost_at: int | None,
        queued_s: float,
        num_spec_tokens: int,
        num_prompt_tokens: int = 0,
    ) -> "Metrics":
        """From a session's counts and the times at which tokens came (at least one)."""
        elapsed = emitted[-1][0] - started
        reading_s = emitted[0][0] - started
        writing_s = emitted[-1][0] - emitted[0][0]
        num_tokens = sum(number for _, number in emitted)
        p50_ms, p99_ms = percentiles_ms(emitted)
        passes, drafted = counts.num_passes, counts.num_drafted
        misses = {why: counts.hits[why] for why in MISSES}
        num_tried = counts.hits["hit"] + sum(misses.values())
        plain_us = [one.plain_us for one in counts.passes if one.plain_us]
        used_s = (counts.model_us + counts.wait_us) / 1e6
        return cls(
            num_tokens=num_tokens,
            elapsed_s=elapsed,
            tokens_per_second=num_tokens / elapsed if elapsed > 0 else 0.0,
            time_to_first_token_s=reading_s,
            inter_token_p50_ms=p50_ms,
            inter_token_p99_ms=p99_ms,
            num_target_passes=passes,
            num_draft_tokens=drafted,
            num_accepted_tokens=counts.num_accepted,
            tokens_per_pass=1 + counts.num_accepted / passes if passes else 0.0,
            acceptance_rate=counts.num_accepted / drafted if drafted else 0.0,
            target_busy=min(1.0, counts.model_us / 1e6 / elapsed) if elapsed > 0 else 0.0,
            drafter_busy=min(1.0, counts.drafter_us / 1e6 / elapsed) if elapsed > 0 else 0.0,
            target_idle=max(0.0, 1.0 - used_s / elapsed) if elapsed > 0 else 0.0,
            speedup=_speedup(emitted, median(plain_us)) if plain_us else 0.0,
            hit_rate=counts.hits["hit"] / num_tried if num_tried else 0.0,
            misses=misses,
            wait_s=counts.wait_us / 1e6,
            host_ms_per_pass=median(counts.host_us) / 1e3 if counts.host_us else 0.0,
            no_model_ms_per_pass=(
                median(one.no_model_us for one in counts.passes) / 1e3 if counts.passes else 0.0
            ),
            num_rolled_back_tokens=counts.num_rolled_back,
            num_stale_tokens=counts.num_stale,
            num_reopened=counts.num_reopened,
            num_diverged=counts.num_diverged,
            fallbacks={
                cause: number
                for cause, number in counts.causes.items()
                if cause in ("late", "quiet", "resting")
            },
            drafter_lost_at=drafter_lost_at,
            queued_s=queued_s,
            speculative_decoding=(
                SpeculativeDecoding.of(counts.acceptance, num_spec_tokens)
                if num_spec_tokens
                else None
            ),
            accepted_by_source=dict(counts.accepted_by),
            hits_by_source=dict(counts.hits_by),
            num_prompt_tokens=num_prompt_tokens,
            prompt_tokens_per_second=num_prompt_tokens / reading_s if reading_s > 0 else 0.0,
            writing_s=writing_s,
            writing_tokens_per_second=_written(emitted) / writing_s if writing_s > 0 else 0.0,
        )


def _speedup(emitted: list[tuple[float, int]], plain_us: float) -> float:
    """Tokens per second after the first, in those of plain decoding."""
    elapsed_s = emitted[-1][0] - emitted[0][0]
    return _written(emitted) * plain_us / 1e6 / elapsed_s if elapsed_s > 0 else 0.0


def _written(emitted: list[tuple[float, int]]) -> int:
    """Tokens after those that came first, with the prompt's pass."""
    return sum(number for _, number in emitted[1:])


def percentiles_ms(emitted: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Median and 99th percentile of what a reader waits for more after a token; milliseconds.

    emitted  (time in seconds, number of tokens that came then); tokens of one pass come at once,
             and there is nothing to wait for between them
    """
    gaps = [(now - before) * 1e3 for (before, _), (now, _) in pairwise(emitted)]
    if not gaps:
        return 0.0, 0.0
    return median(gaps), sorted(gaps)[int(0.99 * (len(gaps) - 1))]
