"""Measures what the host costs beside a GPU, with models that cost nothing.

    python -m lab.synthetic --costs 5/1 --policy tree:16

The real processes, sockets and machines run; the models are hashes (`model.py`), a launch keeps the
host busy for 0.1 ms, and results come when the simulated device has ended (`--costs`: milliseconds
of a target pass and of a draft step). The unit is tokens in the time of one pass: 1 is what plain
decoding would do if the host took no time.

Without --policy these are compared, turn by turn over the same texts: `ar`,
`sync:best`, `sync, one process:best` (both models in one loop, as others run it), `tree`, `tree:16`
and `auto`. A number after the colon is K; `best` is the K that is fastest in two texts that are not
counted. `tree, at home`: the drafter runs in the target's process, and both take turns on one
device; --shared says how two processes share one. Every text must be what the target alone would
write. `host_time.py` says what critical host time is, `summary.py` when a figure is void.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from coordinator.api.params import SamplingParams
from coordinator.launching.load import Load
from lab.experiments import surroundings
from lab.help import Paragraphs
from lab.synthetic.one_process import started_in_one_process
from lab.synthetic.running import (
    BEST,
    IN_ONE_PROCESS,
    Costs,
    is_at_home,
    is_in_one_process,
    speculation_of,
    started,
)
from lab.synthetic.summary import Made, summarised, table
from proto.errors import SlipstreamError

POLICIES = ("ar", "sync:best", f"sync{IN_ONE_PROCESS}:best", "tree", "tree:16", "auto")
KS = (1, 2, 3, 4, 5, 6, 8)
PILOTS = (1001, 1002)  # numbers of the texts that only serve to find the best K


class Writes(Protocol):
    """An engine that generates a text under a policy."""

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        """Generate and return a text. Asserts that it is what the target alone would write."""


class Either:
    """Generates each text where its policy's name says: in three processes, one, or at home."""

    def __init__(self, pair: Writes, one: Writes, home: Writes) -> None:
        self._pair, self._one, self._home = pair, one, home

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        """Generate and return a text. Asserts that it is what the target alone would write."""
        writer = self._one if is_in_one_process(policy) else self._pair
        if is_at_home(policy):
            writer = self._home
        return writer.write(policy, prompt, request)


def costs_of(text: str) -> Costs:
    """Return the costs in text like `5/1`: ms of a target pass and of a draft step.

    Raises ValueError for other text.
    """
    target, draft = map(float, text.split("/"))
    if not (target > 0 and draft > 0):
        raise ValueError(text)
    return Costs(target, draft)


def request_of(number: int, num_tokens: int, temperature: float) -> SamplingParams:
    """Return the sampling parameters of a text; its seed is its number."""
    return SamplingParams(
        max_tokens=num_tokens, temperature=temperature, seed=number, ignore_eos=True
    )


def prompt_of(number: int) -> tuple[int, ...]:
    """Return the prompt (token ids) of the text with this number."""
    return (1, 2, 3, 1 + number)


def with_best_k(writer: Writes, policy: str, num_tokens: int, temperature: float) -> str:
    """Return the policy with the K that is fastest on the pilot texts: `sync:4` for `sync:best`."""
    if not policy.endswith(BEST):
        return policy
    speeds: dict[str, list[float]] = {f"{policy.removesuffix(BEST)}:{k}": [] for k in KS}
    for number in PILOTS:
        for name, found in speeds.items():
            request = request_of(number, num_tokens, temperature)
            found.append(writer.write(name, prompt_of(number), request).speed)
    return max(speeds, key=lambda name: median(speeds[name]))


def measured(
    writer: Writes,
    policies: Sequence[str],
    *,
    num_texts: int,
    num_tokens: int,
    temperature: float,
) -> list[Made]:
    """Return the texts of every policy, generated in alternating order, after a warm-up text.

    Asserts that drafts were accepted under every policy that drafts.
    """
    policies = [with_best_k(writer, name, num_tokens, temperature) for name in policies]
    made: list[Made] = []
    for number in range(num_texts + 1):
        in_turn = policies if number % 2 else policies[::-1]
        of_text = {
            name: writer.write(name, prompt_of(number), request_of(number, num_tokens, temperature))
            for name in in_turn
        }
        if number:  # text 0 is not counted, because the nodes have measured no costs yet
            made += [of_text[name] for name in policies]
    for name in policies:
        accepted = sum(one.num_accepted for one in made if one.policy == name)
        assert accepted or not speculation_of(name).drafts, f"{name}: no draft was accepted"
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.synthetic", description=__doc__)
    parser.formatter_class = Paragraphs
    parser.add_argument(
        "--costs",
        type=costs_of,
        default=costs_of("5/1"),
        metavar="TARGET/DRAFT",
        help="milliseconds of a target pass and of a draft step (default 5/1)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:K]",
        help="a policy, and its K; may be given several times (default: all of the above)",
    )
    parser.add_argument(
        "--texts", type=int, default=6, metavar="N", help="how many texts (default 6)"
    )
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="tokens of each text (default 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="NUMBER", help="0, the default: greedy"
    )
    parser.add_argument(
        "--shared",
        choices=("", "turns", "both"),
        default="",
        help="both models share one device: in turns, or both at once, which stretches a pass "
        "(`shared_device.py`); default: each has its own",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object, no table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    given = _parser().parse_args(arguments)
    policies = list(dict.fromkeys(given.policy or POLICIES))
    try:
        for name in policies:
            speculation_of(name)
        load = Load()
        with (
            started_in_one_process(given.costs) as one,
            started(given.costs, at_home=True) as home,
            started(given.costs, sharing=given.shared) as pair,
        ):
            made = measured(
                Either(pair, one, home),
                policies,
                num_texts=given.texts,
                num_tokens=given.tokens,
                temperature=given.temperature,
            )
            others = load.cores()  # before the nodes end: ended processes would count as others
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summaries = summarised(made)
    machine = surroundings.machine()
    if given.json:
        record = {
            "machine": machine,
            "cores_used_by_others": others,
            "target_ms": given.costs.target_ms,
            "draft_ms": given.costs.draft_ms,
            "temperature": given.temperature,
            "shared": given.shared,
            "num_tokens": given.tokens,
            "policies": [one.as_json() for one in summaries],
        }
        print(json.dumps(record))
        return 0
    print(f"{machine}; others used {others:.1f} cores")
    print("\n".join(table(summaries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
