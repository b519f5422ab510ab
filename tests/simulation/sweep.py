"""Many seeds over several processes: which of them fail, and what they were about."""
# ruff: noqa: T201

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Pool

from tests.simulation.run import SimulationFailure, simulate
from tests.simulation.scenario import Faults, Scenario, draw

CHUNK = 8  # seeds that a process takes at once
REPORT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """As the parameters of `simulate`."""

    policy: str | None = None
    oracle: bool = False
    plain: bool = False
    alone: bool = False
    chain: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed has come to.

    strata  what it was about: a value for each of several questions
    stats   of its judge; of one that failed, nothing
    """

    seed: int
    strata: tuple[tuple[str, str], ...]
    stats: Counter[str]
    failure: str | None


def outcomes(seeds: range, options: Options, jobs: int) -> Iterator[Outcome]:
    """Run the seeds; in the order in which they are done."""
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(partial(outcome_of, options=options), seeds, CHUNK)


def outcome_of(seed: int, options: Options) -> Outcome:
    """Run one of them."""
    how = asdict(options)
    strata = tuple(strata_of(draw(seed, **how)).items())
    try:
        return Outcome(seed, strata, simulate(seed, **how), None)
    except SimulationFailure as failure:
        return Outcome(seed, strata, Counter(), str(failure).partition("\n")[0])


def tell(outcomes: Iterable[Outcome]) -> int:
    """Print every failure at once, and the totals at the end; returns how many seeds failed."""
    started, num_seeds = time.perf_counter(), 0
    strata: Counter[tuple[str, str]] = Counter()
    stats: Counter[str] = Counter()
    failed: list[int] = []
    for outcome in outcomes:
        num_seeds += 1
        strata.update(outcome.strata)
        stats += outcome.stats
        if outcome.failure is not None:
            failed.append(outcome.seed)
            print(f"seed {outcome.seed} fails: {outcome.failure}", flush=True)
        if num_seeds % REPORT_EVERY == 0:
            print(f"{num_seeds} seeds", file=sys.stderr, flush=True)
    for question in dict.fromkeys(question for question, _ in strata):
        print(f"{question:9}", _counts({of[1]: n for of, n in strata.items() if of[0] == question}))
    print(f"{'judged':9}", _counts(stats))
    took_s = time.perf_counter() - started
    if not failed:
        print(f"ok: {num_seeds} seeds in {took_s:.0f} s, all hold")
        return 0
    print("seeds that fail:", *sorted(failed))
    print(
        f"FAILED: {len(failed)} of {num_seeds} seeds in {took_s:.0f} s; "
        f"python -m tests.simulation {min(failed)} tells the story of the first"
    )
    return len(failed)


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))


def strata_of(scenario: Scenario) -> dict[str, str]:
    """What a scenario is about, in a word for each question."""
    return {
        "policy": scenario.policy.name,
        "rule": scenario.rule.name.lower(),
        "sources": _sources(scenario),
        "targets": _targets(scenario),
        "host": "dies" if scenario.faults.deaths else "lives",
        "texts": str(len(scenario.texts)),
        "at once": str(scenario.at_once),
        "weather": _weather(scenario.faults),
    }


def _sources(scenario: Scenario) -> str:
    """Who drafts."""
    drafters = "two drafters" if scenario.num_drafters > 1 else "a drafter"
    if not scenario.policy.has_drafter:
        return "nobody" if scenario.lookup is None else "the target"
    return drafters if scenario.lookup is None else f"{drafters} and the target"


def _targets(scenario: Scenario) -> str:
    """How many targets there are, and what happens to them."""
    if scenario.num_targets == 1:
        return "one"
    return "two, one cut off" if scenario.faults.cuts else "two"


def _weather(faults: Faults) -> str:
    if faults.crashes:
        return "storm"
    if faults.drop:
        return "loss"
    return "disorder" if faults.reorder else "calm"
