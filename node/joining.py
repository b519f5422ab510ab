"""Runs a node that was started by hand: `python -m target_node --join tcp://HOST:PORT --keys DIR`.

The node reads its weights once, and then serves one coordinator after another: it sends its Hello
until a coordinator answers, works until that coordinator ends or falls silent, and sends its Hello
again. If a coordinator answers that the node does not fit, the node says why and ends. A signal
ends it at any time (`ending.py`).

The node connects and the coordinator listens, and not the other way round: so only one port of one
host has to be open, however many nodes there are, and only nodes that know the coordinator's key
can be its nodes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
from proto.installation import MODELS, node_program
from proto.links.keys import names_of, of_node, own_name, with_keys
from proto.links.transport import check_endpoint
from proto.messages import MAX_SESSIONS, Role
from proto.node_config import EXIT_FAILED, EXIT_UNUSABLE, MAX_RANKS, NodeConfig
from proto.system import check_spare

if TYPE_CHECKING:
    from engine.loading import Engine
    from node.loading import Serve

ASK_S = 5.0  # a connection without an answer for so many seconds is replaced by a new one
PAUSE_S = 0.5  # between two connections


class Voice:
    """Prints to stderr what the node is doing; a state that is set again is not repeated."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._state = ""

    @property
    def state(self) -> str:
        """Return the last state that was printed."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            typer.echo(f"{self._role}: {state}", err=True)


Endpoint = Annotated[
    str,
    typer.Option(
        "--join", metavar="tcp://HOST:PORT", help="Address where the coordinator listens."
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder with this node's keys and the coordinator's public key."
    ),
]
Name = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Name of this node. Several are called target-1 to target-8, or drafter-1 to "
        "drafter-5. Default: the name whose secret key lies in --keys, else the first.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        show_default=False,
        help="The model: a folder, or a name on the hub. Default: the one that comes with "
        "Slipstream.",
    ),
]


def _revision(flag: str) -> Any:
    """Return a flag for the revision of the model that another flag names."""
    return typer.Option(metavar="REVISION", help=f"Branch, tag or commit of {flag} on the hub.")


ModelRevision = Annotated[str | None, _revision("--model")]
TargetRevision = Annotated[str | None, _revision("--target")]
HomeRevision = Annotated[
    str | None,
    typer.Option(
        "--home-revision",
        "--heads-revision",
        metavar="REVISION",
        help="Branch, tag or commit of --home-drafter on the hub.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Number type: float32, bfloat16, float16, or auto: that of the checkpoint. A drafter "
        "can have fastest: the fastest, by timing.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Where the model runs. cuda:0: that GPU. cpu: all cores. cpu:0, cpu:0-6: these "
        "cores. cuda:0-3 or cpu:0,cpu:1: these devices share the model.",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_RANKS,
        metavar="N",
        help="How many processes share the model. They run on that many GPUs, counted from "
        "--device, or divide its cores.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="The most tokens of a text. Default: the model's own limit, or what fits into memory.",
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(min=1, max=MAX_SESSIONS, metavar="N", help="The most texts at once."),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1,
        metavar="NUMBER",
        help="The share of the device's memory for weights and cache. For example 0.9. On a CPU it "
        "is a share of the machine's memory. The shares of nodes on one device add up. Default: as "
        "much as leaves room for another node.",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which forward pass runs the model: auto, fused, graphs or reference.",
    ),
]
Quantization = Annotated[
    str,
    typer.Option(metavar="NAME", help="Round the weights to 8 or 4 bits, on a CPU: int8 or int4."),
]
Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="For a drafter that is a head: the target, a folder or a name on the hub. The head "
        "takes from it what it lacks.",
    ),
]
HomeDrafter = Annotated[
    str,
    typer.Option(
        "--home-drafter",
        "--heads",
        metavar="MODEL",
        help="For a target: a draft model or a head that drafts in its process, a folder or a "
        "name on the hub.",
    ),
]
SimulateMs = Annotated[
    float,
    typer.Option(
        min=0, metavar="MS", help="Simulate another device: each forward pass takes this long."
    ),
]
SimulateMsPerRow = Annotated[
    float,
    typer.Option(
        min=0, metavar="MS", help="Simulate another device: each row of a pass adds this time."
    ),
]


def main(role: Role, load_serve: Callable[[], "Serve"]) -> int:
    """Run a node that was started by hand; returns its exit status; prints errors as one line."""
    return _status_of(command_line(role, load_serve), node_program(role))


def command_line(role: Role, load_serve: Callable[[], "Serve"]) -> typer.Typer:
    """Return the command line of a node started by hand: one command with its flags."""

    def join(
        endpoint: Endpoint,
        keys: Keys = None,
        name: Name = "",
        model: Model = str(MODELS / role),
        revision: ModelRevision = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        tensor_parallel_size: TensorParallelSize = 1,
        max_model_len: MaxModelLen = None,
        max_num_seqs: MaxNumSeqs = 8,
        gpu_memory_utilization: GpuMemoryUtilization = None,
        backend: Backend = "auto",
        quantization: Quantization = "",
        target: Target = "",
        target_revision: TargetRevision = None,
        home_drafter: HomeDrafter = "",
        home_revision: HomeRevision = None,
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
            gpu_memory_utilization=gpu_memory_utilization or 0.0,
            backend=backend,
            quantization=quantization,
            target=target,
            target_revision=target_revision,
            home_drafter=home_drafter,
            home_revision=home_revision,
            simulated_ms=simulate_ms,
            simulated_ms_per_row=simulate_ms_per_row,
        )
        serve_all(config if own is None else with_keys(config, own), load_serve(), Voice(role))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(join)
    return app


def _checked(name: str, role: Role) -> str:
    """Return the name if a node of this role may have it; else raise ConfigurationError."""
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
    """Load the model, and serve one coordinator after another, for ever.

    Raises:
        NodeError, ModelError: the engine cannot be loaded or cannot go on.
        RefusedError: a coordinator answers that the node does not fit.
    """
    from node.loading import load  # takes seconds; mistakes in the options were reported before

    engine = load(config, voice)
    while True:
        voice.state = waiting(config)
        serve_one(config, engine, serve, voice)


def waiting(config: NodeConfig) -> str:
    """Return the state of a node that has no coordinator yet, as shown to people."""
    knowing = " that knows its key" if config.public_key else ""
    return f"waits for a coordinator at {config.endpoint}{knowing}"


def serve_one(config: NodeConfig, engine: "Engine", serve: "Serve", voice: Voice) -> None:
    """Wait a while for a coordinator; if one answers, work for it until it is gone."""
    from node.loading import introduce

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
        pass  # no coordinator is there yet: the caller tries again
    except RefusedError:
        raise  # the node would be refused again, unless it has another model or release
    except RemoteProtocolError as error:
        voice.state = str(error)
    except SlipstreamError as error:
        tell(connection, error)
        raise
    finally:
        heart.stop()
        connection.close()
    # A coordinator that ends waits until its nodes are gone: do not connect to it again.
    time.sleep(PAUSE_S)
