"""What happened to one text, counted from committed tokens only (pure)."""

from collections import Counter
from dataclasses import dataclass, field, replace

from coordinator.text.origins import source_names
from proto.messages import Hit, Verdict


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
