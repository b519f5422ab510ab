"""Computes where the time of each process goes, from stopwatches that every loop runs anyway."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from coordinator.api.config import (
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics, Simulated
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Role
from proto.stopwatch import Phase

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Share:
    """How one process spent its time while texts were generated.

    unit    what `number` counts: passes or draft steps, those of prefills included
    number  how many there were
    num_uncaptured  how many of them no captured CUDA graph had room for
    ms      milliseconds of one unit, by phase; `wait` is the rest of the time, so the sum is all of
            it. If a device runs the model beside the host, `model` is from the launch to the end of
            the forward, and the other phases are what the host did while no forward ran
    beside_ms  by phase: the part of `model` in which the host did something else than computing the
            model or waiting; empty if it did nothing
    """

    process: str
    unit: str
    number: int
    num_uncaptured: int
    ms: dict[str, float]
    beside_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """The speed and the time shares of some texts.

    no_model_ms  median time per pass in which no model is known to have run
    host_ms      the part of it in which the target's host worked
    num_without_drafter  texts that had no drafter, or lost it on the way
    simulated    the simulated hardware while these texts were generated; None: nothing
    """

    tokens_per_second: float
    num_tokens: int
    num_passes: int
    tokens_per_pass: float
    no_model_ms: float
    host_ms: float
    num_without_drafter: int
    simulated: Simulated | None
    shares: list[Share]


@dataclass(frozen=True, slots=True)
class _Reading:
    """The stopwatches of all processes at one moment: microseconds by phase, and forwards.

    beside_us  host work beside a running device, which is in no phase of `times_us`
    """

    times_us: dict[str, tuple[int, ...]]
    beside_us: dict[str, tuple[int, ...]]
    forwards: dict[str, int]
    uncaptured: dict[str, int]
    simulated: Simulated | None


def profile(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    speculation: SpeculationConfig,
    request: SamplingParams,
) -> Profile:
    """Generate a text for each prompt, after one that is not counted; return what they cost."""
    _write(pair, prompts[0], speculation, request)
    before = _read(pair)
    texts = [_write(pair, prompt, speculation, request) for prompt in prompts]
    after = _read(pair)
    num_passes = sum(text.num_target_passes for text in texts)
    elapsed_s = sum(text.elapsed_s for text in texts)
    num_tokens = sum(text.num_tokens for text in texts)
    return Profile(
        tokens_per_second=num_tokens / elapsed_s,
        num_tokens=num_tokens,
        num_passes=num_passes,
        tokens_per_pass=1 + sum(text.num_accepted_tokens for text in texts) / num_passes,
        no_model_ms=median(text.no_model_ms_per_pass for text in texts),
        host_ms=median(text.host_ms_per_pass for text in texts),
        num_without_drafter=sum(text.drafter_lost_at is not None for text in texts),
        simulated=after.simulated
        and before.simulated
        and after.simulated.since(before.simulated, elapsed_s * 1e3),
        shares=[
            _share(name, before, after, elapsed_s, num_passes)
            for name in before.times_us
            if name in after.times_us
        ],
    )


def _write(
    pair: Pair, prompt: tuple[int, ...], speculation: SpeculationConfig, request: SamplingParams
) -> Metrics:
    """Generate a text and return its metrics."""
    stream, _ = pair.generate(prompt, speculation, request)
    for _ in stream:
        pass
    assert stream.result is not None
    return stream.result.metrics


def _read(pair: Pair) -> _Reading:
    """Read all stopwatches, after a wait of 2.5 heartbeat intervals.

    Nodes report their stopwatches with every heartbeat, so only then is the latest text included.
    """
    time.sleep(2.5 * HEARTBEAT_INTERVAL_S)
    roles = (Role.TARGET, Role.DRAFTER)
    nodes = {role.value: pair.service.registry.of(role) for role in roles}
    # A drafter that failed while it loaded has no times to report.
    there = {name: node for name, node in nodes.items() if node is not None and node.hello}
    times_us = {name: node.times_us for name, node in there.items()}
    times_us[COORDINATOR] = pair.service.watch.totals_us
    return _Reading(
        times_us,
        {name: node.beside_us for name, node in there.items()},
        {name: node.progress for name, node in there.items()},
        {name: node.num_uncaptured for name, node in there.items()},
        pair.simulated(),
    )


def _share(
    name: str, before: _Reading, after: _Reading, elapsed_s: float, num_passes: int
) -> Share:
    """Return how one process spent its time between two readings."""
    number, unit = num_passes, "pass"
    if name in after.forwards:
        number = after.forwards[name] - before.forwards[name]
        unit = "step" if name == Role.DRAFTER.value else "pass"
    number = max(1, number)
    ms = _since(before.times_us[name], after.times_us[name], number)
    beside_ms: dict[str, float] = {}
    if name in after.beside_us:
        beside_ms = _since(before.beside_us[name], after.beside_us[name], number)
        ms["model"] += sum(beside_ms.values())
        del beside_ms["wait"], beside_ms["model"]
    ms["wait"] = 0.0
    ms["wait"] = max(0.0, elapsed_s * 1e3 / number - sum(ms.values()))
    num_uncaptured = after.uncaptured.get(name, 0) - before.uncaptured.get(name, 0)
    return Share(
        name, unit, number, num_uncaptured, ms, beside_ms if any(beside_ms.values()) else {}
    )


def _since(before_us: Sequence[int], after_us: Sequence[int], number: int) -> dict[str, float]:
    """Return the milliseconds by phase between two readings, divided by `number`."""
    pairs = zip(Phase, before_us, after_us, strict=True)
    return {phase.name.lower(): (end - start) / 1e3 / number for phase, start, end in pairs}
