"""Counts what one text cost and what speculation gained, from committed tokens only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Self

from coordinator.text.session_events import Emit
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE, Hit, Verdict

# -- origins ---------------------------------------------------------------------------------------

# The origin of a token says who chose it. The names of sources are defined only here.
#
# draft:SOURCE  drafted by SOURCE (see `SOURCES`) and accepted by the target
# recovered     the target's own token, in the place of a draft that it rejected
# bonus         the target's own token, after a pass in which it accepted every draft
# plain         the target's own token, of a pass without drafts

MODEL, NGRAM, EARLIER, HEADS = "model", "ngram", "earlier", "heads"
# In this order: the drafter's process (a draft model or a head); n-grams copied from this text or a
# reference; copies from earlier texts; heads in the target's process.
SOURCES = {
    MODEL_SOURCE: MODEL,
    NGRAM_SOURCE: NGRAM,
    EARLIER_SOURCE: EARLIER,
    HEADS_SOURCE: HEADS,
}
# The names that people see.
TITLES = {MODEL: "drafter", NGRAM: "n-gram", EARLIER: "earlier text", HEADS: "heads"}
RECOVERED, BONUS, PLAIN = "recovered", "bonus", "plain"


def source_name(source: int) -> str:
    """Return the name of a source number; an unknown number is returned as its digits."""
    return SOURCES.get(source, str(source))


def source_names(sources: tuple[int, ...], num_accepted: int) -> tuple[str, ...]:
    """Return who drafted each accepted token; empty `sources` means the drafter."""
    return tuple(map(source_name, sources or (MODEL_SOURCE,) * num_accepted))


def origins(emit: Emit) -> tuple[str, ...]:
    """Return the origin of every token of one pass, such as "draft:model" or "bonus".

    The pass rejected a draft if and only if `rejected` is not empty. Counts alone would not tell: a
    text that ended at an accepted draft has no token of the target's own, and after a lost verdict
    some of the accepted drafts are known already.
    """
    num_own = len(emit.tokens) - emit.num_accepted
    own = RECOVERED if emit.rejected else BONUS if emit.num_drafted else PLAIN
    names = source_names(emit.sources, emit.num_accepted)
    return (*(f"draft:{name}" for name in names), *(own,) * num_own)


def shown_rejected(emit: Emit) -> tuple[int, ...]:
    """Return the rejected drafts; none if the text ended before the place of the first of them."""
    return emit.rejected if len(emit.tokens) > emit.num_accepted else ()


# -- counts ----------------------------------------------------------------------------------------

# The counts of one text, made from committed tokens only.


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What one target pass brought and cost. `num_accepted` <= `num_tokens`, the new tokens.

    The other counts and times (microseconds) are those of the pass's `Verdict`.

    sources  who drafted each accepted token
    hit_by   who drafted the first token of the pass; empty: that token was not
             drafted, or its draft was not verified (no hit)
    """

    num_tokens: int
    num_accepted: int
    num_drafted: int
    num_rolled_back: int
    num_stale: int
    wait_us: int
    model_us: int
    host_us: int
    drafter_us: int
    cause: str
    hit: str = "nobody"
    plain_us: int = 0
    sources: tuple[str, ...] = ()
    hit_by: str = ""

    @property
    def no_model_us(self) -> int:
        """Return the time of this pass in which neither model computed, as far as is known.

        The drafter may have drafted before the wait as well, so with a drafter that runs ahead the
        true time may be longer.
        """
        return self.host_us + max(0, self.wait_us - self.drafter_us)

    @classmethod
    def of(
        cls, verdict: Verdict, num_tokens: int, num_accepted: int, num_known: int = 0
    ) -> "PassFigures":
        """Return the figures of a verdict; `num_known` of its tokens were known before."""
        names = source_names(verdict.sources, verdict.num_accepted)
        return cls(
            num_tokens=num_tokens,
            num_accepted=num_accepted,
            num_drafted=verdict.num_drafted,
            num_rolled_back=verdict.num_rolled_back,
            num_stale=verdict.num_stale,
            wait_us=verdict.wait_us,
            model_us=verdict.model_us,
            host_us=verdict.host_us,
            drafter_us=verdict.drafter_us,
            cause=verdict.cause.name.lower(),
            hit=verdict.hit.name.lower(),
            plain_us=verdict.plain_us,
            sources=names[num_known:][:num_accepted],
            hit_by=names[0] if verdict.hit is Hit.HIT and names else "",
        )


@dataclass(slots=True)
class SessionCounts:
    """Sums over all passes of one text. Times in microseconds."""

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rolled_back: int = 0
    num_stale: int = 0
    num_reopened: int = 0
    num_diverged: int = 0
    wait_us: int = 0
    model_us: int = 0
    host_us: list[int] = field(default_factory=list)  # per pass
    causes: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)  # passes, by the name of their `Hit`
    drafter_us: int = 0
    # (drafted, accepted) of every pass that had drafts -> number of such passes
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)  # drafts, by source
    hits_by: Counter[str] = field(default_factory=Counter)  # passes that were hits, by source
    passes: list[PassFigures] = field(default_factory=list)  # all passes in order

    def count(self, one: PassFigures) -> None:
        """Add the figures of one pass to the sums."""
        self.num_passes += 1
        self.num_drafted += one.num_drafted
        self.num_accepted += one.num_accepted
        self.num_rolled_back += one.num_rolled_back
        self.num_stale += one.num_stale
        self.wait_us += one.wait_us
        self.model_us += one.model_us
        self.host_us.append(one.host_us)
        self.causes[one.cause] += 1
        self.hits[one.hit] += 1
        self.drafter_us += one.drafter_us
        if one.num_drafted:
            self.acceptance[one.num_drafted, one.num_accepted] += 1
        self.accepted_by.update(one.sources)
        if one.hit_by:
            self.hits_by[one.hit_by] += 1
        self.passes.append(one)

    def until(self, num_tokens: int) -> "SessionCounts":
        """Return the counts of the first `num_tokens` tokens, as if the text had ended there."""
        counts = SessionCounts(num_reopened=self.num_reopened, num_diverged=self.num_diverged)
        left = num_tokens
        for one in self.passes:
            if left <= 0:
                break
            num_accepted = min(one.num_accepted, left)
            counts.count(
                replace(
                    one,
                    num_tokens=min(one.num_tokens, left),
                    num_accepted=num_accepted,
                    sources=one.sources[:num_accepted],
                )
            )
            left -= one.num_tokens
        return counts


# -- simulated -------------------------------------------------------------------------------------

# What hardware was simulated while figures were measured, and how well.

# Limits on the share of the time by which forwards took longer than simulated. Up to MOST_LATE the
# figures do not show it. Up to TOO_LATE the figures are reported with a note on the lost time: any
# host wakes late now and then, a virtual one in one of a hundred forwards by half a millisecond,
# which comes to such a share where forwards take one millisecond. Beyond TOO_LATE other programs
# had the cores, and the figures mean nothing.
MOST_LATE, TOO_LATE = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulated hardware that a text ran on; its figures are not those of this machine.

    target_ms, draft_ms  simulated time of a forward pass; 0: the real time
    ..._per_row   more time for each row (token position) of the pass
    links         the simulated links, as the user wrote them
    link_seed     seed of the links' losses and delays
    num_forwards  forwards of simulated devices since the text was asked for, including those of
                  other texts, as far as heartbeats have reported them
    num_overruns  the number of these that took longer than simulated
    late_ms       the sum of the extra times; no text lost more time than this
    elapsed_ms    the time in which these were counted; 0: they are sums since the start
    """

    target_ms: float
    target_ms_per_row: float
    draft_ms: float
    draft_ms_per_row: float
    links: tuple[str, ...]
    link_seed: int
    num_forwards: int = 0
    num_overruns: int = 0
    late_ms: float = 0.0
    elapsed_ms: float = 0.0

    @property
    def is_void(self) -> bool:
        """True if forwards took so much longer than simulated that the figures mean nothing."""
        return self.late_share > TOO_LATE

    @property
    def words(self) -> str:
        """Return a line for people that says what is simulated."""
        devices = {
            "a target pass": (self.target_ms, self.target_ms_per_row),
            "a draft step": (self.draft_ms, self.draft_ms_per_row),
        }
        parts = [_device(name, *costs) for name, costs in devices.items() if any(costs)]
        parts += [f"link {link}" for link in self.links]
        return "; ".join(parts)

    @property
    def verdict(self) -> str:
        """Return a line for people that says whether the figures can be trusted.

        Empty if no forward was reported, or if it is not known in which time they ran.
        """
        if not self.num_forwards or not self.elapsed_ms:
            return ""
        line = f"{self.num_overruns} of {self.num_forwards} forwards took longer than simulated"
        if self.num_overruns:
            line += f", by {self.late_share:.1%} of the time"
        if self.is_void:
            return line + ": the figures are void"
        return line + (": speeds may be too low by as much" if self.late_share > MOST_LATE else "")

    @property
    def late_share(self) -> float:
        """Return at most which share of the time forwards took longer than simulated."""
        return late_share([(self.late_ms, self.elapsed_ms)])

    def since(self, before: "Simulated", elapsed_ms: float) -> "Simulated":
        """Return the counts since the state `before`, `elapsed_ms` ago."""
        return replace(
            self,
            num_forwards=max(0, self.num_forwards - before.num_forwards),
            num_overruns=max(0, self.num_overruns - before.num_overruns),
            late_ms=max(0.0, self.late_ms - before.late_ms),
            elapsed_ms=elapsed_ms,
        )


def late_share(times: Iterable[tuple[float, float]]) -> float:
    """Return at most which share of the time forwards were late; `times`: (ms late, ms elapsed).

    Late: they took longer than simulated. Each pair counts as late by at most its elapsed time: two
    devices can be late at once, and a device can be late by a forward that began earlier.
    """
    pairs = tuple(times)
    elapsed = sum(elapsed for _, elapsed in pairs)
    return sum(min(pair) for pair in pairs) / elapsed if elapsed else 0.0


def _device(name: str, forward_ms: float, row_ms: float) -> str:
    per_row = f"{row_ms:g} ms a row"
    if not forward_ms:
        return f"{name} {per_row}"
    return f"{name} {forward_ms:g} ms" + (f" + {per_row}" if row_ms else "")


# -- metrics ---------------------------------------------------------------------------------------

MISSES = ("timing", "content", "width")


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """Acceptance figures under the names that vLLM reports and benchmark clients read.

    A step is a target pass with at least one draft; passes without drafts are not counted.

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
        """Return the figures for the numbers of steps, counted by (drafted, accepted)."""
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

    queued_s                time before that, from the start of the call that asked for the text
    tokens_per_pass         1 + accepted / passes: tokens of a target pass, its own included; passes
                            without drafts count too (not in `mean_acceptance_length`)
    acceptance_rate         accepted / verified drafts
    target_busy             share of the time that the target's device was computing
    drafter_busy            the same of the drafter's device, as the drafts that came report it
    target_idle             share in which the target neither computed nor waited for drafts
    speedup                 tokens per second, divided by those of plain decoding as far as known
                            from the time of a pass without drafts; 0: not known
    hit_rate                share of hits: passes whose first token had been drafted and was
                            verified, of all passes for which anybody drafted
    misses                  the other such passes: `timing` (no draft was there in time), `content`
                            (no draft was right), `width` (the right draft was not verified)
    host_ms_per_pass        median time per pass that was neither in the model nor a wait for drafts
    no_model_ms_per_pass    the same, with the part of the wait in which neither model computed
    fallbacks               passes that began without (enough) drafts, by cause
    drafter_lost_at         generated tokens when the drafter was lost (0: before the first token);
                            None: it was not lost
    speculative_decoding    None if the policy has no drafter
    simulated               the simulated hardware; None: the figures are of this machine
    accepted_by_source      accepted drafts, by who drafted them (`origins.SOURCES`)
    hits_by_source          passes that were hits, by who drafted their first token

    `tokens_per_second` is over the whole time. The two parts of that time:

    prompt_tokens_per_second   prompt tokens, divided by the time until the first token came
    writing_s                  time from the first tokens of the text until the last
    writing_tokens_per_second  tokens after the first, divided by writing_s; 0: all came at once
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
        """Return a text's metrics; `emitted` has pairs (time in s, tokens that came then)."""
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
    """Return the speed over that of plain decoding (`plain_us` a token); 0: no time passed."""
    elapsed_s = emitted[-1][0] - emitted[0][0]
    return _written(emitted) * plain_us / 1e6 / elapsed_s if elapsed_s > 0 else 0.0


def _written(emitted: list[tuple[float, int]]) -> int:
    """Return the number of tokens after the first ones (those of the prompt's pass)."""
    return sum(number for _, number in emitted[1:])


def percentiles_ms(emitted: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the median and the 99th percentile of the time between arrivals of tokens, in ms.

    emitted  (time in seconds, number of tokens that came then); the tokens of one pass come at
             once, so there is no time between them
    """
    gaps = [(now - before) * 1e3 for (before, _), (now, _) in pairwise(emitted)]
    if not gaps:
        return 0.0, 0.0
    return median(gaps), sorted(gaps)[int(0.99 * (len(gaps) - 1))]
