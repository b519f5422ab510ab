"""`python -m coordinator profile`: where the time of each process goes, as a table."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.api.config import PairConfig, SamplingParams, SpeculationConfig, checked
from coordinator.api.pair import Pair
from coordinator.cli import options
from coordinator.cli.display import WIDTH, Progress
from coordinator.cli.verify_lossless import TextPrompt, prompts_of
from deploy.experiments import shares
from deploy.experiments.shares import Profile
from deploy.experiments.tables import machine

WORDS = {
    "model": "model",
    "choose": "noise and choice",
    "prepare": "masks, tensors",
    "move": "cache rows",
    "decide": "tree, decisions",
    "decode": "reading messages",
    "send": "sending messages",
    "wait": "waiting",
}
_PAIR, _SPECULATION, _REQUEST = PairConfig(), SpeculationConfig(), SamplingParams()


def profile(
    target: options.Target = _PAIR.target,
    drafter: options.Drafter = _PAIR.drafter,
    target_device: options.TargetDevice = _PAIR.target_device,
    drafter_device: options.DrafterDevice = _PAIR.drafter_device,
    dtype: options.Dtype = _PAIR.dtype,
    backend: options.Backend = _PAIR.backend,
    busy_poll_us: options.BusyPoll = _PAIR.busy_poll_us,
    policy: options.Policy = _SPECULATION.policy,
    num_speculative_tokens: options.NumSpeculativeTokens = _SPECULATION.num_speculative_tokens,
    window: options.Window = _SPECULATION.window,
    adaptive: options.Adaptive = _SPECULATION.adaptive,
    also_ngram: options.AlsoNgram = _SPECULATION.also_ngram,
    temperature: options.Temperature = _REQUEST.temperature,
    max_tokens: options.MaxTokens = 256,
    prompt: TextPrompt = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
) -> None:
    """Say where the time of each process goes while texts are written."""
    config = checked(
        PairConfig,
        target=target,
        drafter=drafter,
        target_device=target_device,
        drafter_device=drafter_device,
        dtype=dtype,
        backend=backend,
        busy_poll_us=busy_poll_us,
    )
    speculation = checked(
        SpeculationConfig,
        policy=policy,
        num_speculative_tokens=num_speculative_tokens,
        window=window,
        adaptive=adaptive,
        also_ngram=also_ngram,
    )
    speculation.check(config)
    request = checked(
        SamplingParams, temperature=temperature, max_tokens=max_tokens, seed=1, ignore_eos=True
    )
    with Progress(Console(stderr=True)) as progress:
        started = Pair(config, with_drafter=speculation.drafts, say=progress.say)
    with started as pair:
        found = shares.profile(pair, prompts_of(pair, prompt), speculation, request)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    typer.echo(f"machine: {machine()}\n")
    Console(width=WIDTH).print(_table(found))
    typer.echo(
        f"{speculation.policy}: {found.num_tokens} tokens in {found.num_passes} passes, "
        f"{found.tokens_per_second:.0f} tokens/s,\nmean acceptance length "
        f"{found.mean_acceptance_length:.2f}; in no model: {found.no_model_ms:.3f} ms a pass "
        f"(median),\nof it {found.host_ms:.3f} on the target's host"
    )
    if found.num_without_drafter:
        num_lost = found.num_without_drafter
        typer.echo(f"the drafter was lost: {num_lost} texts were without it, at least in part")
    for share in found.shares:
        if share.num_uncaptured:
            typer.echo(
                f"{share.process}: {share.num_uncaptured} of {share.number} had more rows than any "
                "CUDA graph, and ran kernel by kernel"
            )


def _table(found: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for share in found.shares:
        table.add_column(f"{share.process}\nms/{share.unit}", justify="right")
        table.add_column("\n%", justify="right")
    totals = [sum(share.ms.values()) for share in found.shares]
    for phase, words in WORDS.items():
        cells = []
        for share, total in zip(found.shares, totals, strict=True):
            cells += [f"{share.ms[phase]:.3f}", f"{share.ms[phase] / total:.0%}"]
        table.add_row(words, *cells)
    ends = [cell for total in totals for cell in (f"{total:.3f}", "")]
    table.add_row("together", *ends)
    return table
