"""Replay one seed and tell its whole story: `python -m tests.simulation SEED [--policy NAME]`."""
# ruff: noqa: T201

import argparse

from tests.simulation.run import simulate
from tests.simulation.scenario import POLICIES, draw


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--policy", choices=POLICIES, help="instead of the one that the seed draws")
    parser.add_argument("--oracle", action="store_true", help="with a drafter that is always right")
    parser.add_argument("--plain", action="store_true", help="two texts and one drafter")
    parser.add_argument("--alone", action="store_true", help="one text at a time")
    parser.add_argument("--quiet", action="store_true", help="only say whether it holds")
    arguments = parser.parse_args()
    seed, policy = arguments.seed, arguments.policy
    options = {name: getattr(arguments, name) for name in ("oracle", "plain", "alone")}
    print(draw(seed, policy, **options))
    tell = None if arguments.quiet else print
    stats = simulate(seed, policy, tell=tell, **options)
    print(dict(stats))


if __name__ == "__main__":
    main()
