"""Times a pair with its default placement, with placements set by hand, and plain decoding.

    python -m lab.measure.placements TARGET DRAFTER --dtype bfloat16 --beside-a-loop

All arms are loaded first and then take turns, text by text, so that a change on the machine meets
all of them. Prints, for greedy texts and for temperature 0.8, each arm's tokens per second (the
median over the texts, with quartiles) and its ratio to the best arm set by hand, text by text. With
`--beside-a-loop` all of it is repeated while another process computes without end; then the ratio
to the same arm's quiet figure is printed too. Texts take seconds each: `--texts 4 --tokens 64` is a
quick look.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from coordinator.api.llm import LLM
from coordinator.api.params import SamplingParams
from lab.experiments.surroundings import machine
from lab.help import Paragraphs
from proto.installation import MODELS

PROMPTS = Path(__file__).resolve().parents[1] / "experiments" / "prompts.jsonl"
AUTO, PLAIN = "auto", "plain, all cores"
TEMPERATURES = (0.0, 0.8)
LOOP = (sys.executable, "-c", "while 1: pass")
Figures = dict[tuple[str, float], list[float]]
"""Tokens per second of each text, by arm and temperature."""


def arms(cores: Sequence[int]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each arm by its name, on a machine with these cores."""
    every = "cpu:" + ",".join(map(str, cores))
    return {
        AUTO: {},
        "apart": {"placement": "apart"},
        "shared": {"placement": "shared"},
        "all, drafter on the first": {"target_device": every, "drafter_device": f"cpu:{cores[0]}"},
        PLAIN: {"target_device": every},
    }


def by_hand(names: Sequence[str]) -> list[str]:
    """Return the names of the arms whose placement is set by hand, drafts included."""
    return [name for name in names if name not in (AUTO, PLAIN)]


@contextmanager
def endless_loop() -> Iterator[None]:
    """While inside, another process computes without end on whichever core it is given."""
    process = subprocess.Popen(LOOP)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(
    llms: Mapping[str, LLM], prompts: Sequence[str], num_texts: int, num_tokens: int
) -> Figures:
    """Let all arms write the same texts in turns; return their figures."""
    figures: Figures = {key: [] for key in itertools.product(llms, TEMPERATURES)}
    names = list(llms)
    for number in range(num_texts):
        prompt = prompts[number % len(prompts)]
        for temperature in TEMPERATURES:
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=num_tokens, ignore_eos=True
            )
            for name in names:
                started = time.perf_counter()
                (output,) = llms[name].generate([prompt], params, use_tqdm=False)
                seconds = time.perf_counter() - started
                figures[name, temperature].append(len(output.outputs[0].token_ids) / seconds)
        names.append(names.pop(0))  # no arm always follows the same other
    return figures


def lines(figures: Figures, quiet: Figures | None = None) -> Iterator[str]:
    """Yield the lines of a table; `quiet` are the figures to compare with, if there are any."""
    names = list(dict.fromkeys(name for name, _ in figures))
    for temperature in TEMPERATURES:
        yield f"temperature {temperature:g}"
        best = max(by_hand(names), key=lambda name: median(figures[name, temperature]))
        for name in names:
            rates = figures[name, temperature]
            low, middle, high = quantiles(rates, n=4) if len(rates) > 1 else rates * 3
            ratios = [a / b for a, b in zip(rates, figures[best, temperature], strict=True)]
            line = f"  {name:26} {middle:6.1f} ({low:.1f}-{high:.1f}) tokens/s"
            line += f"  x {median(ratios):.2f} of {best}"
            if quiet is not None:
                line += f"  x {middle / median(quiet[name, temperature]):.2f} of quiet"
            yield line


def main() -> None:
    """Load all arms of a pair, measure them and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.placements", description=__doc__, formatter_class=Paragraphs
    )
    parser.add_argument("target", nargs="?", default=str(MODELS / "target"), metavar="TARGET")
    parser.add_argument("drafter", nargs="?", default=str(MODELS / "drafter"), metavar="DRAFTER")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="the number type")
    parser.add_argument("--policy", default="auto", metavar="NAME", help="of the arms with drafts")
    parser.add_argument("--texts", type=int, default=10, metavar="N", help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of a text")
    parser.add_argument(
        "--beside-a-loop", action="store_true", help="measure beside an endless loop as well"
    )
    options = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    print(machine())
    with ExitStack() as stack:
        llms = {}
        for name, settings in arms(sorted(os.sched_getaffinity(0))).items():
            drafts = {"model": options.drafter, "policy": options.policy}
            llms[name] = stack.enter_context(
                LLM(
                    options.target,
                    speculative_config=None if name == PLAIN else drafts,
                    dtype=options.dtype,
                    **settings,
                )
            )
        measure(llms, prompts, 1, options.tokens)  # the first texts are not counted
        quiet = measure(llms, prompts, options.texts, options.tokens)
        print(*lines(quiet), sep="\n", flush=True)
        if options.beside_a_loop:
            with endless_loop():
                beside = measure(llms, prompts, options.texts, options.tokens)
            print("beside an endless loop", *lines(beside, quiet), sep="\n")


if __name__ == "__main__":
    main()
