"""`python -m coordinator tune`: times again what is chosen for these models at load, and keeps it.

At a usual start both nodes load at once, so what they time is disturbed and not kept. Here they
load one after another.
"""

import typer
from rich.console import Console

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.cli.flags import with_settings
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.wrapping import for_stderr
from coordinator.cli.writers import Progress, engines, write_out
from coordinator.launching.load import Load
from proto.messages import Role

BUSY = 0.1  # cores: with more than that taken by others, times are not kept


@with_settings
def tune(*, pair: PairConfig) -> None:
    """Choose threads, cores and number types for these models again, by timing, and keep that.

    Later starts take what was kept, if model, processor and settings are the same. Give the flags
    with which you start them. Let nothing else compute meanwhile: times that other programs have
    disturbed are not kept.
    """
    load = Load()
    with Progress(Console(stderr=True), models_of(pair)) as progress:
        started = Pair(pair, say=progress.say, tunes=True)
    with started as running:
        others = load.cores()
        registry = running.service.registry
        lines = [engines(registry.nodes)]
        for role in Role:
            for hello in registry.hellos(role):
                if hello.forms:
                    lines.append(f"{role} computed by {hello.forms}")
    write_out("".join(f"{harmless(line)}\n" for line in lines))
    if others > BUSY:
        told = (
            f"other programs used {others:.1f} cores meanwhile, so times may not have been kept: "
            "end them and run this again"
        )
        typer.echo(for_stderr(told), err=True)
