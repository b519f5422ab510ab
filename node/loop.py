"""What a node does from its config to its end: load, introduce itself, and then one loop.

The loop drains the messages, ticks and does what the machine asks for, for ever. It decides
nothing, and knows of a Compute only that there is somebody who can run it.
"""

import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, Protocol, TypeVar

from engine.checkpoint.files import one_line
from engine.errors import EngineError, OutOfMemory, RankError, lacks_memory
from engine.executor import Executor
from engine.heads.head_loading import LoadedHead, load_head_engine
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import Engine, load_engine
from node.economics import CHAINS, RECORDED_CHILDREN, RECORDED_ROWS, TIMED_ROWS
from node.follower import (
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
    SessionMark,
    Welcome,
)
from proto.node_config import FETCHING, NodeConfig
from proto.stopwatch import Phase
from proto.system import is_folder

logger = logging.getLogger(__name__)

IDLE_S = 1.0
# Of the memory for a cache. A drafter is ready first, and has less for each token: with more, its
# target might find no room on the same GPU.
PARTS = {Role.TARGET: 1.0, Role.DRAFTER: 0.4}

Compute = TypeVar("Compute")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


class HasState(Protocol):
    """What is told what a node is doing, for people: a `Heart`, or whatever shows it."""

    state: str


class Serve(Protocol):
    """What a node does: in the module `target_node.worker` or `drafter_node.worker`."""

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
        """Work for the coordinator that has said Welcome."""


def work(
    config: NodeConfig, connection: Connection, heart: Heart, load_serve: Callable[[], Serve]
) -> None:
    """Load, introduce the node, and serve until the process ends."""
    serve = load_serve()
    gc.freeze()
    engine = load(config, heart)
    serve(config, engine, introduce(config, connection, engine, heart), connection, heart)


def load(config: NodeConfig, heart: HasState) -> Engine:
    """Load, check and warm up the node's model. With fixed rows passes have no other number.

    Raises:
        NodeError: there is no memory for it now, or one of its ranks has ended.
        ModelError: it cannot be used as it is configured.
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
    # What stays until the end is not looked through again: a compiler for GPUs alone is hundreds of
    # thousands of objects, and a text would wait for a tenth of a second, now and then.
    gc.collect()
    gc.freeze()
    say("ready")
    return engine


def _without_room(config: NodeConfig, error: RuntimeError | MemoryError) -> str:
    """Why a model that fits cannot be run: what computes with it takes memory as well."""
    return (
        f"{config.model}: there is no memory left beside its weights and its cache "
        f"({one_line(error)}); use a lower --max-model-len or --max-num-seqs, or end what else "
        "runs there"
    )


def _load(config: NodeConfig, say: Callable[[str], None]) -> Engine:
    if config.role is Role.DRAFTER and config.target:  # it is a head
        return load_head_engine(
            config.model,
            revision=config.revision,
            target=config.target,
            target_revision=config.target_revision,
            dtype=config.dtype,
            device=config.device,
            max_len=config.max_model_len,
            part=PARTS[config.role],
            num_lanes=config.max_num_seqs,
            warm_rows=TIMED_ROWS[config.role],
            say=say,
        )
    engine = load_engine(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_len=config.max_model_len,
        part=PARTS[config.role],
        num_lanes=config.max_num_seqs,
        fixed_rows=config.fixed_rows or None,
        warm_rows=(config.fixed_rows,) if config.fixed_rows else TIMED_ROWS[config.role],
        say=say,
        backend=config.backend,
        row_counts=RECORDED_ROWS[config.role],
        num_children=RECORDED_CHILDREN if config.role is Role.DRAFTER else (),
        head_children=RECORDED_CHILDREN if config.heads else (),
        chains=CHAINS if config.role is Role.DRAFTER else (),
        tensor_parallel_size=config.tensor_parallel_size,
        layers=config.layers,
    )
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
    )
    return replace(engine, heads=heads, max_len=min(engine.max_len, heads.max_len))


def introduce(
    config: NodeConfig,
    connection: Connection,
    engine: Engine,
    heart: Heart,
    limit_s: float = HANDSHAKE_LIMIT_S,
) -> Welcome:
    """Tell the coordinator what was loaded, and record from now on if it wants a trace.

    Raises RefusedError, NoAnswerError, RemoteProtocolError.
    """
    loaded = engine.loaded
    hello = Hello(
        version=PROTOCOL_VERSION,
        role=config.role,
        secret=config.secret,
        fingerprint=Fingerprint(engine.vocab_size, engine.digest, loaded.eos_token_ids),
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
    )
    welcome = shake_hands(connection, hello, limit_s)
    if welcome.traced:
        heart.record()
    return welcome


class Handles(Protocol[Result_contra, Action_co]):
    """A `Follower`, or what takes its place."""

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """How far every open text is here."""

    def handle(
        self, event: Arrived | Tick | Afterwards | Result_contra, now: float, /
    ) -> Sequence[Action_co]:
        """The actions that an event asks for."""

    def story(self, session: int | None = None, /) -> str:
        """The last events of an open text, or of all; "": there are none."""


@dataclass(frozen=True, slots=True)
class Launched(Generic[Result_co]):
    """A forward that a device has been given.

    result   shown to the machine when the device has ended the forward, and not before
    ends_at  when that is, by the clock of `time.perf_counter`; None: the host itself has computed,
             and it has ended
    woke     told when the loop, which had nothing else to do, has woken for that end
    """

    result: Result_co
    ends_at: float | None = None
    woke: Callable[[], None] = lambda: None

    @property
    def left_s(self) -> float:
        """How long the device will still be at it."""
        return 0.0 if self.ends_at is None else self.ends_at - time.perf_counter()


class Loop(Generic[Compute, Result]):
    """Gives the machines a clock, a socket and a model.

    While a device is at work that leaves the host free, messages are heard and the machine ticks:
    it has everything in order when the result comes. Then the device is idle, so the next forward
    is launched before anything is said of this one. Where the host itself computes, launching is
    computing: what is to be said is said first, since a message waits for the whole next forward.

    launch  starts what the machine asks for; the result is an event of the machine's
    """

    def __init__(
        self,
        connection: Connection,
        heart: Heart,
        executor: Executor,
        follower: Handles[Result, SharedAction | Compute],
        launch: Callable[[Compute], Launched[Result]],
    ) -> None:
        self.connection = connection
        self.heart = heart
        self.executor = executor
        self.follower = follower
        self.launch = launch
        self._running: Launched[Result] | None = None
        self._silence: FaultDetector | None = None

    def run(self, *, has_lifeline: bool = True) -> NoReturn:
        """Serve for ever; the lifeline ends the process.

        Raises:
            ClosedError: the coordinator says that it ends, or is silent; only without a lifeline.
            ConfigurationError: another process takes part under its name; likewise.
            NodeError: the engine cannot go on.
            RefusedError: a target has joined that this node does not fit; likewise.
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
            logger.error("an invariant is violated after %s", self.follower.story())
            raise

    def _turn(self, timeout_s: float, bad_frames: BadFrames) -> float:
        """Handle all messages that are there, then a result, then tick.

        Returns how long the next turn may wait.
        """
        enter = self.heart.watch.enter
        running = self._running
        enter(Phase.WAIT)
        if running is not None:
            timeout_s = min(timeout_s, running.left_s)
        was_asleep = timeout_s > 0
        for frame in self.connection.receive(timeout_s, exact=running is not None):
            was_asleep = False
            enter(Phase.DECODE)
            self.heart.watch.received(frame)
            message = bad_frames.decode(frame)
            enter(Phase.DECIDE)
            if message is not None:
                self._heard(message)
                self._handle(Arrived(message))
            enter(Phase.WAIT)
        enter(Phase.DECIDE)
        if running is not None and running.left_s <= 0:
            self.heart.watch.device_ended()
            if was_asleep:
                running.woke()
            self._running = None
            self._handle(running.result)
            self._handle(Tick())
            self._handle(Afterwards())
        self.heart.marks = self.follower.marks
        if self._silence is not None and self._silence.is_lost(time.monotonic()):
            raise ClosedError(f"the coordinator has been silent for {SILENCE_LIMIT_S:.0f} s")
        return self._handle(Tick())

    def _heard(self, message: Message) -> None:
        """What a message says besides what it is for.

        Raises:
            ClosedError, ConfigurationError, RefusedError: as `run`.
        """
        if isinstance(message, Heartbeat):
            self.heart.heard(message)
        if isinstance(message, Close) and message.reason == BROKEN_OFF:
            story = self.follower.story(message.session) or "nothing"
            logger.error("text %d was broken off after %s", message.session, story)
        if self._silence is not None:
            self._silence.heard(time.monotonic())
            if isinstance(message, Fault) and message.code is FaultCode.CLOSED:
                raise ClosedError(message.detail)
            if isinstance(message, Fault) and message.code is FaultCode.UNUSABLE:
                raise ConfigurationError(message.detail)  # another process has its name
            if isinstance(message, Fault) and message.code is FaultCode.REFUSED:
                raise RefusedError(f"refused by the coordinator: {message.detail}")

    def _handle(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Let the machine decide and do it; returns how long the loop may wait for messages."""
        timeout_s = IDLE_S
        for action in self.follower.handle(event, time.monotonic()):
            timeout_s = min(timeout_s, self._perform(action))
        return timeout_s

    def _perform(self, action: SharedAction | Compute) -> float:
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
                # The cache was made for the longest text, but every pass must cover as much of it.
                if self.executor.fixed_rows is not None:
                    self.executor.set_total(max_len + NUM_TREE_SLOTS)
            case _:
                launched = self.launch(action)
                enter(Phase.DECIDE)
                if launched.ends_at is not None:
                    assert self._running is None, "a device does one thing at a time"
                    self._running = launched
                    self.heart.watch.device_ends_in(launched.left_s)
                    return IDLE_S
                self._handle(launched.result)
                self._handle(Afterwards())
                return 0.0
        enter(Phase.DECIDE)
        return IDLE_S
