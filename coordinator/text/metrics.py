"""What one text cost and what speculation did for it, counted from committed tokens only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Self

from coordinator.text.session_events import Emit
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE, Hit, Verdict

# -- origins ---------------------------------------------------------------------------------------

# Where each token of a text came from. The only home of the names of sources.
#
# draft:SOURCE  drafted by SOURCE (see `SOURCES`) and accepted by the target
# recovered     the target's own, in the place of a draft that it rejected
# bonus         the target's own, after a pass in which it accepted every draft
# plain         the target's own, of a pass without drafts

MODEL, NGRAM, EARLIER, HEADS = "model", "ngram", "earlier", "heads"
# The drafter's process, a draft model or a head; what was copied from this text or a reference, or
# from earlier texts; heads in the target's process.
SOURCES = {
    MODEL_SOURCE: MODEL,
    NGRAM_SOURCE: NGRAM,
    EARLIER_SOURCE: EARLIER,
    HEADS_SOURCE: HEADS,
}
# For people.
TITLES = {MODEL: "drafter", NGRAM: "n-gram", EARLIER: "earlier text", HEADS: "heads"}
RECOVERED, BONUS, PLAIN = "recovered", "bonus", "plain"


def source_name(source: int) -> str:
    """The name of a source; drafters after the first are called by their numbers."""
    return SOURCES.get(source, str(source))


def source_names(sources: tuple[int, ...], num_accepted: int) -> tuple[str, ...]:
    """Who drafted the accepted tokens of a pass. `sources` is empty if all are the drafter's."""
    return tuple(map(source_name, sources or (MODEL_SOURCE,) * num_accepted))


def origins(emit: Emit) -> tuple[str, ...]:
    """The origin of every token of one pass.

    The pass rejected something if and only if it says what. Counts would not do: a text that ended
    at an accepted draft has no token of the target's own, and after a lost verdict some of the
    accepted drafts are known already.
    """
    num_own = len(emit.tokens) - emit.num_accepted
    own = RECOVERED if emit.rejected else BONUS if emit.num_drafted else PLAIN
    names = source_names(emit.sources, emit.num_accepted)
    return (*(f"draft:{name}" for name in names), *(own,) * num_own)


def shown_rejected(emit: Emit) -> tuple[int, ...]:
    """The rejected drafts that another token replaced; none if the text ended before them."""
    return emit.rejected if len(emit.tokens) > emit.num_accepted else ()


# -- counts ----------------------------------------------------------------------------------------

# What happened to one text, counted from committed tokens only.


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What one target pass brought and cost. `num_accepted` <= `num_tokens` that were new.

    sources  who drafted the accepted ones
    hit_by   who drafted the first token of the pass; empty: it was no hit
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
        """Of the time of this pass, what neither model was at work for, as far as is known.

        The drafter may have drafted before the wait as well; so with one that runs ahead it is the
        least that it can have been.
        """
        return self.host_us + max(0, self.wait_us - self.drafter_us)

    @classmethod
    def of(
        cls, verdict: Verdict, num_tokens: int, num_accepted: int, num_known: int = 0
    ) -> "PassFigures":
        """Of a verdict of which so many tokens were new, behind so many that were known."""
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
    """Sums over the passes."""

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
    hits: Counter[str] = field(default_factory=Counter)  # by `Hit`
    drafter_us: int = 0
    # (drafted, accepted) of every pass that had drafts -> number of such passes
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)  # drafts, by source
    hits_by: Counter[str] = field(default_factory=Counter)  # passes, likewise
    passes: list[PassFigures] = field(default_factory=list)  # in order: what the sums are of

    def count(self, one: PassFigures) -> None:
        """Add a pass."""
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
        """The counts of the first tokens: what came after them is no part of the text."""
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

# What of the hardware was simulated while something was measured, and how well.

# By what share of the time forwards may have taken longer than they should have. Up to the first
# nobody could see it in the figures. Up to the second they are told with what may be missing: any
# host wakes late now and then, a virtual one once in a hundred forwards by half a millisecond, and
# where forwards take one millisecond that comes to so much. Where more is lost others had the
# cores, and the figures mean nothing.
MOST_LATE, TOO_LATE = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Simulated:
    """A rehearsal of other hardware: figures that come with it are not of this machine.

    target_ms, draft_ms  what a forward takes; 0: as long as it takes here
    ..._per_row   and so much more for each of its rows
    links         as they were asked for
    link_seed     of what they lose and how late each message is
    num_forwards  of simulated devices since the text was asked for, those of other texts included,
                  as far as heartbeats have told
    num_overruns  of them, those that took longer than they should have
    late_ms       by so much, together: no text can have taken longer than by that
    elapsed_ms    in this time; 0: these are sums since the start, and no share of any time
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
        """Whether forwards took so much longer than they should have that the text shows it."""
        return self.late_share > TOO_LATE

    @property
    def words(self) -> str:
        """What is simulated, in a line for people."""
        devices = {
            "a target pass": (self.target_ms, self.target_ms_per_row),
            "a draft step": (self.draft_ms, self.draft_ms_per_row),
        }
        parts = [_device(name, *costs) for name, costs in devices.items() if any(costs)]
        parts += [f"link {link}" for link in self.links]
        return "; ".join(parts)

    @property
    def verdict(self) -> str:
        """Whether the figures can be believed, in a line for people.

        Empty if nothing was told, or if it is not known in which time that was.
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
        """By what share of the time forwards took longer than they should have, at most."""
        return late_share([(self.late_ms, self.elapsed_ms)])

    def since(self, before: "Simulated", elapsed_ms: float) -> "Simulated":
        """What has been counted since then, in so much time."""
        return replace(
            self,
            num_forwards=max(0, self.num_forwards - before.num_forwards),
            num_overruns=max(0, self.num_overruns - before.num_overruns),
            late_ms=max(0.0, self.late_ms - before.late_ms),
            elapsed_ms=elapsed_ms,
        )


def late_share(times: Iterable[tuple[float, float]]) -> float:
    """By what share of the time forwards took longer than they should have, at most.

    times  pairs: how late they were, and in what time. No more than all of a time is late: two
           devices can be late at once, and one can be late by what it began before
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
