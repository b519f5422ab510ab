"""The benchmark: every arm on the same prompts in the same minutes, alternating, outputs compared.

An *arm* is a way to generate: a policy on a pair, or a peer in a process of its own. For each
prompt and repetition every arm runs once, in an order drawn anew, so that a drift of the machine
hits all alike, and ratios are formed within one prompt and repetition. The settings of `sync`
and of Hugging Face's assisted generation are swept first, and each is measured at its own best.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from coordinator.api import prompts
from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching.launcher import ROOT
from coordinator.text.metrics import Metrics, percentiles_ms
from coordinator.text.simulated import MOST_OVERRUNS, overruns
from proto.errors import NodeError

PEERS = "deploy.experiments.peers"
HUGGING_FACE, LLAMA_CPP = f"{PEERS}.huggingface", f"{PEERS}.llamacpp"
PEER_LIMIT_S = 300.0  # for a peer to start, or to write a text
SWEEP_PROMPTS = 5
MAX_PROMPT_TOKENS = 256


def spread(path: Path, count: int) -> list[str]:
    """`count` prompts from all over a file, or all that it has. Raises ConfigurationError."""
    texts = prompts.from_file(path)
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def encoded(pair: Pair, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """The first tokens of each prompt."""
    return [pair.encode(text)[:MAX_PROMPT_TOKENS] for text in texts]


def add_options(parser: argparse.ArgumentParser, *, num_prompts: int, max_tokens: int) -> None:
    """What every measurement of a pair is asked: the prompts, the pair, how much, how slow."""
    defaults = PairConfig()
    parser.add_argument("prompts", type=Path, help="one prompt per line, or JSON Lines")
    parser.add_argument("--target", default=defaults.target)
    parser.add_argument("--drafter", default=defaults.drafter)
    parser.add_argument("--num-prompts", type=_count, default=num_prompts)
    parser.add_argument("--max-tokens", type=_count, default=max_tokens)
    parser.add_argument("--repetitions", type=_count, default=2)
    parser.add_argument("--simulate-target-ms", type=float, default=0.0, help="a slower target")
    parser.add_argument("--simulate-draft-ms", type=float, default=0.0, help="a slower drafter")


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, not {text}")
    return number


@dataclass(frozen=True, slots=True)
class Text:
    """What an arm made and how long it took; the metrics only of our own arms."""

    tokens: tuple[int, ...]
    tokens_per_second: float
    ttft_s: float
    p50_ms: float
    p99_ms: float
    metrics: Metrics | None


@dataclass(frozen=True, slots=True)
class Run:
    """One text of one arm."""

    arm: str
    prompt: int
    repetition: int
    temperature: float
    text: Text


@dataclass(frozen=True, slots=True)
class Arm:
    """A name and a way to run one prompt: (prompt, temperature, seed) -> Text."""

    name: str
    run: Callable[[tuple[int, ...], float, int], Text]


class Peer:
    """Somebody else's engine in a process of its own: a module of `peers`."""

    def __init__(self, module: str, config: PairConfig, max_tokens: int) -> None:
        """It runs on the target's GPU, or on all cores."""
        device = config.target_device if config.target_device.startswith("cuda") else "cpu"
        self._module = module
        self._max_tokens = max_tokens
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, config.target, config.drafter, config.dtype, device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        too_late = threading.Timer(PEER_LIMIT_S, self._process.kill)
        too_late.start()
        line = self._process.stdout.readline()
        too_late.cancel()
        if not line:
            raise NodeError(f"{self._module} ended; run the benchmark with --no-peers")
        record: dict[str, Any] = json.loads(line)
        return record

    def arm(self, name: str, mode: str, setting: int | None = None) -> Arm:
        """An arm that runs one mode."""

        def run(prompt: tuple[int, ...], temperature: float, seed: int) -> Text:
            assert self._process.stdin is not None
            request = {
                "mode": mode,
                "prompt": list(prompt),
                "max_tokens": self._max_tokens,
                "temperature": temperature,
                "setting": setting,
                "seed": seed,
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._read()
            emitted = list(zip(answer["times"], answer["counts"], strict=True))
            p50_ms, p99_ms = percentiles_ms(emitted)
            return Text(
                tokens=tuple(answer["tokens"]),
                tokens_per_second=self._max_tokens / emitted[-1][0],
                ttft_s=emitted[0][0],
                p50_ms=p50_ms,
                p99_ms=p99_ms,
                metrics=None,
            )

        return Arm(name, run)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def pair_arm(name: str, pair: Pair, speculation: SpeculationConfig, max_tokens: int) -> Arm:
    """An arm that runs one policy on a pair."""

    def run(prompt: tuple[int, ...], temperature: float, seed: int) -> Text:
        request = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
        )
        before = pair.simulated()
        stream, _ = pair.generate(prompt, speculation, request)
        tokens = tuple(token for emit in stream for token in emit.tokens)
        assert stream.result is not None
        metrics = pair.marked(stream.result.metrics, before)
        return Text(
            tokens=tokens,
            tokens_per_second=metrics.tokens_per_second,
            ttft_s=metrics.time_to_first_token_s,
            p50_ms=metrics.inter_token_p50_ms,
            p99_ms=metrics.inter_token_p99_ms,
            metrics=metrics,
        )

    return Arm(name, run)


def measure(
    arms: Sequence[Arm],
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    repetitions: int,
    say: Callable[[str], None],
) -> list[Run]:
    """Run every arm on every prompt, `repetitions` times, alternating in an order drawn anew."""
    order = random.Random(0)
    runs = []
    for repetition in range(repetitions):
        for index, prompt in enumerate(prompts):
            say(f"temperature {temperature:g}: repetition {repetition + 1}, prompt {index + 1}")
            for arm in order.sample(list(arms), len(arms)):
                text = arm.run(prompt, temperature, 1000 + index)
                runs.append(Run(arm.name, index, repetition, temperature, text))
    return runs


def best_arm(
    arms: Sequence[Arm],
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    say: Callable[[str], None],
) -> tuple[Arm, dict[str, float]]:
    """The fastest of several settings on the first prompts, and the tokens/s of each.

    They are 0 where they would be void.
    """
    runs = measure(arms, prompts[:SWEEP_PROMPTS], temperature=temperature, repetitions=1, say=say)
    speeds = {}
    for arm in arms:
        mine = [run for run in runs if run.arm == arm.name]
        is_void = void_share(mine) > 0
        speeds[arm.name] = 0.0 if is_void else median(run.text.tokens_per_second for run in mine)
    return max(arms, key=lambda arm: speeds[arm.name]), speeds


def void_share(runs: Sequence[Run]) -> float:
    """0, or the share of forwards that took too long for figures of what is simulated."""
    metrics = [run.text.metrics for run in runs if run.text.metrics is not None]
    share = overruns(one.simulated for one in metrics if one.simulated is not None)
    return share if share > MOST_OVERRUNS else 0.0


def wait_for_quiet(limit_s: float = 30.0) -> float:
    """Wait until other processes leave the cores alone; returns the load that is left (cores)."""
    deadline = time.monotonic() + limit_s
    while True:
        before, started = _busy_s(), time.monotonic()
        time.sleep(0.5)
        load = (_busy_s() - before) / (time.monotonic() - started)
        if load < 0.1 or time.monotonic() > deadline:
            return load


def _busy_s() -> float:
    """Seconds of CPU time used on this machine so far, by anybody."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = (
            int(field) for field in file.readline().split()[1:]
        )
    return (user + nice + system + irq + softirq) / 100
