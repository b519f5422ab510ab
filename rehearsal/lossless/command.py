"""`python -m coordinator verify-lossless`: check a pair and print which checks held."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import checked
from coordinator.api.pair import MakeLauncher, Pair
from coordinator.api.prompts import from_file
from coordinator.api.refusals import one_of
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.loading_screen import models_of
from coordinator.cli.wrapping import wrapped
from coordinator.cli.writers import WIDTH, Progress
from coordinator.launching.launcher import Launcher
from proto.errors import ConfigurationError
from proto.installation import missing
from proto.messages import Role
from proto.policies import TABLE
from rehearsal.lossless import checks as lossless
from rehearsal.lossless.checks import Check, Tokens

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "for name, value in sorted(items.items()):\n",
    "The quick brown fox jumps over",
)
EXIT_FAILED = 1
VERIFY = ("coupled", "token", "block")
CARELESS = {Role.TARGET: "rehearsal.lossless.careless_target"}
TextPrompt = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A text to continue. May be given several times."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Texts to continue. One per line, or JSON Lines as for `generate`.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object, no table.")]
Texts = Annotated[
    int,
    typer.Option(help="How many texts to sample for each policy and rule.", min=200, max=1_000_000),
]


@with_settings
def verify_lossless(
    *,
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "drafter", "drafter_home", "target_device", "drafter_device"),
            "tensor_parallel_size",
            *("dtype", "quantization", "backend", "reproducible"),
            max_num_seqs=1,
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy to check. May be given several times. Default: sync and auto.",
        ),
    ] = None,
    prompt: TextPrompt = None,
    prompt_file: PromptFile = None,
    num_texts: Texts = 600,
    as_json: Json = False,
) -> None:
    """Check that a pair writes what its target alone would write.

    The pair runs in the number type in which `generate` would run it, unless --dtype names another.
    """
    if find_spec("scipy") is None:
        raise ConfigurationError(f"verify-lossless needs {missing('scipy', 'lossless')}")
    policies, texts = _policies(policy), texts_of(prompt, prompt_file)
    checks: list[Check] = []
    say: Callable[[str], None] = (lambda _: None) if as_json else typer.echo

    def add(check: Check) -> None:
        checks.append(check)
        say(line_of(check))

    begun = time.monotonic()
    with _started(pair) as running:
        start_s = time.monotonic() - begun
        prompts = prompts_of(running, texts)
        proved = _proved(running)
        say(f"pair under test: {proved}")
        pace = lossless.pace(running, prompts[0], policies[0], start_s)
        rules = rules_for(running)
        if len(rules) < len(VERIFY):
            say("token, block and their planted mistake need the target's tokenizer: left out")
        expected_s = pace.duration_s(len(prompts), len(policies), len(rules), num_texts)
        say(f"this will take about {how_long(expected_s)} (--num-texts decides)")
        chances = lossless.joint(running, prompts[0])
        power = lossless.detectable(num_texts, chances)
        say(explained(num_texts, power))
        for check in _checks(running, prompts, chances, policies, rules, num_texts):
            add(check)
    if len(rules) == len(VERIFY):  # the planted mistake is one of a classical rule
        with _started(pair, partial(Launcher, modules=CARELESS)) as running:
            add(lossless.careless(running, prompts[0], chances, policies[0], num_texts))
    passed = all(check.passed for check in checks)
    if as_json:
        lines = [{**dataclasses.asdict(check), "passed": check.passed} for check in checks]
        report = {"passed": passed, "verdict": verdict(checks), "proved_for": proved}
        report |= {"expected_s": expected_s, "detectable_w": power, "checks": lines}
        typer.echo(json.dumps(report))
    say(f"\n{verdict(checks)}")
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _started(config: PairConfig, make_launcher: MakeLauncher = Launcher) -> Pair:
    """Start a pair while its progress is shown."""
    with Progress(Console(stderr=True), models_of(config)) as progress:
        return Pair(config, say=progress.say, make_launcher=make_launcher)


def _checks(
    pair: Pair,
    prompts: Sequence[Tokens],
    chances: lossless.Joint,
    policies: Sequence[SpeculationConfig],
    rules: Sequence[str],
    num_texts: int,
) -> Iterator[Check]:
    """Yield the result of every check: greedy, seeds, then sampled for each rule and policy."""
    yield from lossless.greedy(pair, prompts, policies)
    yield from lossless.seeds(pair, prompts, policies)
    for verify in rules:
        for policy in policies:
            ruled = policy.model_copy(update={"verify": verify})
            yield lossless.sampled(pair, prompts[0], chances, ruled, num_texts)


def rules_for(pair: Pair) -> tuple[str, ...]:
    """Return the rules of verification to check: the classical ones need one vocabulary."""
    return VERIFY[:1] if pair.drafts_in_other_words else VERIFY


def _policies(names: Sequence[str] | None) -> list[SpeculationConfig]:
    """Return the policies of these names (None: the default ones). Raises ConfigurationError."""
    default = list(lossless.POLICIES)
    every = [checked(SpeculationConfig, policy=row.name) for row in TABLE if row.drafts]
    known = {str(policy.policy): policy for policy in (*every, *default)}
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigurationError(one_of("--policy", known, unknown[0]))
    return [policy for name, policy in known.items() if name in names] if names else default


def texts_of(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the texts that are given, in words and in a file. Raises ConfigurationError."""
    return [*(prompts or ()), *(() if file is None else from_file(file))]


def prompts_of(pair: Pair, texts: Sequence[str] | None) -> list[Tokens]:
    """Return the texts (by default some of ours) as token ids; works without a tokenizer, too."""
    if pair.tokenization is None and not texts:
        return [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    return [pair.encode(text) for text in texts or PROMPTS]


def _proved(pair: Pair) -> str:
    """Return in words what the checks hold for: number type, backend and device of the target."""
    target = pair.hello(Role.TARGET)
    reproducible = " with --reproducible" if pair.config.reproducible else ""
    exact = ", exact" if target.bits else ""
    backend = f", backend {target.backend}" if target.backend else ""
    return f"target in {target.dtype}{exact}{reproducible} on {target.device}{backend}"


def how_long(seconds: float) -> str:
    """Return a time in words, such as "5 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def explained(num_texts: int, power: float) -> str:
    """Return an explanation of the `sampled` lines, in at most 80 columns."""
    words = (
        f"sampled: a chi-square test of {num_texts} texts of {lossless.LENGTH} tokens against the "
        "target's own probabilities. p is the chance of differences that are this large if both "
        f"distributions are equal. A line fails if p is below the level, {lossless.LEVEL:g}. A "
        f"distribution that is wrong by w = {power:.2f} (Cohen's effect size: 0.1 is small, 0.5 "
        "large) is found in 95 % of runs."
    )
    return "\n".join(wrapped(words, WIDTH)) + "\n"


def line_of(check: Check) -> str:
    """Return the report about a check, in lines of at most 80 columns."""
    if not check.expected:
        outcome = "caught" if check.passed else "NOT CAUGHT"
    elif not check.tested:
        outcome = "not tested"
    elif not check.passed:
        outcome = "FAILED"
    else:
        outcome = near_ties(check.num_near_ties) if check.num_near_ties else "ok"
    what = check.what if check.expected else f"{check.what}:"
    before = f"{check.kind:8} {what:16} {outcome:11} "
    return before + check.detail.replace("; ", "\n" + " " * len(before))


def near_ties(number: int) -> str:
    """Return the number with its noun, such as "2 near ties"."""
    return f"{number} near tie" + ("" if number == 1 else "s")


def verdict(checks: Sequence[Check]) -> str:
    """Return the last line of the report: "lossless", "equal but for ..." or "NOT lossless".

    It also names what was not tested. Only if every greedy text equals the target's own and seeds
    were tested is the pair "lossless".
    """
    if not all(check.passed for check in checks):
        return "NOT lossless"
    untested = "".join(f"; {check.kind} not tested" for check in checks if not check.tested)
    ties = sum(check.num_near_ties for check in checks)
    if ties:
        return f"equal but for {near_ties(ties)}{untested}"
    equal = "greedy texts equal, no difference found in the distribution"
    return equal + untested if untested else "lossless"
