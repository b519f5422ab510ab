"""`python -m tests.exact_texts`: is every text the same bits of choice, whatever is done to it?

For each family a tiny target and a drafter that is often right. What plain decoding writes, one
text at a time, is compared with what each policy writes, alone and in a crowd of eight, greedy and
at temperature 0.8, while

    messages are lost          so that texts are opened anew at the target
    the drafter is killed      every few seconds

With `--target` and `--drafter` it is another pair, without the lost messages, for prompts of up to
`--longest` tokens. Exit status 1: a text was another, or drafts were never accepted.
"""
# ruff: noqa: T201

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from proto.policies import POLICIES
from tests.tiny_models import make_model, make_noised

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite")
NOISE = 0.05
CROWD = 8
NUM_TOKENS = 24
KILLED_EVERY_S = 8.0
LOSSY = ("target:delay=100us,loss=1%", "drafter:delay=100us,loss=1%")
LOWEST_ID = 3  # those below are special
VOCAB = 199  # of the tiny models


@dataclass(slots=True)
class Counts:
    """What was seen of the texts of one family."""

    texts: int = 0
    other: list[str] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    reopened: int = 0
    killed: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt, and how its text is to be chosen."""

    prompt: tuple[int, ...]
    params: SamplingParams


def requests_of(count: int, vocab: int, longest: int, num_tokens: int) -> list[Wanted]:
    """Return requests from seeds: half of them greedy, half at 0.8; few prompts are long."""
    draw = random.Random(count)
    made = []
    for number in range(count):
        length = max(1, round(longest ** draw.random()))
        prompt = tuple(draw.randrange(LOWEST_ID, vocab) for _ in range(length))
        chosen: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **chosen)
        made.append(Wanted(prompt, params))
    return made


def written(
    pair: Pair, policy: str, wanted: Sequence[Wanted], crowd: int
) -> Iterator[tuple[list[int], Metrics]]:
    """Yield the tokens and metrics of each text, so many at once."""
    settings = SpeculationConfig(policy=policy)  # type: ignore[arg-type]
    for begin in range(0, len(wanted), crowd):
        streams = [
            pair.generate(one.prompt, settings, one.params)[0]
            for one in wanted[begin : begin + crowd]
        ]
        for stream in streams:
            tokens = [token for chunk in stream for token in chunk.tokens]
            assert stream.result is not None
            yield tokens, stream.result.metrics


@contextmanager
def drafters_die(pair: Pair, counts: Counts) -> Iterator[None]:
    """Kill the drafter now and then until the block ends."""
    over = Event()

    def kill() -> None:
        while not over.wait(KILLED_EVERY_S):
            if (pid := pair.pids().get("drafter")) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    counts.killed += 1

    thread = Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check(config: PairConfig, wanted: Sequence[Wanted], policies: Sequence[str]) -> Counts:
    """Return what becomes of these requests under each policy, alone and in a crowd."""
    counts = Counts()
    with Pair(config) as pair:
        plain = [tokens for tokens, _ in written(pair, "ar", wanted, 1)]
        with drafters_die(pair, counts):
            for policy in policies:
                for crowd in (1, CROWD):
                    found = written(pair, policy, wanted, crowd)
                    for number, (tokens, metrics) in enumerate(found):
                        counts.texts += 1
                        counts.accepted += metrics.num_accepted_tokens
                        counts.drafted += metrics.num_draft_tokens
                        counts.reopened += metrics.num_reopened
                        if tokens != plain[number]:
                            same = next(
                                i
                                for i, (a, b) in enumerate(zip(tokens, plain[number], strict=False))
                                if a != b
                            )
                            counts.other.append(f"{policy} of {crowd}: text {number}, token {same}")
    return counts


def is_exact(
    name: str, config: PairConfig, wanted: Sequence[Wanted], policies: Sequence[str]
) -> bool:
    """Check a pair, and print a line; returns whether all is as it should be."""
    began = time.monotonic()
    counts = check(config, wanted, policies)
    rate = counts.accepted / max(1, counts.drafted)
    print(
        f"{name}: {counts.texts} texts, {len(counts.other)} of them another; "
        f"{counts.accepted} drafts accepted ({rate:.0%}), {counts.reopened} times opened anew, "
        f"the drafter killed {counts.killed} times; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for line in counts.other[:5]:
        print("   ", line)
    return not counts.other and counts.accepted > 0


def main() -> int:
    """Check the families or the pair that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--longest", type=int, default=120, help="tokens of the longest prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--ids", type=int, default=4_000, help="token ids of a pair's prompts")
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    args = parser.parse_args()
    usual: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": CROWD, "drafter_restarts": 6}
    if args.quantization:
        usual["quantization"] = args.quantization
    if args.target:
        config = PairConfig(target=args.target, drafter=args.drafter, **usual)
        wanted = requests_of(args.texts, args.ids, args.longest, args.tokens)
        return 0 if is_exact(args.target, config, wanted, args.policies) else 1
    wanted = requests_of(args.texts, VOCAB, args.longest, args.tokens)
    found = [is_exact_family(family, wanted, args.policies, usual) for family in args.families]
    return 0 if all(found) else 1


def is_exact_family(
    family: str, wanted: Sequence[Wanted], policies: Sequence[str], settings: dict[str, Any]
) -> bool:
    """Check a tiny target of this family, beside a drafter, over lossy links; print a line."""
    with tempfile.TemporaryDirectory() as place:
        target = make_model(family, Path(place) / "target")
        drafter = make_noised(target, Path(place) / "drafter", NOISE)
        config = PairConfig(target=str(target), drafter=str(drafter), link=LOSSY, **settings)
        return is_exact(family, config, wanted, policies)


if __name__ == "__main__":
    sys.exit(main())
