"""A node that was started by hand: `python -m target_node --join tcp://HOST:PORT --keys DIR`.

It reads its weights once, and then serves one coordinator after another: it introduces itself until
one answers, works until that one says that it ends, or is silent, and introduces itself again. If
one answers that the node does not fit, the node says why and ends. A signal ends it at any time
(`ending.py`).

The node connects and the coordinator listens, and not the other way round: so one port of one host
has to be open, however many nodes there are, and a coordinator's nodes are those that know its key.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from node.process import Heart, connect, tell
from proto.errors import (
    ClosedError,
    ConfigurationError,
    NoAnswerError,
    RefusedError,
    RemoteProtocolError,
    SlipstreamError,
    shown,
)
from proto.installation import MODELS
from proto.links.keys import names_of, of_node, own_name, with_keys
from proto.links.transport import check_endpoint
from proto.messages import MAX_SESSIONS, Role
from proto.node_config import EXIT_FAILED, EXIT_UNUSABLE, MAX_RANKS, NodeConfig
from proto.system import check_spare

if TYPE_CHECKING:
    from engine.loading import Engine
    from node.loop import Serve

ASK_S = 5.0  # so long one connection is tried, then a new one
PAUSE_S = 0.5  # between two connections


class Voice:
    """Says on standard error what the node is doing, each thing once."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._state = ""

    @property
    def state(self) -> str:
        """The latest."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            typer.echo(f"{self._role}: {state}", err=True)


Endpoint = Annotated[
    str, typer.Option("--join", metavar="tcp://HOST:PORT", help="Where a coordinator listens.")
]
Keys = Annotated[
    Path | None, typer.Option(help="Folder with this node's keys and the coordinator's public one.")
]
Name = Annotated[
    str,
    typer.Option(
        help="Of a drafter beside others: drafter-2 to drafter-5. Default: the one whose secret "
        "key lies in --keys, or the first."
    ),
]
Model = Annotated[str, typer.Option(help="Folder or name of the model.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit.")]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16; of a drafter also fastest.")
]
Device = Annotated[
    str,
    typer.Option(
        help="cuda:0, cpu (all cores), cpu:0 (that core) or cpu:0-6 (those); cuda:0-3 or "
        "cpu:0,cpu:1: a part of the model on each."
    ),
]
TensorParallelSize = Annotated[
    int, typer.Option(min=1, max=MAX_RANKS, help="Number of GPUs, or of parts of the cores.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2, help="Most tokens of a text. Default: the model's own limit, or what fits."
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, max=MAX_SESSIONS, help="Most texts at once.")]
Backend = Annotated[str, typer.Option(help="auto, fused, graphs, compiled or reference.")]
Target = Annotated[
    str,
    typer.Option(
        help="Of a drafter that is a head: the target's folder or name, for what the head lacks."
    ),
]
Heads = Annotated[
    str, typer.Option(help="Of a target: heads that draft in its process: folder or name.")
]
SimulateMs = Annotated[
    float, typer.Option(min=0, help="Simulate another device: a forward takes so long.")
]
SimulateMsPerRow = Annotated[
    float, typer.Option(min=0, help="And so much longer for each row beyond the first.")
]


def main(role: Role, load_serve: Callable[[], "Serve"]) -> int:
    """The main of such a node: returns its exit status; an error becomes a line."""

    def join(
        endpoint: Endpoint,
        keys: Keys = None,
        name: Name = "",
        model: Model = str(MODELS / role),
        revision: Revision = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        tensor_parallel_size: TensorParallelSize = 1,
        max_model_len: MaxModelLen = None,
        max_num_seqs: MaxNumSeqs = 8,
        backend: Backend = "auto",
        target: Target = "",
        target_revision: Revision = None,
        heads: Heads = "",
        heads_revision: Revision = None,
        simulate_ms: SimulateMs = 0.0,
        simulate_ms_per_row: SimulateMsPerRow = 0.0,
    ) -> None:
        """Load a model and serve one coordinator after another, until Ctrl-C."""
        name = _checked(name, role) if name else own_name(keys, role)
        own = None if keys is None else of_node(keys, name)
        check_endpoint(endpoint, is_encrypted=own is not None)
        check_spare()
        config = NodeConfig(
            role=role,
            endpoint=endpoint,
            identity=name,
            secret="" if own is None else own.coordinator,
            model=model,
            revision=revision,
            dtype=dtype,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len or 0,
            max_num_seqs=max_num_seqs,
            backend=backend,
            target=target,
            target_revision=target_revision,
            heads=heads,
            heads_revision=heads_revision,
            simulated_ms=simulate_ms,
            simulated_ms_per_row=simulate_ms_per_row,
        )
        serve_all(config if own is None else with_keys(config, own), load_serve(), Voice(role))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(join)
    return _status_of(app, f"python -m {role}_node")


def _checked(name: str, role: Role) -> str:
    """A name that a node of this role may have. Raises ConfigurationError."""
    if name not in (names := names_of(role)):
        known = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        raise ConfigurationError(f"--name: a {role} is called {known}, not {shown(name)}")
    return name


def _status_of(app: typer.Typer, name: str) -> int:
    try:
        app(prog_name=name, standalone_mode=False)
    except (ConfigurationError, RefusedError) as error:
        typer.echo(f"error: {error}", err=True)
        return EXIT_UNUSABLE
    except SlipstreamError as error:
        typer.echo(f"error: {error}", err=True)
        return EXIT_FAILED
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)()
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        return EXIT_UNUSABLE
    return 0


def serve_all(config: NodeConfig, serve: "Serve", voice: Voice) -> NoReturn:
    """One coordinator after another.

    Raises NodeError, ModelError: the engine cannot go on; RefusedError: it does not fit.
    """
    from node.loop import load  # takes seconds: what was typed wrong has been said

    engine = load(config, voice)
    while True:
        voice.state = waiting(config)
        serve_one(config, engine, serve, voice)


def waiting(config: NodeConfig) -> str:
    """What a node does that has no coordinator."""
    knowing = " that knows its key" if config.public_key else ""
    return f"waits for a coordinator at {config.endpoint}{knowing}"


def serve_one(config: NodeConfig, engine: "Engine", serve: "Serve", voice: Voice) -> None:
    """Ask for a coordinator for a while; where one answers, work for it until it is gone."""
    from node.loop import introduce

    connection = connect(config)
    heart = Heart(config)
    heart.state = "ready"
    try:
        welcome = introduce(config, connection, engine, heart, ASK_S)
        voice.state = "serves a coordinator"
        serve(config, engine, welcome, connection, heart, has_lifeline=False)
    except ClosedError as error:
        voice.state = str(error)
    except NoAnswerError:
        pass  # nobody is there yet: it is asked again
    except RefusedError:
        raise  # it would be refused again, until somebody starts it with another model or release
    except RemoteProtocolError as error:
        voice.state = str(error)
    except SlipstreamError as error:
        tell(connection, error)
        raise
    finally:
        heart.stop()
        connection.close()
    # A coordinator that ends waits until its nodes are gone: do not come back to that one.
    time.sleep(PAUSE_S)
