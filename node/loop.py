"""What a node does from its config to its end: it loads, introduces itself, and runs one loop.

The loop receives all messages, sends the machine a Tick, and performs the actions that the machine
asks for, for ever. It decides nothing, and passes a Compute on to the node's worker unread.
"""

import gc
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, Protocol, TypeVar

from engine.checkpoint.files import one_line
from engine.cpu_library import compile_in_background, library_name
from engine.errors import EngineError, OutOfMemory, RankError, lacks_memory
from engine.executor import Executor
from engine.heads.head_loading import LoadedHead, load_head_engine
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import Engine, load_engine
from engine.memory import Utilization
from engine.places import Places, places_of, time_places
from node.economics import CHAINS, RECORDED_CHILDREN, RECORDED_ROWS, TIMED_ROWS
from node.entrance import Handles
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    SharedAction,
    Tick,
    WaitUntil,
    Wipe,
)
from node.forwards import vocabulary_of
from node.placing import Place, Placing
from node.process import HANDSHAKE_LIMIT_S, BadFrames, Heart, shake_hands
from proto.codec import encode
from proto.errors import ClosedError, ConfigurationError, ModelError, NodeError, RefusedError
from proto.links.transport import Connection
from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import (
    BROKEN_OFF,
    PROTOCOL_VERSION,
    Close,
    Fault,
    FaultCode,
    Fingerprint,
    Heartbeat,
    Hello,
    Message,
    Role,
    Welcome,
)
from proto.node_config import FETCHING, READY_BUT, NodeConfig, Placement
from proto.stopwatch import Phase
from proto.system import is_folder

logger = logging.getLogger(__name__)

IDLE_S = 1.0
_COMPILING = "C++ for this processor is being compiled, once: starts after that are faster"
# The part of the free memory that the cache may take. A drafter is loaded first, and needs less for
# each token: if it took more, its target might find no room on the same GPU.
PARTS = {Role.TARGET: 1.0, Role.DRAFTER: 0.4}

Compute = TypeVar("Compute")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


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

    if not is_folder(config.model):
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


def _load(config: NodeConfig, say: Callable[[str], None]) -> Engine:
    if config.role is Role.DRAFTER and config.target:  # the model is a head
        vocabulary_of(config)  # now, so that no text waits for it
        return load_head_engine(
            config.model,
            revision=config.revision,
            target=config.target,
            target_revision=config.target_revision,
            dtype=config.dtype,
            device=config.device,
            max_len=config.max_model_len,
            part=_part(config),
            utilization=_utilization(config),
            num_lanes=config.max_num_seqs,
            warm_rows=TIMED_ROWS[config.role],
            num_children=RECORDED_CHILDREN,
            say=say,
            quantization=config.quantization,
        )
    engine = load_engine(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_len=config.max_model_len,
        part=_part(config),
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
        head_children=RECORDED_CHILDREN if config.heads else (),
        chains=CHAINS if config.role is Role.DRAFTER else (),
        tensor_parallel_size=config.tensor_parallel_size,
        layers=config.layers,
        quantization=config.quantization,
    )
    engine = _placed(engine, config, say)
    if not config.heads:
        return engine
    say("loading heads")
    heads = load_head_engine(
        config.heads,
        revision=config.heads_revision,
        target=config.model,
        target_revision=config.revision,
        dtype="auto",
        device=str(engine.loaded.device),
        max_len=engine.max_len,
        num_lanes=engine.executor.lanes.count,
        warm_rows=TIMED_ROWS[Role.DRAFTER],
        say=say,
        is_alone=False,
        quantization=config.heads_quantization,
    )
    # To see what is free for the heads, the memory of the target's prompts was given back.
    engine.executor.warm_up_prompts()
    return replace(engine, heads=heads, max_len=min(engine.max_len, heads.max_len))


def _part(config: NodeConfig) -> float:
    """Return which share of the memory for caches this node's cache may take.

    Where the user has said how much both may take in all, target and drafter divide it.
    """
    if not config.gpu_memory_utilization:
        return PARTS[config.role]
    if not config.peer_bytes:
        return 1.0
    drafts = PARTS[Role.DRAFTER]
    return drafts if config.role is Role.DRAFTER else 1.0 - drafts


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
        about = config.model, backend, str(loaded.dtype), config.quantization, library_name()
        time_places(places, engine.executor, engine.pass_s, about)
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
    loaded, (digest, file_digest) = engine.loaded, engine.digests
    hello = Hello(
        version=PROTOCOL_VERSION,
        role=config.role,
        secret=config.secret,
        fingerprint=Fingerprint(engine.vocab_size, digest, loaded.eos_token_ids, file_digest),
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
        heads="" if engine.heads is None else engine.heads.executor.backend,
        forms=engine.executor.forms,
        bits=engine.bits,
    )
    welcome = shake_hands(connection, hello, limit_s)
    if welcome.traced:
        heart.record()
    return welcome


@dataclass(frozen=True, slots=True)
class Launched(Generic[Result_co]):
    """A forward that a device was given, with its result.

    result   given to the machine when the device has ended the forward, and not before
    ends_at  when that is, by `time.perf_counter`; None: the host itself has computed the forward,
             which has ended
    woke     called when the loop had nothing else to do, slept, and has woken for that end
    """

    result: Result_co
    ends_at: float | None = None
    woke: Callable[[], None] = lambda: None

    @property
    def left_s(self) -> float:
        """Return the seconds until the device ends the forward; 0 if the host has computed it."""
        return 0.0 if self.ends_at is None else self.ends_at - time.perf_counter()


class Loop(Generic[Compute, Result]):
    """Gives a node's machine a clock, a socket and a model, and performs its actions.

    A turn receives all messages and lets the machine tick. A forward is *launched* when the machine
    asks for a Compute, *computed* when its result is an event for the machine, and *told* when
    Afterwards was. In which order, `_plain` and `_overlapped` say, side by side:

        _plain       the host itself computes, so launching means computing. All messages about the
                     forward are sent before the next one, because they would wait for the whole of
                     it.
        _overlapped  a device computes, and the host is free (today a simulated device alone):
                     meanwhile messages are received and the machine ticks, so that it is prepared
                     when the result comes. Then the device is idle, so the next forward is launched
                     before messages about this one are sent, but for those that the machine has
                     asked for with the result.

    launch  runs a Compute that the machine asks for; its result is the machine's next event
    """

    def __init__(
        self,
        connection: Connection,
        heart: Heart,
        executor: Executor,
        dispatcher: Handles[Result, SharedAction | Compute],
        launch: Callable[[Compute], Launched[Result]],
    ) -> None:
        self.connection = connection
        self.heart = heart
        self.executor = executor
        self.dispatcher = dispatcher
        self.launch = launch
        self._running: Launched[Result] | None = None  # on a device
        self._computed: deque[Launched[Result]] = deque()  # by the host, and not yet told
        self._silence: FaultDetector | None = None

    def run(self, *, has_lifeline: bool = True) -> NoReturn:
        """Serve for ever; with a lifeline (`process.py`) the process ends when that closes.

        Raises:
            ClosedError: the coordinator says that it ends, or is silent; only without a lifeline.
            ConfigurationError: another process has this node's name; only without a lifeline.
            NodeError: the engine cannot go on.
            RefusedError: the coordinator has cut this node off, or a target has joined that it does
                not fit.
            RemoteProtocolError: too many garbled frames have come.
        """
        bad_frames = BadFrames()
        if not has_lifeline:
            self._silence = FaultDetector(time.monotonic())
        timeout_s = 0.0
        try:
            while True:
                timeout_s = self._turn(timeout_s, bad_frames)
        except EngineError as error:
            raise NodeError(str(error)) from error
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise NodeError(f"there is no memory left: {one_line(error)}") from error
        except AssertionError:
            logger.error("an invariant is violated after %s", self.dispatcher.story())
            raise

    def _turn(self, timeout_s: float, bad_frames: BadFrames) -> float:
        """Handle arrived messages and a due result, then tick.

        Returns the seconds that the next turn may wait for messages.
        """
        running = self._running
        if running is not None:
            timeout_s = min(timeout_s, running.left_s)
        has_slept = self._receive(timeout_s, bad_frames)
        if running is not None and running.left_s <= 0:
            self._running = None
            self._overlapped(running, has_slept=has_slept)
        self.heart.marks = self.dispatcher.marks
        if self._silence is not None and self._silence.is_lost(time.monotonic()):
            raise ClosedError(f"the coordinator has been silent for {SILENCE_LIMIT_S:.0f} s")
        return self._go_on(Tick())

    def _receive(self, timeout_s: float, bad_frames: BadFrames) -> bool:
        """Handle all messages that arrive; True if there was time to wait and none came."""
        enter, has_slept = self.heart.watch.enter, timeout_s > 0
        enter(Phase.WAIT)
        for frame in self.connection.receive(timeout_s, exact=self._running is not None):
            has_slept = False
            enter(Phase.DECODE)
            self.heart.watch.received(frame)
            message = bad_frames.decode(frame)
            enter(Phase.DECIDE)
            if message is not None:
                self._heard(message)
                self._go_on(Arrived(message))
            enter(Phase.WAIT)
        enter(Phase.DECIDE)
        return has_slept

    def _heard(self, message: Message) -> None:
        """Note a message as a sign of life, and act on what it says about this node itself.

        Raises:
            ClosedError, ConfigurationError, RefusedError: as `run`.
        """
        if isinstance(message, Heartbeat):
            self.heart.heard(message)
        if isinstance(message, Close) and message.reason == BROKEN_OFF:
            story = self.dispatcher.story(message.session) or "nothing"
            logger.error("text %d was broken off after %s", message.session, story)
        if isinstance(message, Fault) and message.code is FaultCode.OUTSIDE:
            logger.warning("a message of this node was dropped: %s", message.detail)
        if self._silence is not None:
            self._silence.heard(time.monotonic())
            if isinstance(message, Fault) and message.code is FaultCode.CLOSED:
                raise ClosedError(message.detail)
            if isinstance(message, Fault) and message.code is FaultCode.UNUSABLE:
                raise ConfigurationError(message.detail)  # another process has this node's name
        if isinstance(message, Fault) and message.code is FaultCode.REFUSED:
            raise RefusedError(f"refused by the coordinator: {message.detail}")

    # -- forwards ---------------------------------------------------------------------------------

    def _go_on(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Give the machine an event, and the results of what the host computes for it.

        Returns the seconds that the loop may wait.
        """
        timeout_s = self._do(event)
        while self._computed:
            self._plain(self._computed.popleft())
            timeout_s = 0.0
        return timeout_s

    def _plain(self, computed: Launched[Result]) -> None:
        """Tell what came of a forward that the host has computed; the next turn launches."""
        self.heart.ends()
        self._do(computed.result)
        self._do(Afterwards())

    def _overlapped(self, computed: Launched[Result], *, has_slept: bool) -> None:
        """Launch the next forward after one that a device has ended; then tell what came of it."""
        self.heart.watch.device_ended()
        self.heart.ends()
        if has_slept:
            computed.woke()
        self._go_on(computed.result)
        self._go_on(Tick())
        self._go_on(Afterwards())

    def _do(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Give the machine an event and perform its actions; returns seconds the loop may wait."""
        timeout_s = IDLE_S
        for action in self.dispatcher.handle(event, time.monotonic()):
            timeout_s = min(timeout_s, self._perform(action))
        return timeout_s

    def _perform(self, action: SharedAction | Compute) -> float:
        """Perform an action; returns seconds that the loop may wait because of it."""
        enter = self.heart.watch.enter
        match action:
            case Send(message):
                enter(Phase.SEND)
                frame = encode(message)
                self.heart.watch.sends(frame)
                self.connection.send(frame)
            case MoveRows(moves):
                enter(Phase.MOVE)
                self.executor.move(*moves)
            case CopyPrefix(source, target, length):
                enter(Phase.MOVE)
                self.executor.copy_prefix(source, target, length)
            case Wipe(lane, start):
                enter(Phase.MOVE)
                self.executor.wipe(lane, start)
            case WaitUntil(deadline):
                return deadline - time.monotonic()
            case Allocate(max_len):
                # The cache has room for the longest text; with fixed rows every pass must read the
                # same number of slots, which is set here.
                if self.executor.fixed_rows is not None:
                    self.executor.set_total(max_len + NUM_TREE_SLOTS)
            case _:
                self._launch(action)
        enter(Phase.DECIDE)
        return IDLE_S

    def _launch(self, action: Compute) -> None:
        """Launch a forward; if the host computes, it has ended when this returns."""
        launched = self.launch(action)
        if launched.ends_at is None:
            self._computed.append(launched)
            return
        assert self._running is None, "a device does one thing at a time"
        self._running = launched
        self.heart.watch.device_ends_in(launched.left_s)
