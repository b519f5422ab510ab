"""In which order the cells of an experiment are run, and which settings a sweep has chosen.

A drift of the machine must hit every arm alike: for each repetition and prompt every arm runs once,
in an order drawn anew. That needs the models of all arms in memory at once. Where more pairs are
wanted than may be warm, some of them take their turns together, in an order drawn anew for each
repetition.
"""

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from deploy.experiments.rows import Key, Row


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arm runs, and on how many prompts.

    host  the pair or peer: arms with equal ones share their processes
    """

    arm: str
    host: Hashable
    num_prompts: int


def order(
    places: Sequence[Place], *, repetitions: int, seed: int, num_warm: int, stage: str = "main"
) -> Iterator[Key]:
    """Every cell once."""
    draw = random.Random(f"{seed} {stage}")
    hosts = list(dict.fromkeys(place.host for place in places))
    for repetition in range(repetitions):
        turns = draw.sample(hosts, len(hosts)) if len(hosts) > num_warm else hosts
        for first in range(0, len(turns), num_warm):
            together = set(turns[first : first + num_warm])
            mine = [place for place in places if place.host in together]
            for prompt in range(max(place.num_prompts for place in mine)):
                for place in draw.sample(mine, len(mine)):
                    if prompt < place.num_prompts:
                        yield Key(place.arm, prompt, repetition, stage)


def fastest(groups: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> dict[str, str]:
    """The arm of each group with the largest median of tokens a second; void ones come last."""
    chosen = {}
    for group, arms in groups.items():
        speeds = {}
        for arm in arms:
            mine = [row for row in rows if row.arm == arm and row.stage == "sweep"]
            is_void = not mine or any(row.void for row in mine)
            speeds[arm] = 0.0 if is_void else median(row.tokens_per_second for row in mine)
        chosen[group] = max(arms, key=lambda arm: speeds[arm])
    return chosen
