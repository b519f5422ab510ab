"""Replay one seed and tell its whole story, or run many and tell which of them fail.

python -m tests.simulation SEED [--policy NAME]
python -m tests.simulation FIRST LAST [--jobs N]
"""
# ruff: noqa: T201

import argparse
import os
import sys
from dataclasses import asdict

from tests.simulation import sweep
from tests.simulation.run import SimulationFailure, simulate
from tests.simulation.scenario import POLICIES, draw
from tests.simulation.sweep import strata_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="run all from SEED to this one")
    parser.add_argument("--policy", choices=POLICIES, help="instead of the one that a seed draws")
    parser.add_argument("--oracle", action="store_true", help="with a drafter that is always right")
    parser.add_argument("--plain", action="store_true", help="two texts and one drafter")
    parser.add_argument("--alone", action="store_true", help="one text at a time")
    parser.add_argument("--chain", action="store_true", help="a drafter with one choice")
    parser.add_argument("--leaving", action="store_true", help="with readers that leave early")
    parser.add_argument("--quiet", action="store_true", help="only say whether one seed holds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for many seeds")
    arguments = parser.parse_args()
    shape = (arguments.plain, arguments.alone, arguments.chain, arguments.leaving)
    options = sweep.Options(arguments.policy, arguments.oracle, *shape)
    if arguments.last is not None:
        seeds = range(arguments.seed, arguments.last + 1)
        return min(1, sweep.tell(sweep.outcomes(seeds, options, arguments.jobs)))
    return replay(arguments.seed, options, is_quiet=arguments.quiet)


def replay(seed: int, options: sweep.Options, *, is_quiet: bool) -> int:
    """Run a seed and tell its story; the last line says whether it holds. Returns the status."""
    scenario = draw(seed, **asdict(options))
    print(scenario)
    about = ", ".join(f"{question} {value}" for question, value in strata_of(scenario).items())
    try:
        stats = simulate(seed, **asdict(options), tell=None if is_quiet else print)
    except SimulationFailure as failure:
        reason, _, story = str(failure).partition("\n")
        # What was told line by line need not be told again, but for how to replay it.
        print(story if is_quiet else story.splitlines()[-1])
        print(f"FAILED: seed {seed} ({about}): {reason}")
        return 1
    print(dict(stats))
    print(f"ok: seed {seed} ({about}): every text came to its end, and is the target's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
