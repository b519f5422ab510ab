"""Run one seed; a failure says how to replay it and tells the last events."""

from collections import Counter
from collections.abc import Callable

from tests.simulation.scenario import draw
from tests.simulation.story import Line
from tests.simulation.world import World


class SimulationFailure(AssertionError):
    """A seed at which something did not hold."""


def simulate(
    seed: int,
    policy: str | None = None,
    *,
    oracle: bool = False,
    plain: bool = False,
    alone: bool = False,
    chain: bool = False,
    leaving: bool = False,
    tell: Callable[[Line], None] | None = None,
) -> Counter[str]:
    """Run a seed to its end. Raises SimulationFailure."""
    scenario = draw(
        seed, policy, oracle=oracle, plain=plain, alone=alone, chain=chain, leaving=leaving
    )
    world = World(scenario, tell=tell)
    try:
        world.run()
    except Exception as error:
        options = (f" --policy {policy}" if policy else "") + (" --oracle" if oracle else "")
        options += (" --plain" if plain else "") + (" --alone" if alone else "")
        options += (" --chain" if chain else "") + (" --leaving" if leaving else "")
        replay = f"python -m tests.simulation {seed}{options}"
        story = "\n".join(map(str, world.story))
        raise SimulationFailure(
            f"{type(error).__name__}: {error}\n{story}\n{scenario}\nreplay: {replay}"
        ) from error
    return world.judge.stats
