"""`python -m coordinator verify-lossless`: check a pair and print what held."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import checked
from coordinator.api.pair import MakeLauncher, Pair
from coordinator.api.refusals import one_of
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.loading_screen import models_of
from coordinator.cli.writers import Progress
from coordinator.launching.launcher import Launcher
from lab.lossless import checks as lossless
from lab.lossless.checks import Check, Text
from proto.errors import ConfigurationError
from proto.messages import Role
from proto.policies import TABLE

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "for name, value in sorted(items.items()):\n",
    "The quick brown fox jumps over",
)
EXIT_FAILED = 1
VERIFY = ("coupled", "token", "block")
CARELESS = {Role.TARGET: "lab.lossless.careless_target"}
TextPrompt = Annotated[
    list[str] | None, typer.Option(help="A text to continue; may be given several times.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]
Texts = Annotated[
    int, typer.Option(help="Sampled texts for each policy and rule.", min=200, max=1_000_000)
]


@with_settings
def verify_lossless(
    *,
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "drafter", "drafter_home", "target_device", "drafter_device"),
            "tensor_parallel_size",
            *("dtype", "backend", "reproducible"),
            dtype="float32",
            max_num_seqs=1,
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="May be given several times. Default: sync and auto.")
    ] = None,
    prompt: TextPrompt = None,
    num_texts: Texts = 600,
    as_json: Json = False,
) -> None:
    """Check that a pair writes what its target alone would write."""
    policies = _policies(policy)
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        if not as_json:
            typer.echo(_line(check))

    with _started(pair) as running:
        prompts = prompts_of(running, prompt)
        chances = lossless.joint(running, prompts[0])
        power = lossless.detectable(num_texts, chances)
        if not as_json:
            typer.echo(
                f"sampled: {num_texts} texts of {lossless.LENGTH} tokens a line, level "
                f"{lossless.LEVEL:g}; an effect of w = {power:.2f} is seen 95 % of the time\n"
            )
        for check in _checks(running, prompts, chances, policies, num_texts):
            add(check)
    with _started(pair, partial(Launcher, modules=CARELESS)) as running:
        add(lossless.careless(running, prompts[0], chances, policies[0], num_texts))
    passed = all(check.passed for check in checks)
    if as_json:
        lines = [{**dataclasses.asdict(check), "passed": check.passed} for check in checks]
        typer.echo(json.dumps({"passed": passed, "detectable_w": power, "checks": lines}))
    else:
        typer.echo("\nlossless" if passed else "\nNOT lossless")
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _started(config: PairConfig, make_launcher: MakeLauncher = Launcher) -> Pair:
    with Progress(Console(stderr=True), models_of(config)) as progress:
        return Pair(config, say=progress.say, make_launcher=make_launcher)


def _checks(
    pair: Pair,
    prompts: Sequence[Text],
    chances: lossless.Joint,
    policies: Sequence[SpeculationConfig],
    num_texts: int,
) -> Iterator[Check]:
    yield from lossless.greedy(pair, prompts, policies)
    yield from lossless.seeds(pair, prompts, policies)
    for verify in VERIFY:
        for policy in policies:
            ruled = policy.model_copy(update={"verify": verify})
            yield lossless.sampled(pair, prompts[0], chances, ruled, num_texts)


def _policies(names: Sequence[str] | None) -> list[SpeculationConfig]:
    default = list(lossless.POLICIES)
    every = [checked(SpeculationConfig, policy=row.name) for row in TABLE if row.drafts]
    known = {str(policy.policy): policy for policy in (*every, *default)}
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigurationError(one_of("--policy", known, unknown[0]))
    return [policy for name, policy in known.items() if name in names] if names else default


def prompts_of(pair: Pair, texts: Sequence[str] | None) -> list[Text]:
    """The texts, or some of ours, as token ids; also where the target has no tokenizer."""
    if pair.tokenization is None and not texts:
        return [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    return [pair.encode(text) for text in texts or PROMPTS]


def _line(check: Check) -> str:
    outcome = "ok" if check.passed else "FAILED"
    name = check.what if check.expected else f"{check.what} (must fail)"
    return f"{check.kind:8} {name:28} {outcome:7} {check.detail}"
