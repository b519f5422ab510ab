"""Summarizes the rows of an experiment for each arm, and for each category of prompts.

Void rows count for equality of texts, but not for speeds, waiting times and drafts. The intervals
of the ratios are for other prompts of this kind: see `ratios.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from coordinator.text.metrics import MISSES
from lab.experiments.folder import ArmRecord, Header
from lab.experiments.results.ratios import Cell, Ratio, paired
from lab.experiments.rows import Row


class Spread(NamedTuple):
    """A median with its lower and upper quartile."""

    low: float
    median: float
    high: float


class RowsOnHost(NamedTuple):
    """How many rows of an arm were made by a node (role) on a host."""

    role: str
    host: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of the drafts of some texts.

    acceptance_rate  accepted drafts / verified drafts
    by_position      [j]: share of the passes with drafts that accepted more than j drafts
    by_source        number of accepted drafts, by who drafted them
    hits_by_source   number of passes whose first token had been drafted, by who drafted it
    hit_rate         share of the passes for which anybody drafted whose first token had been
                     drafted and was verified: mean over the texts
    misses           shares of the other such passes, by cause; hit_rate + all misses = 1
    """

    acceptance_rate: float
    by_position: tuple[float, ...]
    by_source: dict[str, int]
    hits_by_source: dict[str, int]
    hit_rate: float
    misses: dict[str, float]


class Busy(NamedTuple):
    """Shares of the time: target busy, drafter busy, and target idle (neither busy nor waiting)."""

    target: float
    drafter: float
    idle: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of an arm on the prompts of a category; None where a figure does not exist.

    category           empty: all categories together
    num_prompts        prompts that the arm was run on
    num_texts          number of rows, void ones included
    void_share         share of the rows that are void
    void               why rows are void; empty: none is
    tokens_per_second  spread over the cells, each with all of its texts
    speedup            over the baseline; None: no baseline, or no cell in common with it
    ttft_ms, itl_p50_ms, itl_p99_ms  medians over the texts
    tokens_per_pass    1 + accepted drafts / target passes
    drafts             None: there were none, or a peer that does not report them
    bytes_per_token    bytes of all frames, per committed token
    busy, host_ms_per_pass  medians over the texts
    num_compared, num_equal  texts that must equal those of the baseline, and those that do
    num_drafters_lost  texts that lost their drafter on the way
    num_devices        devices that the arm uses
    over_all_devices   speed-up over plain decoding on as many devices; None: not measured
    hosts              where the nodes ran
    load               CPU cores that other processes used meanwhile: median
    """

    arm: str
    category: str
    num_prompts: int
    num_texts: int
    void_share: float
    void: str
    tokens_per_second: Spread | None
    speedup: Ratio | None
    ttft_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    tokens_per_pass: float | None
    drafts: Drafts | None
    bytes_per_token: float | None
    busy: Busy | None
    host_ms_per_pass: float | None
    num_compared: int
    num_equal: int
    num_drafters_lost: int
    num_devices: int
    over_all_devices: Ratio | None
    hosts: tuple[RowsOnHost, ...]
    load: float

    @property
    def num_different(self) -> int:
        """Return the number of texts that must equal those of the baseline and do not."""
        return self.num_compared - self.num_equal

    @property
    def per_device(self) -> float | None:
        """Return the tokens per second for each device used; None if there is no speed."""
        speed = self.tokens_per_second
        return None if speed is None else speed.median / self.num_devices

    @property
    def over_replicas(self) -> float | None:
        """Return the speed-up over one plain decoding per device; None without a baseline.

        That is: over as many replicas of the target as the arm uses devices, each writing its own
        text.
        """
        return None if self.speedup is None else self.speedup.mean / self.num_devices


def summarize(header: Header, rows: Sequence[Row]) -> list[Summary]:
    """Return the summaries of each measured arm: over all rows, then by category if several."""
    by_arm: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.stage == "main":
            by_arm[row.arm].append(row)
    measured = [row for arm in header.arms for row in by_arm.get(arm.name, ())]
    categories = list(dict.fromkeys(row.category for row in measured if row.category))
    swept_from = {arm.name: arm.swept_from for arm in header.arms}
    stand_ins = {
        arm.swept_from: arm.name for arm in header.arms if arm.swept_from and arm.name in by_arm
    }
    found = []
    for arm in header.arms:
        if arm.name not in by_arm:
            continue
        baseline = arm.baseline
        if baseline not in by_arm:  # the baseline was swept, and is not the fastest of its sweep
            baseline = stand_ins.get(swept_from.get(baseline, ""), baseline)
        for category in ("", *(categories if len(categories) > 1 else ())):
            own, base, on_all = (
                [row for row in by_arm.get(name, ()) if category in ("", row.category)]
                for name in (arm.name, baseline, arm.all_devices)
            )
            if own:
                found.append(_summary(arm, category, own, base, on_all))
    return found


def overall(summaries: Iterable[Summary]) -> list[Summary]:
    """Return the summaries over all categories together, one per arm."""
    return [one for one in summaries if not one.category]


def sound(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are not void; a void text makes all texts of its turn void."""
    void = {(row.key, row.turn) for row in rows if row.void}
    return [row for row in rows if (row.key, row.turn) not in void]


def _summary(
    arm: ArmRecord, category: str, rows: list[Row], base: list[Row], on_all: list[Row]
) -> Summary:
    """Return the summary of one arm on one category.

    base    rows of its baseline
    on_all  rows of plain decoding on as many devices
    """
    good = sound(rows)
    speeds, figures = _speeds(good), [row.figures for row in good if row.figures is not None]
    num_compared, num_equal = _equality(rows, base) if arm.is_same_text else (0, 0)
    causes = Counter(row.void for row in rows if row.void)
    hosts = Counter(place for row in rows for place in row.hosts.items())
    return Summary(
        arm=arm.name,
        category=category,
        num_prompts=len({row.prompt for row in rows}),
        num_texts=len(rows),
        void_share=1 - len(good) / len(rows),
        void="; ".join(cause for cause, _ in causes.most_common(3)),
        tokens_per_second=_spread(list(speeds.values())) if speeds else None,
        speedup=paired(speeds, _speeds(sound(base))),
        ttft_ms=_median(row.ttft_s * 1e3 for row in good),
        itl_p50_ms=_median(row.itl_p50_ms for row in good),
        itl_p99_ms=_median(row.itl_p99_ms for row in good),
        tokens_per_pass=_tokens_per_pass(good, figures),
        drafts=_drafts(good, figures),
        bytes_per_token=_bytes_per_token(good),
        busy=_busy(figures),
        host_ms_per_pass=_median(one["host_ms_per_pass"] for one in figures),
        num_compared=num_compared,
        num_equal=num_equal,
        num_drafters_lost=sum(
            row.figures is not None and row.figures["drafter_lost_at"] is not None for row in rows
        ),
        num_devices=arm.num_devices,
        over_all_devices=paired(speeds, _speeds(sound(on_all))),
        hosts=tuple(RowsOnHost(*place, number) for place, number in sorted(hosts.items())),
        load=median(row.load for row in rows),
    )


def _speeds(rows: Iterable[Row]) -> dict[Cell, float]:
    """Return each cell's tokens per second, all its texts together; without cells of speed 0."""
    return {
        Cell(row.prompt, row.repetition, row.turn): row.tokens_per_second
        for row in rows
        if row.tokens_per_second > 0
    }


def _equality(rows: Iterable[Row], base: Iterable[Row]) -> tuple[int, int]:
    """Return (number of texts that the baseline has too, number of them that are equal)."""
    texts = {(row.prompt, row.repetition, row.turn, row.text): row.tokens for row in base}
    compared = [
        row.tokens == texts[place]
        for row in rows
        if (place := (row.prompt, row.repetition, row.turn, row.text)) in texts
    ]
    return len(compared), sum(compared)


def _tokens_per_pass(rows: Sequence[Row], figures: Sequence[Mapping[str, Any]]) -> float | None:
    """Return 1 + accepted drafts / passes, or the mean accept length of a peer; None if unknown."""
    passes: int = sum(one["num_target_passes"] for one in figures)
    accepted: int = sum(one["num_accepted_tokens"] for one in figures)
    if passes:
        return 1 + accepted / passes
    lengths = [length for row in rows for length in row.accept_lengths]
    return fmean(lengths) if lengths else None


def _drafts(rows: Sequence[Row], figures: Sequence[Mapping[str, Any]]) -> Drafts | None:
    """Return what became of the drafts; None if none was verified."""
    verified = sum(one["num_draft_tokens"] for one in figures)
    if not verified:
        return None
    sources: Counter[str] = Counter()
    for row in rows:
        sources.update(row.accepted_by_source)
    hits: Counter[str] = Counter()
    for one in figures:
        hits.update(one.get("hits_by_source", {}))  # missing in rows of earlier versions
    tried = [one for one in figures if one["hit_rate"] or any(one["misses"].values())]
    return Drafts(
        acceptance_rate=sum(one["num_accepted_tokens"] for one in figures) / verified,
        by_position=_by_position(one["speculative_decoding"] for one in figures),
        by_source=dict(sources.most_common()),
        hits_by_source=dict(hits.most_common()),
        hit_rate=fmean(one["hit_rate"] for one in tried) if tried else 0.0,
        misses={
            why: fmean(_miss_share(one, why) for one in tried) if tried else 0.0 for why in MISSES
        },
    )


def _miss_share(figures: Mapping[str, Any], why: str) -> float:
    """Return the share of passes (for which anybody drafted) that missed for `why`, or 0.0."""
    misses = figures["misses"]
    total = sum(misses.values())
    return float((1 - figures["hit_rate"]) * misses[why] / total) if total else 0.0


def _by_position(texts: Iterable[Mapping[str, Any] | None]) -> tuple[float, ...]:
    """Return acceptance by position of the draft, each text weighted by its passes with drafts.

    A text with fewer drafts counts as having accepted none at the further positions.
    """
    accepted: Counter[int] = Counter()
    steps = 0
    for one in texts:
        if one is None:
            continue
        steps += one["num_spec_steps"]
        for position, share in enumerate(one["acceptance_by_position"]):
            accepted[position] += share * one["num_spec_steps"]
    return tuple(accepted[position] / steps for position in sorted(accepted)) if steps else ()


def _bytes_per_token(rows: Sequence[Row]) -> float | None:
    """Return message bytes per token; None if unknown.

    Texts that were generated at the same time all state the same bytes, which count once.
    """
    num_bytes = {(row.key, row.turn): row.num_bytes for row in rows}
    num_tokens = sum(len(row.tokens) for row in rows)
    total = sum(num_bytes.values())
    return total / num_tokens if total and num_tokens else None


def _busy(figures: Sequence[Mapping[str, Any]]) -> Busy | None:
    """Return the medians over the texts of the busy and idle shares; None without figures."""
    if not figures:
        return None
    names = ("target_busy", "drafter_busy", "target_idle")
    return Busy(*(median(one[name] for one in figures) for name in names))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _spread(values: list[float]) -> Spread:
    return Spread(*quantiles(values, n=4)) if len(values) > 1 else Spread(*values * 3)
