"""Experiments that nobody ran: rows of which it is known what they have to say."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from coordinator.text.metrics import Metrics, PassFigures, SessionCounts
from lab.experiments.folder import ArmRecord, Header, RunRecord
from lab.experiments.rows import Row

TOKENS = 24
RUN = RunRecord("2026-01-01T00:00:00Z", "2 cores of a machine", {"torch": "2.13.0"}, "abcdef0", 0.1)


@dataclass(frozen=True, slots=True)
class Truth:
    """What an arm is: its speed in plain decoding's, and how often each of its drafts is right."""

    speed: float
    acceptance: float = 0.0
    k: int = 0


def header(arms: Sequence[ArmRecord], **changes: Any) -> Header:
    """Of an experiment with these arms."""
    made = Header(
        title="Policies on a made-up machine",
        question="Which policy is fastest?",
        digest="0123",
        x="",
        prompts="spec_bench.jsonl",
        num_prompts=8,
        repetitions=2,
        max_tokens=TOKENS,
        arms=tuple(arms),
        runs=(RUN,),
    )
    return dataclasses.replace(made, **changes)


def arm(name: str, baseline: str = "ar", **settings: Any) -> ArmRecord:
    """Of a policy that is the first word of its name, if nothing else is said."""
    named = {"policy": name.split()[0], **settings}
    return ArmRecord(name, named, baseline, is_same_text=bool(baseline))


def row(name: str, prompt: int = 0, repetition: int = 0, **changes: Any) -> Row:
    """Of a text of three tokens in a tenth of a second."""
    made = Row(
        arm=name,
        prompt=prompt,
        repetition=repetition,
        stage="main",
        num_rows=1,
        number=0,
        turn=0,
        text=0,
        prompt_id=str(prompt),
        category="",
        at="2026-01-01T00:00:00Z",
        seed=1000 + prompt,
        num_prompt_tokens=8,
        tokens=(5, 6, 7),
        num_cell_tokens=3,
        wall_s=0.1,
        tokens_per_second=30.0,
        ttft_s=0.02,
        itl_p50_ms=25.0,
        itl_p99_ms=40.0,
        accept_lengths=(1, 1, 1),
    )
    return dataclasses.replace(made, **changes)


def figures(
    draw: random.Random, truth: Truth, seconds: float, num_tokens: int = TOKENS
) -> tuple[Metrics, tuple[int, ...]]:
    """Of a text, and the tokens of each of its passes."""
    counts, lengths = SessionCounts(num_passes=0), []
    pass_us = round(seconds * 1e6 * truth.speed / num_tokens)
    while sum(lengths) < num_tokens:
        accepted = 0
        while accepted < truth.k and draw.random() < truth.acceptance:
            accepted += 1
        accepted = min(accepted, num_tokens - sum(lengths) - 1)
        lengths.append(accepted + 1)
        miss = draw.choice(("timing", "content", "content", "width"))
        hit = "nobody" if not truth.k else "hit" if accepted else miss
        one = PassFigures(
            accepted + 1,
            accepted,
            truth.k,
            truth.k - accepted,
            0,
            wait_us=pass_us // 5,
            model_us=pass_us // 2,
            host_us=pass_us // 10,
            drafter_us=pass_us // 3 if truth.k else 0,
            cause="enough",
            hit=hit,
        )
        counts.count(one)
    emitted, step = [], seconds / len(lengths)
    for number, length in enumerate(lengths, 1):
        emitted.append((number * step, length))
    metrics = Metrics.of(
        counts,
        started=0.0,
        emitted=emitted,
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=truth.k,
    )
    return metrics, tuple(lengths)


def measured(
    truths: Mapping[str, Truth],
    *,
    prompts: int = 8,
    repetitions: int = 2,
    categories: Sequence[str] = ("",),
    seed: int = 0,
    drift: float = 0.0,
    by_prompt: float = 0.1,
    noise: float = 0.02,
) -> list[Row]:
    """A row per arm, prompt and repetition.

    drift      how much slower the machine becomes from the first row to the last (log)
    by_prompt  how much the speed-ups of the prompts differ (log, standard deviation)
    noise      of each row (log, standard deviation)
    """
    draw = random.Random(seed)
    own = {(name, prompt): draw.gauss(0, by_prompt) for name in truths for prompt in range(prompts)}
    places = [(turn, prompt) for turn in range(repetitions) for prompt in range(prompts)]
    found = []
    for number, (repetition, prompt) in enumerate(places):
        text = tuple(random.Random(prompt).choices(range(100), k=TOKENS))
        slow = -drift * number / len(places)
        for name, truth in truths.items():
            differs = own[name, prompt] if truth.speed != 1 else 0.0
            speed = 40 * truth.speed * exp(differs + slow + draw.gauss(0, noise))
            metrics, lengths = figures(draw, truth, TOKENS / speed)
            found.append(
                row(
                    name,
                    prompt,
                    repetition,
                    number=len(found),
                    category=categories[prompt % len(categories)],
                    tokens=text,
                    num_cell_tokens=TOKENS,
                    wall_s=TOKENS / speed,
                    tokens_per_second=speed,
                    ttft_s=metrics.time_to_first_token_s,
                    itl_p50_ms=metrics.inter_token_p99_ms,  # of what a reader sees
                    itl_p99_ms=metrics.inter_token_p99_ms,
                    accept_lengths=lengths,
                    accepted_by_source={"model": metrics.num_accepted_tokens} if truth.k else {},
                    num_bytes=600 if truth.k else 240,
                    figures=dataclasses.asdict(metrics),
                    hosts={"target": "host-1", "drafter": "host-2"} if truth.k else {},
                    load=0.05,
                )
            )
    return found
