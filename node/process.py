"""What every node process does besides its work: its lifeline, heartbeat, handshake and end.

A node is started with a pipe as its standard input. One JSON line on it is the config (its secret
must not show in a list of processes). After that the pipe is the *lifeline*: its end of file means
that the process which started the node is gone. Then the node ends at once, on a CPU even in the
middle of a forward; a GPU first ends the work it was given, within a limit (`engine/running.py`). A
forked process may keep a copy of the pipe's other end open, so the node also checks that its parent
is still the same process.
"""

import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from engine import running
from proto.codec import decode, encode
from proto.errors import (
    ConfigurationError,
    ModelError,
    NoAnswerError,
    RefusedError,
    RemoteProtocolError,
    SlipstreamError,
    TransportError,
)
from proto.links.keys import keys_of
from proto.links.line import Line
from proto.links.transport import Connection
from proto.liveness import HEARTBEAT_INTERVAL_S, MAX_BAD_FRAMES
from proto.messages import (
    Fault,
    FaultCode,
    Heartbeat,
    Hello,
    Message,
    SessionMark,
    TracePart,
    Welcome,
)
from proto.node_config import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    LOADING,
    NO_CONFIG,
    READY_BUT,
    NodeConfig,
)
from proto.stopwatch import Recorder, Stopwatch
from proto.system import check_spare

logger = logging.getLogger(__name__)
last_words = logging.getLogger("last_words")  # why this process ends

MAX_CONFIG_CHARS = 1 << 16
PARENT_CHECK_S = 0.5
BETWEEN_NEWS_S = 0.02
HANDSHAKE_LIMIT_S = 600.0  # the other node may still be reading its weights
AGAIN_S = 0.2


class Heart:
    """Sends heartbeats from a thread that never touches the model, so also during long forwards."""

    def __init__(self, config: NodeConfig) -> None:
        self.state = "starting"  # what the node is doing, for people
        self.progress = 0  # forwards finished
        self.num_uncaptured = 0  # decode passes that no captured graph had room for
        self.num_overruns = 0  # forwards that took longer than on the simulated device
        self.late_us = 0  # microseconds by which all of them together were late
        self.marks: tuple[SessionMark, ...] = ()  # how far each open text is here
        # The forward that is under way: its rows, when it began (ns), and how many microseconds
        # such a forward usually takes (0: unknown). A tuple, because two threads use it.
        self._under_way: tuple[int, int, int] | None = None
        self.watch = Stopwatch(time.monotonic_ns)  # of the node's loop, on the heart's own clock
        self._recorder: Recorder | None = None
        self._num_parts = 0
        # Time stamp of the coordinator's latest heartbeat, and when that came (our clock, ns).
        self._stamp: tuple[int, int] | None = None
        self._connection = Connection(
            config.endpoint, config.identity.encode(), keys=keys_of(config), is_answered=False
        )
        self._stop, self._news = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.is_set():
            stamp_us, came_ns = self._stamp or (0, 0)
            rows, since_ns, expected_us = self._under_way or (0, 0, 0)
            now_ns = time.monotonic_ns()
            beat = Heartbeat(
                self.marks,
                self.progress,
                self._doing(),
                self.watch.totals_us,
                self.watch.beside_us,
                self.num_uncaptured,
                self.num_overruns,
                self.late_us,
                stamp_us,
                (now_ns - came_ns) // 1000 if stamp_us else 0,
                now_ns // 1000,
                rows,
                max(0, now_ns - since_ns) // 1000 if rows else 0,
                expected_us,
            )
            self._connection.send(encode(beat))
            self._send_records()
            if self._news.wait(HEARTBEAT_INTERVAL_S):
                self._news.clear()
                self._stop.wait(BETWEEN_NEWS_S)

    def _doing(self) -> str:
        """Return the state, with a sign that a long load goes on: the memory that it has taken."""
        state = self.state
        if not state.startswith(LOADING):
            return state
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"{state}, {taken / 1e9:.1f} GB so far"

    def record(self) -> None:
        """Record what the loop does from now on, and send the records with each heartbeat."""
        self._recorder = Recorder()
        self.watch.record(self._recorder)

    def _send_records(self) -> None:
        if self._recorder is None or not (records := self._recorder.take()):
            return
        self._num_parts += 1
        part = TracePart(self._num_parts, self._recorder.num_dropped, records)
        self._connection.send(encode(part))

    def begins(self, num_rows: int, expected_s: float) -> None:
        """Note that a forward of so many rows begins, and how long it usually takes; 0: unknown."""
        self._under_way = num_rows, time.monotonic_ns(), round(expected_s * 1e6)

    def ends(self) -> None:
        """Note that no forward is under way any more."""
        self._under_way = None

    def overran(self, late_s: float) -> None:
        """Count a forward that took `late_s` too long, and send a heartbeat soon to report it."""
        self.num_overruns += 1
        self.late_us += round(late_s * 1e6)
        self._news.set()

    def trouble(self, line: str) -> None:
        """Report in every heartbeat from now on that the node goes on with less than it has."""
        self.state = f"{READY_BUT}{line}"
        self._news.set()

    def heard(self, beat: Heartbeat) -> None:
        """Note a heartbeat of the coordinator, which ours acknowledge (the first one at once)."""
        is_first = self._stamp is None
        self._stamp = beat.stamp_us, time.monotonic_ns()
        if is_first:
            self._news.set()

    def stop(self) -> None:
        """Stop the thread and close its connection."""
        self._stop.set()
        self._news.set()
        self._thread.join(timeout=1.0)
        self._connection.close(linger_s=0.0)


def read_config() -> NodeConfig:
    """Read and return the config from standard input; the end of that input ends the process.

    Raises ConfigurationError if there is no config.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigurationError(NO_CONFIG)
    config = NodeConfig.from_json(sys.stdin.readline(MAX_CONFIG_CHARS))
    watch = threading.Thread(
        target=end_with_parent, args=(config.parent_pid,), name="lifeline", daemon=True
    )
    watch.start()
    return config


def connect(config: NodeConfig) -> Connection:
    """Return a connection to the coordinator. Raises ConfigurationError, TransportError."""
    return Connection(
        config.endpoint,
        config.identity.encode(),
        busy_poll_s=config.busy_poll_us / 1e6,
        keys=keys_of(config),
        line=None if config.line < 0 else Line.inherited(config.line),
    )


def end_with_parent(pid: int) -> None:
    """End this process when process `pid`, which has started it, ends or closes our input."""
    while os.getppid() == pid:
        # The descriptor, not sys.stdin: its buffer's lock would be held at interpreter exit.
        if select.select([0], [], [], PARENT_CHECK_S)[0] and not os.read(0, 4096):
            break
    running.finish()
    os._exit(0)


class BadFrames:
    """Decodes frames, drops invalid ones, and gives up on a peer that sends too many of them."""

    def __init__(self) -> None:
        self.count = 0

    def decode(self, frame: bytes) -> Message | None:
        """Return the message, or None if invalid. Raises RemoteProtocolError after too many."""
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


def shake_hands(
    connection: Connection, hello: Hello, limit_s: float = HANDSHAKE_LIMIT_S
) -> Welcome:
    """Introduce this node to the coordinator, and return the Welcome with which it answers.

    Over TCP the Hello is sent again and again, because the coordinator may not be there yet.

    Raises:
        RefusedError: the coordinator answers that the node does not fit.
        RemoteProtocolError: too many garbled frames have come.
        ConfigurationError: the node's keys or name are refused; another attempt would fail too.
        NoAnswerError: there was no answer in `limit_s` seconds.
    """
    connection.send(encode(hello))
    bad_frames = BadFrames()
    deadline, again = time.monotonic() + limit_s, time.monotonic() + AGAIN_S
    while (now := time.monotonic()) < deadline:
        if connection.is_remote and now >= again:
            if reason := connection.refusal():
                raise ConfigurationError(reason)
            connection.send(encode(hello))
            again = now + AGAIN_S
        for frame in connection.receive(min(AGAIN_S, deadline - now)):
            match bad_frames.decode(frame):
                case Welcome() as welcome:
                    connection.answered()
                    return welcome
                case Fault(code=FaultCode.UNUSABLE, detail=detail):
                    raise ConfigurationError(detail)
                case Fault(code=FaultCode.CLOSED):
                    raise NoAnswerError("the coordinator that answers is about to end")
                case Fault(detail=detail):
                    raise RefusedError(f"refused by the coordinator: {detail}")
                case _:
                    pass
    raise NoAnswerError(f"no welcome from the coordinator in {limit_s:.0f} s")


def _stamp_logs() -> None:
    """Begin every line that is logged with the time, which tells it from the output of libraries.

    The lines go into a file that stays (`launching/logs.py`).
    """
    form = "%(asctime)s.%(msecs)03dZ %(name)s: %(message)s"
    bare = form.replace("%(name)s: ", "")
    for name, each in (("", form), (last_words.name, bare)):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(each, "%Y-%m-%dT%H:%M:%S"))
        handler.formatter.converter = time.gmtime  # type: ignore[union-attr]
        logging.getLogger(name).addHandler(handler)
    last_words.propagate = False


def run_node(work: Callable[[NodeConfig, Connection, Heart], None]) -> int:
    """Run a node process; returns its exit status. An error becomes a Fault message and a line.

    work  loads the node and serves; slow imports are made in it
    """
    # Ctrl-C reaches the whole process group; the coordinator decides when nodes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        check_spare()
        config = read_config()
        _stamp_logs()  # not before: without a config it was started by hand, and people read it
        connection = connect(config)
        heart = Heart(config)
    except (ConfigurationError, TransportError) as error:
        last_words.error("error: %s", error)
        return EXIT_UNUSABLE
    try:
        work(config, connection, heart)
    except SlipstreamError as error:
        last_words.error("%s: %s", config.role, error)
        return tell(connection, error)
    finally:
        heart.stop()
        connection.close()
    return 0


def tell(connection: Connection, error: SlipstreamError) -> int:
    """Tell the coordinator why the node ends; returns the exit status of the process."""
    is_unusable = isinstance(error, ConfigurationError | ModelError | RefusedError)
    code = FaultCode.UNUSABLE if is_unusable else FaultCode.FAILED
    connection.send(encode(Fault(0, 0, code, str(error)[:2000])))
    return EXIT_UNUSABLE if is_unusable else EXIT_FAILED
