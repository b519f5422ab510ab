"""`python -m coordinator serve`: OpenAI's API in front of a warm pair."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.chat import has_chat_template
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import naming_flags
from coordinator.api.launch import LaunchConfig
from coordinator.api.pair import Pair
from coordinator.api.replicas import ReplicasConfig
from coordinator.api.without_effect import without_effect
from coordinator.cli import log_format, plugins
from coordinator.cli.account_view import dry_run, explaining
from coordinator.cli.flags import DryRun, Flags, with_settings
from coordinator.cli.generate import launcher_for
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.wrapping import WIDTH, continued, for_stderr
from coordinator.cli.writers import Progress
from coordinator.http.settings import ServeConfig
from coordinator.journal.records import Head
from coordinator.journal.writing import Journal
from proto.errors import ConfigurationError
from proto.installation import missing
from proto.messages import Role

VERSION = "slipstream.version"  # where the context of a command has it
# Addresses that mean every one of this machine: one of them, at which a browser finds the server.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
KEY = "YOUR_KEY"  # a placeholder
# The route and the body of a request that a model completes, and of one that a chat model answers.
COMPLETES = "completions", '{"prompt": "def read(path):", "max_tokens": 48, "temperature": 0}'
ANSWERS = "chat/completions", '{"messages": [{"role": "user", "content": "Who are you?"}]}'


@with_settings
def serve(
    *,
    context: typer.Context,
    server: ServeConfig,
    pair: Annotated[PairConfig, Flags(argument=True)],
    speculation: SpeculationConfig,
    launch: LaunchConfig,
    replicas: ReplicasConfig,
    is_dry: DryRun = False,
) -> None:
    """Serve OpenAI's API over HTTP, for many clients at once.

    Completions, chat and models, and a page that shows speculation happen.
    """
    try:
        from coordinator.http import serving
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"serve needs {missing(str(error.name), 'serve')}") from error
    speculation.check(pair)
    if is_dry:
        dry_run(pair, drafts=speculation.drafts)
        return
    keys = server.read_keys()
    if replicas.ray_serve:
        _with_ray_serve(pair, speculation, server, launch, replicas)
        return
    bound = serving.listen(server)
    with bound, journal_of(server) as journal:
        explained = explaining(pair, drafts=speculation.drafts)
        with explained, Progress(Console(stderr=True), models_of(pair)) as progress:
            with_drafter = speculation.drafts and pair.has_draft_process
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
            unheeded = without_effect(pair, speculation, is_remote=launch.nodes == "remote")
            unheeded += server.without_effect(keys)
            kept = _opened(journal, started)
            for line in (*started.whereabouts(), *started.notices(), *unheeded, *kept):
                typer.echo(for_stderr(harmless(line)), err=True)
            model = server.served_model_name or _name_of(pair)
            url = serving.place_of(bound)
            line = (
                f"{model} is served at {url}/v1: {started.num_seqs} texts at once, "
                f"{server.max_queue} may wait; Ctrl-C ends"
            )
            ways = ways_in(url, has_keys=bool(keys), is_chat=has_chat_template(started))
            lines = [for_stderr(harmless(line)), *ways]

            def ready(num_running: int) -> None:
                for line in (*_going_on(num_running), *lines):
                    typer.echo(line, err=True)
                log_format.use(server.log_format)

            version = context.meta.get(VERSION, "")
            # Requests come from programs, whose fields are no flags.
            with naming_flags(are_read=False):
                named = serving.Named(model, version)
                serving.serve(llm, named, server, keys, bound, ready, journal)


@contextmanager
def journal_of(server: ServeConfig) -> Iterator[Journal | None]:
    """Lock the journal's folder while inside; None: no journal is wanted."""
    if server.journal is None:
        yield None
        return
    with Journal(server.journal, server.journal_mb << 20) as journal:
        yield journal


def _opened(journal: Journal | None, pair: Pair) -> list[str]:
    """Read the journal of a pair, if there is one; return lines about what was found."""
    if journal is None:
        return []
    journal.open(head_of(pair))
    return journal.notices


def _going_on(num_running: int) -> list[str]:
    """Return a line if answers of the journal are written on."""
    are = "answer goes" if num_running == 1 else "answers go"
    return [f"{num_running} {are} on that the journal holds"] if num_running else []


def head_of(pair: Pair) -> Head:
    """Return whose journal it is: its texts go on only at a target that is the same."""
    hello = pair.hello(Role.TARGET)
    model = Path(hello.model).name
    return Head(f"{model}, {hello.dtype}", hello.logits_size, hello.fingerprint.digest)


def _with_ray_serve(
    pair: PairConfig,
    speculation: SpeculationConfig,
    server: ServeConfig,
    launch: LaunchConfig,
    replicas: ReplicasConfig,
) -> None:
    """Serve with Ray Serve until a signal. Raises ConfigurationError, TransportError, NodeError."""
    if launch.nodes == "remote" or launch.ray_pack:
        flag = "--ray-pack" if launch.ray_pack else "--nodes remote"
        raise ConfigurationError(f"{flag} is not for --ray-serve, whose replicas start their nodes")
    if server.port == 0:
        raise ConfigurationError("--ray-serve needs a --port; 0 stands for any")
    plugins.ray_serve()(
        launch.ray or "auto",
        *(pair, speculation, server, replicas),
        server.served_model_name or _name_of(pair),
        lambda line: typer.echo(for_stderr(harmless(line)), err=True),
    )


def ways_in(url: str, *, has_keys: bool, is_chat: bool) -> list[str]:
    """Return lines that fit 80 columns: where the page is, and a command that asks for a text.

    url       of the server, without a path
    has_keys  requests must have a key, for which there is a placeholder
    is_chat   the model answers conversations
    """
    for every, here in EVERYWHERE.items():
        url = url.replace(f"//{every}:", f"//{here}:")
    key = f" --header 'Authorization: Bearer {KEY}'" if has_keys else ""
    form = "--header 'Content-Type: application/json'"
    route, body = ANSWERS if is_chat else COMPLETES
    command = f"  curl {url}/v1/{route}{key} {form} --data '{body}'"
    said = f" ({KEY}: one of the API keys)" if has_keys else ""
    return [f"the page: {url}/", f"at a shell{said}:", *continued(command, WIDTH)]


def _name_of(pair: PairConfig) -> str:
    """Return the model's name on the hub, or the last part of a folder's path."""
    path = Path(pair.target)
    return path.name if path.exists() else pair.target
