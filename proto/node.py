"""What every node process does besides its work: its config, its lifeline, its heartbeat, its end.

A node is started with a pipe as its standard input. One JSON line on it is the config (the secret
in it must not show in a process list); after that the pipe is the *lifeline*: at its end of file
whoever started the node is gone, and the node ends at once, even in the middle of a forward. A copy
of the other end may live on in a process that was forked there, so the node also looks whether its
parent is the one that it had.
"""

import dataclasses
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from proto.codec import decode, encode
from proto.descriptors import check_spare
from proto.errors import (
    ConfigurationError,
    ModelError,
    RemoteProtocolError,
    SlipstreamError,
    TransportError,
)
from proto.liveness import HEARTBEAT_INTERVAL_S, MAX_BAD_FRAMES
from proto.messages import (
    PROTOCOL_VERSION,
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
from proto.stopwatch import Phase, Stopwatch
from proto.transport import Connection

logger = logging.getLogger(__name__)

HEARTBEAT_SUFFIX = b"/heartbeat"
MAX_CONFIG_CHARS = 1 << 16
NO_CONFIG = (
    "a node reads its config as one JSON line from standard input; it is started by "
    "`python -m coordinator`"
)
EXIT_FAILED = 1
EXIT_UNUSABLE = 2  # as FaultCode.UNUSABLE: its Fault may be overtaken by the end of the process
PARENT_CHECK_S = 0.5
HANDSHAKE_LIMIT_S = 600.0  # the other node may still be reading its weights


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything that a node needs to know; written by the coordinator, never changed.

    device          "cpu", "cpu:N" (pinned to core N), "cpu:N-M" (to those) or "cuda:N"
    max_model_len   most tokens of a text; 0: the model's own limit
    fixed_rows      reproducible mode: rows of every decoding pass; 0: off
    min_forward_ms  a forward takes at least so long (to emulate a slower device in experiments)
    backend         which forward runs: one of `engine.prepare.BACKENDS`
    busy_poll_us    so long it asks for messages without pause before it sleeps
    parent_pid      the process that has started the node; the launcher knows it
    max_candidates  classical rules: most tokens that a draft is sampled from
    """

    role: Role
    endpoint: str
    identity: str
    secret: str
    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int = 0
    fixed_rows: int = 0
    min_forward_ms: float = 0.0
    max_candidates: int = 64
    backend: str = "auto"
    busy_poll_us: int = 0
    parent_pid: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "NodeConfig":
        """Raises ConfigurationError if the line is not a config."""
        try:
            fields: dict[str, Any] = json.loads(line)
            return cls(**{**fields, "role": Role(fields["role"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"{NO_CONFIG} ({error})") from error

    def hello(
        self,
        *,
        fingerprint: Fingerprint,
        logits_size: int,
        max_model_len: int,
        dtype: str,
        num_parameters: int,
        load_s: float,
    ) -> Hello:
        """What the coordinator must know about a node with this config, once it is loaded."""
        return Hello(
            version=PROTOCOL_VERSION,
            role=self.role,
            secret=self.secret,
            fingerprint=fingerprint,
            logits_size=logits_size,
            max_model_len=max_model_len,
            model=self.model,
            dtype=dtype,
            device=self.device,
            num_parameters=num_parameters,
            load_us=round(load_s * 1e6),
        )


class Heart:
    """Beats in a thread of its own that never touches the model: it beats through long forwards."""

    def __init__(self, config: NodeConfig) -> None:
        self.state = "starting"  # shown to people while the node loads
        self.progress = 0  # forwards finished
        self.num_uncaptured = 0  # decode passes that no captured graph had room for
        self.mark: SessionMark | None = None
        self.watch = Stopwatch(time.perf_counter_ns)  # of the node's loop
        self._connection = Connection(config.endpoint, config.identity.encode() + HEARTBEAT_SUFFIX)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.is_set():
            mark = self.mark
            marks = () if mark is None else (mark,)
            beat = Heartbeat(
                marks, self.progress, self.state, self.watch.totals_us, self.num_uncaptured
            )
            self._connection.send(encode(beat))
            self._stop.wait(HEARTBEAT_INTERVAL_S)

    def stop(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=1.0)
        self._connection.close(linger_s=0.0)


def read_config() -> NodeConfig:
    """Read the config from standard input and make the rest of it the lifeline."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigurationError(NO_CONFIG)
    config = NodeConfig.from_json(sys.stdin.readline(MAX_CONFIG_CHARS))
    watch = threading.Thread(
        target=_end_with_parent, args=(config.parent_pid,), name="lifeline", daemon=True
    )
    watch.start()
    return config


def _end_with_parent(pid: int) -> None:
    while os.getppid() == pid:
        # The descriptor, not sys.stdin: its buffer's lock would be held at interpreter exit.
        if select.select([0], [], [], PARENT_CHECK_S)[0] and not os.read(0, 4096):
            break
    os._exit(0)


class BadFrames:
    """Drops what cannot be decoded, and gives up on a peer that keeps sending it."""

    def __init__(self) -> None:
        self.count = 0

    def decode(self, frame: bytes) -> Message | None:
        """The message, or None. Raises RemoteProtocolError when too many have been bad."""
        try:
            return decode(frame)
        except RemoteProtocolError as error:
            self.count += 1
            logger.warning("dropped a frame: %s", error)
            if self.count > MAX_BAD_FRAMES:
                raise RemoteProtocolError(
                    f"{self.count} garbled frames came from the coordinator; the last: {error}"
                ) from error
            return None


def shake_hands(connection: Connection, hello: Hello) -> Welcome:
    """Introduce this node. Raises RemoteProtocolError if it is refused or not answered in time."""
    connection.send(encode(hello))
    bad_frames = BadFrames()
    for _ in range(int(HANDSHAKE_LIMIT_S)):
        for frame in connection.receive(1.0):
            match bad_frames.decode(frame):
                case Welcome() as welcome:
                    return welcome
                case Fault(detail=detail):
                    raise RemoteProtocolError(f"refused by the coordinator: {detail}")
                case _:
                    pass
    raise RemoteProtocolError(f"no welcome from the coordinator in {HANDSHAKE_LIMIT_S:.0f} s")


def serve(
    connection: Connection,
    watch: Stopwatch,
    on_message: Callable[[Message], None],
    on_drained: Callable[[], float],
) -> NoReturn:
    """Hand over all messages that are there, then call `on_drained`, for ever.

    `on_drained` returns for how many seconds the loop may sleep if no message comes. Raises
    RemoteProtocolError when too many garbled frames have come; the lifeline ends the process.
    """
    bad_frames = BadFrames()
    timeout_s = 0.0
    while True:
        watch.enter(Phase.WAIT)
        for frame in connection.receive(timeout_s):
            watch.enter(Phase.DECODE)
            message = bad_frames.decode(frame)
            watch.enter(Phase.DECIDE)
            if message is not None:
                on_message(message)
            watch.enter(Phase.WAIT)
        watch.enter(Phase.DECIDE)
        timeout_s = on_drained()


def run_node(work: Callable[[NodeConfig, Connection, Heart], None]) -> int:
    """The main of a node process: returns its exit status; an error becomes a Fault and a line."""
    # Ctrl-C reaches the whole process group; the coordinator decides when nodes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    try:
        check_spare()
        config = read_config()
        connection = Connection(
            config.endpoint, config.identity.encode(), busy_poll_s=config.busy_poll_us / 1e6
        )
        heart = Heart(config)
    except (ConfigurationError, TransportError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_UNUSABLE
    try:
        work(config, connection, heart)
    except (ConfigurationError, ModelError) as error:
        _tell(connection, config, FaultCode.UNUSABLE, str(error))
        return EXIT_UNUSABLE
    except SlipstreamError as error:
        _tell(connection, config, FaultCode.FAILED, str(error))
        return EXIT_FAILED
    finally:
        heart.stop()
        connection.close()
    return 0


def _tell(connection: Connection, config: NodeConfig, code: FaultCode, detail: str) -> None:
    """Why the node ends: to the coordinator, and for whoever reads the log."""
    print(f"{config.role}: {detail}", file=sys.stderr)  # noqa: T201
    connection.send(encode(Fault(0, 0, code, detail[:2000])))
