"""`python -m coordinator bench`: set up the arms, run them in alternation, print the tables."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.config import (
    NGRAM,
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.frozen import checked
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.cli.display import simulation
from coordinator.cli.flags import SIMULATION, Flags, with_settings
from coordinator.launching.devices import chosen_devices
from deploy.experiments.arms import (
    HUGGING_FACE,
    LLAMA_CPP,
    Arm,
    Peer,
    Run,
    best_arm,
    encoded,
    measure,
    pair_arm,
    spread,
    wait_for_quiet,
)
from deploy.experiments.tables import equality, host_time, lost_drafters, machine, swept, table
from proto.errors import ConfigurationError, NodeError

PLAIN, PLAIN_ALL_CORES = "ar", "ar, all cores"
SYNC_KS = (1, 2, 3, 4, 5, 6)
ASSISTED_KS = (None, 2, 3, 5)
LOOKUP_K = 8

Say = Callable[[str], None]


@with_settings
def bench(
    *,
    prompt_file: Annotated[
        Path, typer.Option(help='Prompts: one per line, or JSON Lines with "prompt" or "turns".')
    ],
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "drafter", "target_device", "drafter_device", "dtype"),
            *SIMULATION,
            max_num_seqs=1,
            drafter_restarts=0,
        ),
    ],
    num_prompts: Annotated[
        int, typer.Option(help="How many prompts, spread over the file.", min=1)
    ] = 10,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens per text, end-of-text ignored.", min=1)
    ] = 128,
    repetitions: Annotated[int, typer.Option(help="Runs of every arm on every prompt.", min=1)] = 3,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given several times. Default: 0 and 0.8.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(help="Run Hugging Face generate as well, and llama.cpp if it is installed."),
    ] = True,
    compiled: Annotated[
        bool, typer.Option(help="Measure the compiled backend as well (minutes to load).")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Keep every run in this JSON file.")] = None,
) -> None:
    """Measure every policy and Hugging Face generate in one call, alternating."""
    target_device, drafter_device = chosen_devices(pair.target_device, pair.drafter_device)
    devices = {"target_device": target_device, "drafter_device": drafter_device}
    pair = pair.model_copy(update=devices)
    # The peers are given what the pair makes of them.
    temperatures = [
        checked(SamplingParams, temperature=value, max_tokens=max_tokens).temperature
        for value in temperature or (0.0, 0.8)
    ]
    texts = spread(prompt_file, num_prompts)
    if len(texts) < num_prompts:
        raise ConfigurationError(
            f"{prompt_file} has {len(texts)} prompts, {num_prompts} are wanted; set --num-prompts"
        )
    console = Console(stderr=True)
    typer.echo(
        f"machine: {machine()}\nload of others before the start: {wait_for_quiet():.2f} cores"
    )
    typer.echo(
        f"{len(texts)} prompts of {prompt_file.name}, {max_tokens} tokens each, "
        f"{repetitions} repetitions, dtype {pair.dtype}, target on {pair.target_device}, "
        f"drafter on {pair.drafter_device}"
    )
    runs: list[Run] = []
    with ExitStack() as stack, console.status("starting") as status:
        arms = _Arms(stack, pair, max_tokens, with_peers=peers, with_compiled=compiled)
        prompts = encoded(arms.pair, texts)
        for value in temperatures:
            runs += _one_temperature(arms, prompts, value, repetitions, status.update)
    if out is not None:
        out.write_text(json.dumps([dataclasses.asdict(run) for run in runs]))


class _Arms:
    """Everything that is measured; processes end with the stack."""

    def __init__(
        self,
        stack: ExitStack,
        config: PairConfig,
        max_tokens: int,
        *,
        with_peers: bool,
        with_compiled: bool,
    ) -> None:
        self.max_tokens = max_tokens
        self.pair = stack.enter_context(Pair(config))
        lookup = config.model_copy(update={"drafter": NGRAM})
        self.lookup = stack.enter_context(Pair(lookup))
        self.all_cores = self.compiled_alone = self.reference = self.compiled = None
        self.peer = self.llama = None
        if config.simulated is not None:
            return  # whatever else computes does so at the speed of this machine
        # Plain decoding and copying need no drafter, and could have its core.
        alone = config.model_copy(update={"target_device": "cpu", "drafter": NGRAM})
        if on_cpu := config.target_device.startswith("cpu"):
            self.all_cores = stack.enter_context(Pair(alone))
        reference = config.model_copy(update={"backend": "reference"})
        self.reference = stack.enter_context(Pair(reference, with_drafter=False))
        if with_compiled and on_cpu:
            self.compiled = self._compiled(stack, config)
            self.compiled_alone = self._compiled(stack, alone) if self.compiled else None
        self.peer = self._peer(stack, HUGGING_FACE, config) if with_peers else None
        has_llama = all(find_spec(name) for name in ("llama_cpp", "gguf"))
        self.llama = self._llama(stack, config) if with_peers and has_llama else None

    @staticmethod
    def _compiled(stack: ExitStack, config: PairConfig) -> Pair | None:
        """None where there is no compiler, or another family of models."""
        try:
            return stack.enter_context(Pair(config.model_copy(update={"backend": "compiled"})))
        except NodeError as error:
            typer.echo(f"the compiled backend is left out: {error}")
            return None

    def _llama(self, stack: ExitStack, config: PairConfig) -> Peer | None:
        """None where it does not take the target."""
        try:
            return self._peer(stack, LLAMA_CPP, config)
        except NodeError:
            typer.echo(
                f"llama.cpp is left out, it did not start: `python -m {LLAMA_CPP} {config.target} "
                f"{config.drafter} {config.dtype} cpu` says why (it takes the llama family only)"
            )
            return None

    def _peer(self, stack: ExitStack, module: str, config: PairConfig) -> Peer:
        peer = Peer(module, config, self.max_tokens)
        stack.callback(peer.close)
        return peer

    def policy(self, name: str, policy: str, **numbers: int) -> Arm:
        """A policy on the pair."""
        speculation = checked(SpeculationConfig, policy=policy, **numbers)
        return pair_arm(name, self.pair, speculation, self.max_tokens)

    def ngrams(self) -> list[Arm]:
        """Drafts that are copied: besides those of the draft model, and alone."""
        many = checked(SpeculationConfig, num_speculative_tokens=LOOKUP_K)
        both = many.model_copy(update={"also_ngram": True})
        return [
            pair_arm("auto + ngram", self.pair, both, self.max_tokens),
            pair_arm("ngram, no drafter", self.lookup, many, self.max_tokens),
        ]

    def as_programs(self) -> list[Arm]:
        """The same on the compiled backend."""
        if self.compiled is None:
            return []
        many = checked(SpeculationConfig, num_speculative_tokens=LOOKUP_K, also_ngram=True)
        policies = {
            "ar": SpeculationConfig(policy="ar"),
            "pipelined": SpeculationConfig(policy="pipelined"),
            "auto": SpeculationConfig(policy="auto"),
            "auto + ngram": many,
        }
        arms = [
            pair_arm(f"compiled {name}", self.compiled, speculation, self.max_tokens)
            for name, speculation in policies.items()
        ]
        if self.compiled_alone is None:
            return arms
        copies = checked(SpeculationConfig, num_speculative_tokens=LOOKUP_K)
        return [
            *arms,
            pair_arm("compiled ar, all", self.compiled_alone, policies["ar"], self.max_tokens),
            pair_arm("compiled ngram, all", self.compiled_alone, copies, self.max_tokens),
        ]

    def plain(self) -> list[Arm]:
        """The target alone, on its core and on all of them, and as transformers computes it."""
        alone = SpeculationConfig(policy="ar")
        arms = [self.policy(PLAIN, "ar")]
        if self.reference is not None:
            arms.append(pair_arm("ar, reference forward", self.reference, alone, self.max_tokens))
        if self.all_cores is not None:
            arms.append(pair_arm(PLAIN_ALL_CORES, self.all_cores, alone, self.max_tokens))
        return arms


def _one_temperature(
    arms: _Arms, prompts: list[tuple[int, ...]], value: float, repetitions: int, say: Say
) -> list[Run]:
    """Sweep, measure, print."""
    syncs = [arms.policy(f"sync K={k}", "sync", num_speculative_tokens=k) for k in SYNC_KS]
    sync, sync_speeds = best_arm(syncs, prompts, temperature=value, say=say)
    free = [arms.policy(name, name) for name in ("pipelined", "tree", "auto")]
    chosen = [*arms.plain(), sync, *free, *arms.ngrams(), *arms.as_programs()]
    ours = [arm.name for arm in chosen]
    tried = [sync_speeds]
    if arms.peer is not None:
        assisted = [
            arms.peer.arm(f"HF assisted {k or 'default'}", "assisted", k) for k in ASSISTED_KS
        ]
        best, speeds = best_arm(assisted, prompts, temperature=value, say=say)
        tried.append(speeds)
        chosen += [arms.peer.arm("HF plain", "plain"), best, arms.peer.arm("HF lookup", "lookup")]
    if arms.llama is not None:
        chosen += [arms.llama.arm(f"llama.cpp {mode}", mode) for mode in ("plain", "lookup")]
    runs = measure(chosen, prompts, temperature=value, repetitions=repetitions, say=say)
    names = [arm.name for arm in chosen]
    typer.echo(f"\ntemperature {value:g}")
    if (simulated := arms.pair.config.simulated) is not None:
        typer.echo(simulation(simulated))
    typer.echo(table(runs, names, plain=PLAIN, sync=sync.name))
    compared = names if value == 0 else ours
    typer.echo(equality(runs, [name for name in compared if name != PLAIN], PLAIN))
    typer.echo(host_time(runs, ours))
    if lost := lost_drafters(runs):
        typer.echo(f"texts without their drafter, which was lost (measure again): {lost}")
    for speeds in tried:
        typer.echo(swept(speeds))
    return runs
