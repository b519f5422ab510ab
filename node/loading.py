"""What a node does before its loop: it loads its model, and introduces itself."""

import gc
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, Protocol

from engine.checkpoint.checkpoint import name_and_size
from engine.checkpoint.files import one_line
from engine.cpu_library import compile_in_background
from engine.device import threads_on
from engine.errors import EngineError, OutOfMemory, RankError, lacks_memory
from engine.fastest import FASTEST
from engine.heads.head_loading import LoadedHead, load_head_engine
from engine.heads.recognised import head_kind_of
from engine.kept import Kept
from engine.loading import Engine, load_engine
from engine.places import Places, places_of, time_places
from engine.room import Utilization
from engine.tensor_parallel.devices import rank_devices
from node.forwards import vocabulary_of
from node.placing import Place, Placing
from node.process import HANDSHAKE_LIMIT_S, Heart, shake_hands
from node.rows import CHAINS, RECORDED_CHILDREN, RECORDED_ROWS, TIMED_ROWS
from proto.errors import ModelError, NodeError
from proto.head_kinds import is_mtp
from proto.links.transport import Connection
from proto.messages import (
    HEADS_AT_HOME,
    MODEL_AT_HOME,
    PROTOCOL_VERSION,
    Fingerprint,
    Hello,
    Role,
    Welcome,
)
from proto.node_config import (
    CACHE_PARTS,
    FETCHING,
    READY_BUT,
    NodeConfig,
    Placement,
    cache_part,
)
from proto.system import is_folder

logger = logging.getLogger(__name__)

_COMPILING = "C++ for this processor is being compiled, once: starts after that are faster"


class HasState(Protocol):
    """Is told what a node is doing, for people: a `Heart`, or an object that shows it."""

    state: str


class Serve(Protocol):
    """The function that does a node's work, of `target_node.worker` or `drafter_node.worker`."""

    def __call__(
        self,
        config: NodeConfig,
        engine: Engine,
        welcome: Welcome,
        connection: Connection,
        heart: Heart,
        /,
        *,
        has_lifeline: bool = True,
    ) -> NoReturn:
        """Work for the coordinator that has sent this Welcome; never returns."""


def work(
    config: NodeConfig, connection: Connection, heart: Heart, load_serve: Callable[[], Serve]
) -> None:
    """Load the model, introduce the node, and serve until the process ends.

    Raises what `load` raises.
    """
    serve = load_serve()
    gc.freeze()
    engine = load(config, heart)
    serve(config, engine, introduce(config, connection, engine, heart), connection, heart)


def load(config: NodeConfig, heart: HasState) -> Engine:
    """Load, check and warm up the node's model, and return its engine.

    With fixed rows it is warmed up for that number of rows alone.

    Raises:
        NodeError: there is not enough memory now, or one of its ranks has ended.
        ModelError: the model cannot be used as it is configured.
    """

    def say(state: str) -> None:
        heart.state = state

    if not is_folder(config.model) and not is_mtp(config.model):
        say(FETCHING)
    try:
        engine = _load(config, say)
    except (OutOfMemory, RankError) as error:
        raise NodeError(str(error)) from error
    except EngineError as error:
        raise ModelError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise NodeError(_without_room(config, error)) from error
    # Objects that stay until the end are taken out of garbage collection: a compiler for GPUs alone
    # has hundreds of thousands, and now and then a text would wait for a tenth of a second.
    gc.collect()
    gc.freeze()
    say(_ready(config, engine))
    return engine


def _ready(config: NodeConfig, engine: Engine) -> str:
    """Return the state of a node that has loaded; on a CPU, have our C++ compiled if it is not.

    Not in reproducible mode, which has tried to compile it.
    """
    if config.fixed_rows or engine.loaded.device.type != "cpu" or not compile_in_background():
        return "ready"
    return f"{READY_BUT}{_COMPILING}"


def _without_room(config: NodeConfig, error: RuntimeError | MemoryError) -> str:
    """Return why a model that was loaded cannot run: computing takes memory as well."""
    return (
        f"{config.model}: there is no memory left beside its weights and its cache "
        f"({one_line(error)}); use a lower --max-model-len or --max-num-seqs, or end what else "
        "runs there"
    )


def _load_head(config: NodeConfig, say: Callable[[str], None]) -> Engine:
    """Return the engine of a drafter that is a head."""
    vocabulary_of(config)  # now, so that no text waits for it
    return load_head_engine(
        config.model,
        revision=config.revision,
        target=config.target,
        target_revision=config.target_revision,
        dtype=config.dtype,
        device=config.device,
        max_len=config.max_model_len,
        part=cache_part(config),
        utilization=_utilization(config),
        num_lanes=config.max_num_seqs,
        warm_rows=TIMED_ROWS[config.role],
        num_children=RECORDED_CHILDREN,
        say=say,
        quantization=config.quantization,
    )


def _load(config: NodeConfig, say: Callable[[str], None]) -> Engine:
    if config.role is Role.DRAFTER and config.target:
        return _load_head(config, say)
    home = _home_model(config, say)
    engine = load_engine(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_len=config.max_model_len,
        part=cache_part(config),
        utilization=_utilization(config),
        num_lanes=config.max_num_seqs,
        fixed_rows=config.fixed_rows or None,
        warm_rows=TIMED_ROWS[config.role],
        say=say,
        checks_bits=config.role is Role.TARGET,
        reads_vocabulary=True,
        backend=config.backend,
        row_counts=RECORDED_ROWS[config.role],
        num_children=RECORDED_CHILDREN if config.role is Role.DRAFTER else (),
        head_children=RECORDED_CHILDREN if config.home_drafter and home is None else (),
        chains=CHAINS if config.role is Role.DRAFTER else (),
        tensor_parallel_size=config.tensor_parallel_size,
        layers=config.layers,
        quantization=config.quantization,
        kept=kept_of(config),
    )
    engine = _placed(engine, config, say)
    if home is not None:
        refuse_other_tokenizer(home, engine)
        return replace(engine, home_drafter=home)
    return _with_heads(engine, config, say) if config.home_drafter else engine


def _with_heads(engine: Engine, config: NodeConfig, say: Callable[[str], None]) -> Engine:
    """Return a target's engine with the heads that its config names."""
    say("loading heads")
    heads = load_head_engine(
        config.home_drafter,
        revision=config.home_revision,
        target=config.model,
        target_revision=config.revision,
        dtype=config.home_dtype or "auto",
        device=str(engine.loaded.device),
        max_len=engine.max_len,
        num_lanes=engine.executor.lanes.count,
        warm_rows=TIMED_ROWS[Role.DRAFTER],
        say=say,
        is_alone=False,
        quantization=config.home_quantization,
    )
    # To see what is free for the heads, the memory of the target's prompts was given back.
    engine.executor.warm_up_prompts()
    return replace(engine, home_drafter=heads, max_len=min(engine.max_len, heads.max_len))


def _home_model(config: NodeConfig, say: Callable[[str], None]) -> Engine | None:
    """Return the engine of a draft model for the target's process; None: there is none.

    It is loaded before the target, which then takes what is left of the memory. Of a target on
    several devices it is on the first one.
    """
    name, revision = config.home_drafter, config.home_revision
    if not name or head_kind_of(name, revision) is not None:
        return None
    say("loading the draft model")
    device, *_ = rank_devices(config.device, config.tensor_parallel_size)
    engine = load_engine(
        name,
        revision=revision,
        dtype=config.home_dtype or (FASTEST if device.startswith("cpu") else config.dtype),
        device=device,
        max_len=config.max_model_len,
        part=CACHE_PARTS[Role.DRAFTER],
        utilization=Utilization(config.gpu_memory_utilization, config.target_bytes),
        num_lanes=config.max_num_seqs,
        fixed_rows=None,
        warm_rows=TIMED_ROWS[Role.DRAFTER],
        say=say,
        backend=config.backend,
        row_counts=RECORDED_ROWS[Role.DRAFTER],
        num_children=RECORDED_CHILDREN,
        chains=CHAINS,
        quantization=config.home_quantization,
        kept=kept_of(config),
    )
    return replace(engine, num_threads=threads_on(engine.loaded.device))


def refuse_other_tokenizer(drafter: Engine, target: Engine) -> None:
    """Raise ModelError if a draft model at home has other tokens than its target."""
    ours, theirs = _fingerprint(drafter), _fingerprint(target)
    if not ours.is_like(theirs):
        raise ModelError(
            f"{drafter.loaded.name} has another tokenizer than the target: it needs a process of "
            "its own (--drafter-home own)"
        )


def kept_of(config: NodeConfig) -> Kept:
    """Return the table of what earlier starts have found out, as the config says."""
    return Kept(is_anew=config.tunes)


def _utilization(config: NodeConfig) -> Utilization:
    return Utilization(config.gpu_memory_utilization, config.peer_bytes)


def _placed(engine: Engine, config: NodeConfig, say: Callable[[str], None]) -> Engine:
    """Return the engine with the CPU cores that its passes may use, and their times where wanted.

    Nothing changes where passes are padded, because there no time may decide; with several ranks,
    on a GPU and for a drafter.
    """
    if config.role is Role.DRAFTER or (config.fixed_rows and not engine.bits):
        return engine
    loaded, backend = engine.loaded, engine.executor.backend
    if loaded.device.type != "cpu" or loaded.rank is not None:
        return engine
    places = places_of(config.device, config.shared_device)
    if places is None:
        return engine
    if config.placement == "auto" and places.has_more_cores:
        say("timing cores")
        model = name_and_size(config.model, config.revision)
        about = model, backend, config.quantization, str(loaded.dtype)
        time_places(places, engine.executor, engine.pass_s, about, kept_of(config))
    first = placing_of(places, config.placement).first(is_drafted=True)
    return replace(engine, places=places, device=places.names[first])


def placing_of(places: Places, placement: Placement) -> Placing:
    """Return what decides on which of these places passes run."""
    if not places.has_more_cores:
        return Placing(usual=Place.SHARED)
    fixed = {"apart": Place.APART, "shared": Place.SHARED}.get(placement)
    measured = dict(zip(Place, places.measured, strict=True))
    return Placing(measured, fixed, has_drafters_core=True)


def introduce(
    config: NodeConfig,
    connection: Connection,
    engine: Engine,
    heart: Heart,
    limit_s: float = HANDSHAKE_LIMIT_S,
) -> Welcome:
    """Send the coordinator a Hello about the loaded model; returns its Welcome.

    If the Welcome asks for a trace, recording begins. Raises RefusedError, NoAnswerError,
    RemoteProtocolError and ConfigurationError as `shake_hands` does.
    """
    loaded = engine.loaded
    hello = Hello(
        version=PROTOCOL_VERSION,
        role=config.role,
        secret=config.secret,
        fingerprint=_fingerprint(engine),
        logits_size=loaded.vocab_size,
        max_model_len=engine.max_len,
        model=config.model,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=engine.device,
        num_parameters=loaded.num_parameters,
        load_us=round(engine.load_s * 1e6),
        num_lanes=engine.executor.lanes.count,
        host=socket.gethostname(),
        backend=engine.executor.backend,
        simulated_us=round(config.simulated_ms * 1e3),
        simulated_us_per_row=round(config.simulated_ms_per_row * 1e3),
        layers=loaded.layers if isinstance(loaded, LoadedHead) else (),
        hidden_size=loaded.hidden_size,
        num_layers=0 if isinstance(loaded, LoadedHead) else loaded.num_layers,
        home_drafter=_at_home(engine.home_drafter),
        forms=engine.executor.forms,
        bits=engine.bits,
    )
    welcome = shake_hands(connection, hello, limit_s)
    if welcome.traced:
        heart.record()
    return welcome


def _fingerprint(engine: Engine) -> Fingerprint:
    digest, file_digest = engine.digests
    return Fingerprint(engine.vocab_size, digest, engine.loaded.eos_token_ids, file_digest)


def _at_home(drafter: Engine | None) -> str:
    """Return what runs the drafter in the target's process, for people; "": there is none."""
    if drafter is None:
        return ""
    what = HEADS_AT_HOME if isinstance(drafter.loaded, LoadedHead) else MODEL_AT_HOME
    return f"{drafter.executor.backend} {what}"
