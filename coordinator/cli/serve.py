"""`python -m coordinator serve`: OpenAI's API in front of a warm pair."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.pair import Pair
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.generate import launcher_for
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.writers import Progress
from coordinator.http.settings import ServeConfig
from proto.errors import ConfigurationError
from proto.installation import missing

VERSION = "slipstream.version"  # where the context of a command has it


@with_settings
def serve(
    *,
    context: typer.Context,
    server: ServeConfig,
    pair: Annotated[PairConfig, Flags(argument=True)],
    speculation: SpeculationConfig,
    launch: LaunchConfig,
) -> None:
    """Serve OpenAI's API over HTTP, for many clients at once.

    Completions, chat and models, and a page that shows speculation happen.
    """
    try:
        from coordinator.http import serving
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"serve needs {missing(str(error.name), 'serve')}") from error
    speculation.check(pair)
    keys = server.read_keys()
    bound = serving.listen(server)
    with bound:
        with Progress(Console(stderr=True), models_of(pair)) as progress:
            with_drafter = speculation.drafts and pair.has_draft_model
            launcher = launcher_for(
                launch, pair, context.obj, with_drafter=with_drafter, invite=progress.invite
            )
            started = Pair(
                pair,
                with_drafter=speculation.drafts,
                say=progress.say,
                make_launcher=launcher,
                # A target that was started by hand may be started again by hand.
                awaits_target=launch.nodes == "remote",
            )
        with AsyncLLM.of(started, speculation, server.max_queue) as llm:
            for line in (*started.whereabouts(), *started.notices()):
                typer.echo(harmless(line), err=True)
            model = server.served_model_name or _name_of(pair)
            line = (
                f"{model} is served at {serving.place_of(bound)}/v1: {started.num_seqs} texts at "
                f"once, {server.max_queue} may wait; Ctrl-C ends"
            )

            def ready() -> None:
                typer.echo(harmless(line), err=True)

            version = context.meta.get(VERSION, "")
            serving.serve(llm, serving.Named(model, version), server, keys, bound, ready)


def _name_of(pair: PairConfig) -> str:
    """Return the model's name on the hub, or the last part of a folder's path."""
    path = Path(pair.target)
    return path.name if path.exists() else pair.target
