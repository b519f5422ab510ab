"""Script B: a pair of 8 B and 1 B writes texts, and what the target's device waits for in a round.

Beside the speed of each policy stands where the time of a round goes, joined of what both processes
recorded (`--trace`): all but the target's share is time in which its device computes nothing.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.stream import TokenStream
from lab.experiments.prompt_sets import read
from lab.gpu_kit.kit import Kit, run
from lab.trace.critical_path import SHARES, paths_of
from lab.trace.reading import parse

POLICIES = ("ar", "sync", "tree", "auto")
TEMPERATURES = (0.0, 0.8)
# Where the drafter is, by what the pair is given; the most important first.
ARMS: Mapping[str, Mapping[str, object]] = {
    "own process": {},
    "at home": {"drafter_home": "target"},
    "own process, polled": {"busy_poll_us": 200},
}
# Tokens a second, greedy: measured on an H200, or estimated from it (docs/LOG.md, 2026-11-26).
EXPECTED = {
    ("own process", "ar"): 183.0,
    ("own process", "sync"): 231.0,
    ("own process", "tree"): 280.0,
    ("at home", "sync"): 305.0,
}
CROWDS = (1, 4, 8)
NUM_TOKENS, NUM_TOKENS_SMALL = 96, 12
NUM_PROMPTS, NUM_PROMPTS_SMALL = 5, 2
ARM_S = 90.0  # a further pair is not begun with less time


def measure(kit: Kit) -> None:
    """Write texts with each pair, while there is time. Raises SlipstreamError."""
    for arm, settings in ARMS.items():
        if kit.left_s < (2.0 if kit.is_small else ARM_S):
            kit.say(f"{arm}: left out, {kit.left_s:.0f} s are left")
            return
        began_s = time.monotonic()
        config = PairConfig.model_validate(
            {
                "target": str(kit.model("target")),
                "drafter": str(kit.model("drafter")),
                "target_device": kit.device,
                "drafter_device": kit.device,
                "dtype": "bfloat16",
                "max_num_seqs": max(CROWDS),
                "target_restarts": 0,
                "drafter_restarts": 0,
                "keep_speeds": False,
                **settings,
            }
        )
        with Pair(config, traced=True) as pair:
            kit.row(f"{arm}: loaded", seconds=time.monotonic() - began_s)
            Texts(kit, arm, pair).write()


class Texts:
    """The texts of one pair.

    written  of each text in the order in which they began: policy and temperature
    """

    def __init__(self, kit: Kit, arm: str, pair: Pair) -> None:
        self.kit, self.arm, self.pair = kit, arm, pair
        self.num_tokens = NUM_TOKENS_SMALL if kit.is_small else NUM_TOKENS
        count = NUM_PROMPTS_SMALL if kit.is_small else NUM_PROMPTS
        self.prompts = [pair.encode(prompt.turns[0]) for prompt in read(kit.prompts, count)]
        self.written: list[tuple[str, float] | None] = []

    def write(self) -> None:
        """All policies take turns at each prompt, so that a slow minute is everybody's."""
        cases = list(product(TEMPERATURES, POLICIES))
        speeds: dict[tuple[str, float], list[float]] = defaultdict(list)
        passes: dict[tuple[str, float], list[float]] = defaultdict(list)
        for number, prompt in enumerate(self.prompts):
            for temperature, policy in cases:
                self.written.append((policy, temperature) if number else None)
                speed, num_passes = self.text(policy, temperature, prompt)
                if number:  # with the first prompt all are warmed up
                    speeds[policy, temperature].append(speed)
                    passes[policy, temperature].append(self.num_tokens / num_passes)
        rounds = self.rounds()
        for temperature, policy in cases:
            mine, plain = speeds[policy, temperature], speeds["ar", temperature]
            expected = None if temperature else EXPECTED.get((self.arm, policy))
            self.kit.row(
                f"{self.arm}: {policy} at {temperature}",
                {"tokens_s": expected} if expected else {},
                tokens_s=median(mine),
                x_plain=median(one / other for one, other in zip(mine, plain, strict=True)),
                tokens_pass=fmean(passes[policy, temperature]),
                **rounds.get((policy, temperature), {}),
            )
        for count, policy in product(CROWDS[1:], ("ar", "auto")):
            if self.arm == "own process":
                self.crowd(count, policy)

    def text(self, policy: str, temperature: float, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Write one text; return its tokens a second after the first, and its passes."""
        began_s, came = time.perf_counter(), list[tuple[float, int]]()
        stream = self.begin(policy, temperature, prompt)
        for chunk in stream:
            came.append((time.perf_counter() - began_s, len(chunk.tokens)))
        later = sum(count for _, count in came[1:])
        return later / max(1e-9, came[-1][0] - came[0][0]), len(came)

    def begin(self, policy: Any, temperature: float, prompt: tuple[int, ...]) -> TokenStream:
        """Begin a text; return its stream."""
        request = SamplingParams(
            temperature=temperature, seed=7, max_tokens=self.num_tokens, ignore_eos=True
        )
        return self.pair.generate(prompt, SpeculationConfig(policy=policy), request)[0]

    def crowd(self, count: int, policy: str) -> None:
        """Write several texts at once, twice; the second time counts."""
        for number in range(2):
            began_s = time.perf_counter()
            prompts = [self.prompts[at % len(self.prompts)] for at in range(count)]
            streams = [self.begin(policy, 0.0, prompt) for prompt in prompts]
            total = sum(len(chunk.tokens) for stream in streams for chunk in stream)
            if number:
                speed = total / (time.perf_counter() - began_s)
                self.kit.row(f"{self.arm}: {count} texts at once, {policy}", tokens_s=speed)

    def rounds(self) -> dict[tuple[str, float], dict[str, float]]:
        """Return the milliseconds of a round by share, and those in which the device is idle."""
        path = self.kit.out / f"{self.arm.replace(' ', '-').replace(',', '')}.trace.json"
        self.pair.write_trace(path)
        by_case = defaultdict[tuple[str, float], list[Any]](list)
        paths = sorted(paths_of(parse(path.read_text(), str(path))), key=lambda one: one.text)
        for case, one in zip(self.written, paths, strict=True):
            if case is not None:
                by_case[case] += one.rounds[1:-1]
        path.unlink()
        return {case: _shares(rounds) for case, rounds in by_case.items() if rounds}


def _shares(rounds: Sequence[Any]) -> dict[str, float]:
    """Return the mean milliseconds of each share of a round."""
    ms = {name: fmean(one.shares_ns[name] for one in rounds) / 1e6 for name in SHARES}
    whole, idle = sum(ms.values()), sum(ms.values()) - ms["target"]
    found = {f"{name}_ms": value for name, value in ms.items()}
    return {"round_ms": whole, "idle_ms": idle, "idle_share": idle / whole, **found}


if __name__ == "__main__":
    sys.exit(run("pairs", measure))
