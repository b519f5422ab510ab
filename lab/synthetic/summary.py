"""Summarizes the texts of a synthetic pair for each policy (pure)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from statistics import median
from typing import Any

from coordinator.text.metrics import MOST_LATE, TOO_LATE
from lab.synthetic.host_time import Launch

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Made:
    """The measurements of one generated text.

    speed         tokens in the time of one pass, from the text's first token on
    num_accepted  accepted drafts
    late_share    at most this share of the time was lost by waking late for simulated forwards
    cpu_s         CPU seconds of each process during the text
    launches      launches of each node, as its `Watch` noted them
    """

    policy: str
    num_tokens: int
    elapsed_s: float
    speed: float
    num_passes: int
    num_accepted: int
    late_share: float
    cpu_s: Mapping[str, float]
    launches: Mapping[str, Sequence[Launch]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 90th percentile of some numbers."""

    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of these values, of which there must be at least one."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))])


@dataclass(frozen=True, slots=True)
class Summary:
    """The measurements of a policy over several texts.

    speed          tokens in the time of one pass, median over texts
    low, high      95 % interval of that median; with fewer than six texts, their extremes
    late_share     at most this share of the time was lost by waking late for simulated forwards
    undisturbed    the median speed if that time had not been lost
    num_late       texts that lost more than `MOST_LATE`
    speed_in_time  the median speed of all other texts; None: there are none
    is_void        the host was too late for a valid figure: by more than `TOO_LATE`, or by more
                   than `MOST_LATE` while `undisturbed` lies outside the interval
    cores          CPU cores that each process has used (1.0: all of one core)
    critical_us    critical host time of a launch of each node, microseconds
    cpu_us         CPU time of each node for each of its forwards, microseconds
    """

    policy: str
    num_texts: int
    speed: float
    low: float
    high: float
    tokens_per_pass: float
    late_share: float
    undisturbed: float
    num_late: int
    speed_in_time: float | None
    is_void: bool
    cores: Mapping[str, float]
    critical_us: Mapping[str, Spread]
    cpu_us: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a dictionary for JSON."""
        return asdict(self)


def summarised(texts: Sequence[Made]) -> list[Summary]:
    """Return a summary of each policy, in the order in which the policies first appear."""
    by_policy: dict[str, list[Made]] = defaultdict(list)
    for text in texts:
        by_policy[text.policy].append(text)
    return [_summary(policy, made) for policy, made in by_policy.items()]


def _summary(policy: str, made: Sequence[Made]) -> Summary:
    """Return the summary of the texts of one policy."""
    elapsed_s = sum(one.elapsed_s for one in made)
    processes, nodes = made[0].cpu_s, made[0].launches
    spent = {name: sum(one.cpu_s[name] for one in made) for name in processes}
    forwards = {role: [step for one in made for step in one.launches[role]] for role in nodes}
    low, high = median_interval([one.speed for one in made])
    late_share = sum(one.late_share * one.elapsed_s for one in made) / elapsed_s
    undisturbed = median(one.speed / max(1 - one.late_share, 1e-9) for one in made)
    in_time = [one.speed for one in made if one.late_share <= MOST_LATE]
    return Summary(
        policy=policy,
        num_texts=len(made),
        speed=median(one.speed for one in made),
        low=low,
        high=high,
        tokens_per_pass=median(1 + one.num_accepted / one.num_passes for one in made),
        late_share=late_share,
        undisturbed=undisturbed,
        num_late=len(made) - len(in_time),
        speed_in_time=median(in_time) if in_time else None,
        is_void=late_share > TOO_LATE
        or (late_share > MOST_LATE and not low <= undisturbed <= high),
        cores={name: seconds / elapsed_s for name, seconds in spent.items()},
        critical_us={
            role: Spread.of([1e6 * step.critical_s for step in steps])
            for role, steps in forwards.items()
        },
        cpu_us={
            role: 1e6 * spent[role] / sum(step.num_forwards for step in steps)
            for role, steps in forwards.items()
        },
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, for any distribution (sign test on ordered values).

    With fewer than six values that level cannot be reached, and their extremes are returned.
    """
    ordered, n = sorted(values), len(values)
    cut, below = 0, 1 / 2**n  # the chance that the median lies below the value at `cut`
    while cut + 1 < n / 2 and 2 * (below + comb(n, cut + 1) / 2**n) <= 1 - LEVEL:
        cut += 1
        below += comb(n, cut) / 2**n
    return ordered[cut], ordered[n - 1 - cut]


def table(summaries: Sequence[Summary]) -> list[str]:
    """Return the summaries as lines for a terminal."""
    lines = [
        "tokens in the time of one pass: median and interval; if no time had been lost to late "
        "wakes; without the texts that lost more than 1 %"
    ]
    for one in summaries:
        in_time = "-" if one.speed_in_time is None else f"{one.speed_in_time:.2f}"
        lines.append(
            f"  {one.policy:20} {one.speed:5.2f} ({one.low:.2f}-{one.high:.2f})  "
            f"{one.tokens_per_pass:.2f} tokens a pass; {one.late_share:.1%} lost: "
            f"{one.undisturbed:.2f}; without {one.num_late} of {one.num_texts}: {in_time}"
            f"{'; VOID' if one.is_void else ''}"
        )
    lines.append("host: share of a core; critical time of a launch, median and p90; CPU a forward")
    for one in summaries:
        cores = ", ".join(f"{name} {share:.0%}" for name, share in one.cores.items())
        lines.append(f"  {one.policy:20} {cores}")
        lines += [
            f"  {'':20} {role}: critical {spread.median:.0f} and {spread.p90:.0f} us, "
            f"CPU {one.cpu_us[role]:.0f} us"
            for role, spread in one.critical_us.items()
        ]
    return lines
