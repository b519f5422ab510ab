"""`python -m tests.hostile.flooding [--rounds 5] [--way "repeat 2000"]`: what a flood costs a text.

A drafter sends each draft many times (`repeat`: the same frames; `again`: with new numbers). Its
texts are compared with those of the target alone, in turn, each time with new processes. The rate
is over nine texts of 256 tokens; the ratio should be 0.9 at least.
"""
# ruff: noqa: T201

import argparse
import os
import platform
import statistics
import time

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import launcher
from proto.messages import Role
from tests.process.reference import generate

PROMPT, NUM_TOKENS, NUM_TEXTS = (5, 6, 7, 8, 9), 256, 9
ALONE, AUTO = SpeculationConfig(policy="ar"), SpeculationConfig()
HONEST = dict(launcher.MODULES)


def written(way: str) -> tuple[float, list[int]]:
    """Tokens a second with a drafter that behaves in this way, and the text; "": no drafter."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    launcher.MODULES.update(HONEST)
    if way:
        launcher.MODULES[Role.DRAFTER] = "tests.process.hostile_drafter"
        os.environ["SLIPSTREAM_TEST_HOSTILE"] = way
    with Pair(PairConfig(dtype="float32"), with_drafter=bool(way)) as pair:
        text = generate(pair, PROMPT, ALONE, params).tokens
        began = time.monotonic()
        for _ in range(NUM_TEXTS):
            assert generate(pair, PROMPT, AUTO if way else ALONE, params).tokens == text
        return NUM_TEXTS * NUM_TOKENS / (time.monotonic() - began), text


def main() -> None:
    """Print the rates of each round, and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", default="repeat 2000")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    ratios = []
    for number in range(arguments.rounds):
        (alone, text), (flooded, same) = written(""), written(arguments.way)
        assert text == same, "the text has changed"
        ratios.append(flooded / alone)
        line = f"round {number + 1}: alone {alone:.0f}, flooded {flooded:.0f} tokens/s"
        print(f"{line}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
