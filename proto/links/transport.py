"""Sockets that carry frames between the processes, over ZeroMQ.

Only this file, `keys.py` and `gate.py` import ZeroMQ. The coordinator binds one ROUTER socket
(`Listener`), for the nodes of its own host and, encrypted, for those of other hosts; every node
connects DEALER sockets (`Connection`). A connection states in its handshake to which node it
belongs; the ROUTER's own identities are new for each connection, and mean nothing. Sends never
block: a frame that does not fit into a queue is refused, and the caller counts it. Sending to an
unknown peer is an error (without ROUTER_MANDATORY the frame would be dropped silently), and nothing
lingers at exit. The work of nodes that the coordinator has started on its own host goes over lines
(`line.py`) beside these sockets.
"""

import contextlib
import ipaddress
import math
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from proto.codec import encode
from proto.errors import ConfigurationError, TransportError, shown
from proto.links.gate import PROPERTY, Gate, heard, property_of, spoken
from proto.links.keys import CoordinatorKeys, NodeKeys, how, open_door, open_hand
from proto.links.line import Line
from proto.links.names import Claim, Names
from proto.messages import MAX_FRAME_BYTES, Fault, FaultCode
from proto.system import RAISE_THE_LIMIT

SEND_QUEUE_FRAMES = 4096
BOX_BYTES = 64  # more than encryption adds to a frame; the library counts that as well
MAX_IPC_PATH_BYTES = 107  # sun_path less its terminating zero
CONNECT_LIMIT_MS = 2000  # the system itself would wait for minutes if the link is cut
RECONNECT_MS = 1000
LINK_LIMIT_S, LINK_PROBES = 5, 3  # a TCP connection that is silent for longer is dead
# Most frames that one call of `receive` returns: of a coordinator, and of a node.
FRAMES_AT_ONCE, NODE_FRAMES_AT_ONCE = 1000, 256
PEERS_KNOWN = 4096
UNFINISHED_HANDSHAKES = 3
SIGNATURE_BYTES, GREETING_LIMIT_S = 10, 1.0
TCP = "tcp://"
METADATA = 95  # ZMQ_METADATA: the library has it, pyzmq has no name for it
HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
COPY = "copy its .key file to the coordinator's folder of keys, and start the coordinator again"
TAKE_ANOTHER_NAME = "end it first, or give this node a name of its own (--name)"
NAME_AN_ADDRESS = "name an address of this host, and a port that you may use"
NAP_S, AWAKE_S = 50e-6, 80e-6  # length of a sleep, and by how much it is longer in fact


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_endpoint(endpoint: str, *, is_encrypted: bool = False) -> None:
    """Raise ConfigurationError if an endpoint (ipc:// or tcp://) would be unsafe or cannot work."""
    if endpoint.startswith("ipc://"):
        if len(os.fsencode(endpoint[len("ipc://") :])) > MAX_IPC_PATH_BYTES:
            raise ConfigurationError(
                f"the socket path is longer than {MAX_IPC_PATH_BYTES} bytes: {endpoint}; "
                "set TMPDIR to a shorter folder"
            )
    elif endpoint.startswith(TCP):
        if not is_encrypted and not _is_loopback(endpoint[len(TCP) :]):
            raise ConfigurationError(
                f"{endpoint} needs encryption: give --keys DIR ({how()}), or use "
                "tcp://127.0.0.1:PORT on this host"
            )
    else:
        raise ConfigurationError(
            f"unknown endpoint {shown(endpoint)}: use ipc://PATH or tcp://HOST:PORT"
        )


def _shown(claim: Claim) -> str:
    """Return a claim's name as a part of a message; without keys it may have any characters."""
    name = claim.name.decode(errors="replace")
    return name if name.isprintable() else shown(name)


def _greets(endpoint: str) -> bool:
    """True if the TCP endpoint sends the first bytes of ZeroMQ's protocol within a second."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    said = b""
    with contextlib.suppress(OSError, ValueError):
        address = (host.strip("[]"), int(port))
        with socket.create_connection(address, timeout=GREETING_LIMIT_S) as asking:
            while len(said) < SIGNATURE_BYTES and (more := asking.recv(SIGNATURE_BYTES)):
                said += more
    return len(said) >= SIGNATURE_BYTES and said[0] == 0xFF and said[9] == 0x7F


def _common_options(sock: "zmq.Socket[bytes]") -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + BOX_BYTES)
    sock.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
    sock.setsockopt(zmq.RCVHWM, SEND_QUEUE_FRAMES)
    # Not the library's own heartbeats: they may end the process (`gate.py`).
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, LINK_LIMIT_S - LINK_PROBES)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, LINK_PROBES)
    sock.setsockopt(zmq.TCP_MAXRT, LINK_LIMIT_S * 1000)


def _milliseconds(timeout_s: float) -> int:
    """Return seconds as whole milliseconds for ZeroMQ, rounded up so that a deadline has passed."""
    return math.ceil(max(0.0, timeout_s) * 1000)


def _wait(
    poller: zmq.Poller, timeout_s: float, busy_poll_s: float, *, exact: bool = False
) -> dict[Any, int]:
    """Return the sockets that are ready and their events; waits for one at most `timeout_s`.

    busy_poll_s  how much of that time is spent polling without pause before it sleeps
    exact        True: the timeout is kept to about 0.1 ms
    """
    ready = poller.poll(0)
    if not ready and timeout_s > 0:
        now = time.perf_counter()
        end, end_of_asking = now + timeout_s, now + min(timeout_s, busy_poll_s)
        while not ready and now < end_of_asking:
            ready = poller.poll(0)
            now = time.perf_counter()
        if not ready:
            left_s = end - now
            ready = _poll_exactly(poller, left_s) if exact else poller.poll(_milliseconds(left_s))
    return dict(ready)


def _poll_exactly(poller: zmq.Poller, timeout_s: float) -> list[tuple[Any, int]]:
    """Return the sockets that are ready within `timeout_s`, kept to about 0.1 ms.

    The kernel waits whole milliseconds. The short sleeps keep no core busy.
    """
    end = time.perf_counter() + timeout_s
    ready = poller.poll(math.floor(timeout_s * 1000))
    while not ready and (left_s := end - time.perf_counter()) > 0:
        if left_s > NAP_S + AWAKE_S:
            time.sleep(NAP_S)
        ready = poller.poll(0)
    return ready


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that never block. Raises TransportError."""
    try:
        ends = socket.socketpair()
    except OSError as error:
        raise TransportError(
            f"cannot open a socket: {error.strerror}; {RAISE_THE_LIMIT}"
        ) from error
    for end in ends:
        end.setblocking(False)
    return ends


def _new_socket(kind: int) -> "tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]":
    """Return a ZeroMQ socket and its context, which is its own. Raises TransportError."""
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(kind)
    except zmq.ZMQError as error:
        # The error depends on where the limit was met; a limit is the only possible reason.
        raise TransportError(
            f"cannot open a socket: {error.strerror}; {RAISE_THE_LIMIT}"
        ) from error
    _common_options(sock)
    return context, sock


@dataclass(frozen=True, slots=True)
class _Peer:
    """What a listener knows of one connection.

    claim   its name and life; None: it has stated none that is believed
    number  its file descriptor, if it has come through the gate
    """

    claim: Claim | None
    number: int | None


class Listener:
    """The coordinator's socket, to which all nodes connect; for one thread (any may call `wake`).

    endpoint  address for the nodes of this host, with the port that was chosen for ":*"; "": none
    outside   address for the nodes of other hosts; "": none
    """

    def __init__(
        self,
        endpoint: str,
        *,
        busy_poll_s: float = 0.0,
        outside: str = "",
        keys: CoordinatorKeys | None = None,
    ) -> None:
        """Bind the socket. Raises ConfigurationError, TransportError.

        endpoint     address to bind for nodes of this host; a port "*" is any free one; "": none
        busy_poll_s  how long a wait polls for frames without pause before it sleeps
        outside      address to bind for nodes of other hosts, which need these keys; "": none
        """
        for place, is_encrypted in ((endpoint, False), (outside, keys is not None)):
            if place:
                check_endpoint(place, is_encrypted=is_encrypted)
        self._woken, self._waker = _socket_pair()
        self._context, self._socket = _new_socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # No limit: if a receive queue is full, the library may end the process (`gate.py`).
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._gate: Gate | None = None
        self._names = Names(self._is_open)
        self._peers: dict[bytes, _Peer] = {}  # by ROUTER identity; the latest PEERS_KNOWN
        self._new_lines: deque[tuple[bytes, Line]] = deque()  # any thread may add one
        self._lines: dict[bytes, Line] = {}  # by node
        self._turned_away: list[str] = []
        self._misnamed: list[str] = []
        self.outside = ""
        self.endpoint = self._bound(endpoint, None) if endpoint else ""
        if outside:
            self.outside = self._bound(outside, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._frames = zmq.Poller()
        self._frames.register(self._socket, zmq.POLLIN)
        self._busy_poll_s = busy_poll_s

    def _guarded_with(self, keys: CoordinatorKeys) -> Gate:
        try:
            return Gate(self._context, self._socket, keys)
        except (zmq.ZMQError, OSError) as error:
            self.close(linger_s=0.0)
            raise TransportError(
                f"cannot guard the socket: {error.strerror}; {RAISE_THE_LIMIT}"
            ) from error

    def _bound(self, endpoint: str, keys: CoordinatorKeys | None) -> str:
        if endpoint.startswith(TCP) and self._gate is None:
            self._gate = self._guarded_with(keys or open_door())
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(linger_s=0.0)
            is_taken = error.errno == zmq.EADDRINUSE
            advice = "is another coordinator running there?" if is_taken else NAME_AN_ADDRESS
            why = os.strerror(zmq.EADDRINUSE) if is_taken else error.strerror
            raise TransportError(f"cannot listen on {endpoint}: {why}; {advice}") from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_refused(self) -> int:
        """Return how many connections over TCP were refused so far."""
        return 0 if self._gate is None else self._gate.num_refused

    @property
    def num_unknown(self) -> int:
        """Return how many connections have shown a key that is not known."""
        return 0 if self._gate is None else self._gate.num_unknown

    def turned_away(self) -> list[str]:
        """Take and return the new lines about processes whose name another process holds."""
        lines, self._turned_away = self._turned_away, []
        return lines

    def misnamed(self) -> list[str]:
        """Take and return the new lines about nodes that show the known key of another node."""
        lines, self._misnamed = self._misnamed, []
        return lines

    def wake(self) -> None:
        """Make a waiting `receive` return (from any thread)."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that have arrived, as (node's name, frame); waits at most `timeout_s`.

        At most FRAMES_AT_ONCE are read in one call, and of each line what one read of it brings, so
        that a peer that sends without end does not keep the caller from its other work.

        exact  True: the timeout is kept to about 0.1 ms, and not only to whole milliseconds
        """
        self._take_new_lines()
        ready = _wait(self._poller, timeout_s, self._busy_poll_s, exact=exact)
        for name, line in tuple(self._lines.items()):
            if (events := ready.get(line.fileno())) is not None:
                yield from self._read(name, line, events)
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        is_ready = self._socket in ready
        with contextlib.suppress(zmq.Again):
            for _ in range(FRAMES_AT_ONCE):
                if not is_ready:
                    break
                if (received := self._next()) is not None:
                    yield received
                # To poll costs a third of a receive that finds no frame.
                is_ready = bool(self._frames.poll(0))

    def add_line(self, name: bytes, line: Line) -> None:
        """Take our end of a line to a node, in place of an older one (from any thread)."""
        self._new_lines.append((name, line))
        self.wake()

    def _take_new_lines(self) -> None:
        while self._new_lines:
            name, line = self._new_lines.popleft()
            self._drop(name)
            self._lines[name] = line
            self._poller.register(line.fileno(), zmq.POLLIN)

    def _read(self, name: bytes, line: Line, events: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield what has come over a line, as (node's name, frame); send what waits to leave."""
        if events & zmq.POLLOUT:
            line.flush()
            self._watch(line)
        if events & ~zmq.POLLOUT:
            for frame in line.read():
                yield name, frame
        if not line.is_open and self._lines.get(name) is line:
            self._drop(name)

    def _watch(self, line: Line) -> None:
        """Let waits end when a line has frames, and while frames wait, when it takes more."""
        self._poller.register(line.fileno(), zmq.POLLIN | (zmq.POLLOUT if line.has_unsent else 0))

    def _drop(self, name: bytes) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            self._poller.unregister(line.fileno())
            line.close()

    def _next(self) -> tuple[bytes, bytes] | None:
        """Return (node's name, frame) of the next message; None if it is not for the caller."""
        connection = self._socket.recv(zmq.NOBLOCK)
        peer = self._peers.get(connection)
        if peer is None:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            peer = self._introduced(connection, parts[0])
            frames = [part.bytes for part in parts]
        else:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        if self._gate is not None and peer.number is not None:
            self._gate.came(peer.number, sum(map(len, frames)), len(frames))
        if peer.claim is None or not self._names.has(peer.claim):
            return None
        if not peer.claim.life:  # of an older release: its frames say which connection it reads
            self._names.introduce(connection, peer.claim)
        # The first frame of a connection is empty; it is not for the caller.
        return (peer.claim.name, frames[0]) if len(frames) == 1 and frames[0] else None

    def _introduced(self, connection: bytes, frame: "zmq.Frame") -> _Peer:
        """Find out who has opened a new connection from its first frame; remember and return it."""
        while len(self._peers) >= PEERS_KNOWN:
            del self._peers[next(iter(self._peers))]
        words, number = property_of(frame, PROPERTY), None
        if self._gate is not None and property_of(frame, "User-Id"):
            claim, number = self._gate.claim(frame), self._gate.number(frame)
            if claim is None and (wanted := heard(words)) is not None:
                self._refuse_name(connection, self._gate.owner(frame), wanted)
        else:
            claim = heard(words) if words else None
        if claim is not None and not self._names.introduce(connection, claim):
            self._turn_away(connection, claim)
            claim = None
        self._peers[connection] = peer = _Peer(claim, number)
        return peer

    def _turn_away(self, connection: bytes, claim: Claim) -> None:
        """Tell a process that another process has its name, and keep a line about it."""
        name = _shown(claim)
        self._tell(connection, f"another process takes part as {name}; {TAKE_ANOTHER_NAME}")
        if claim.is_answered:
            self._turned_away.append(f"a second process called itself {name} and was turned away")

    def _refuse_name(self, connection: bytes, owner: bytes, wanted: Claim) -> None:
        """Tell a process that its key belongs to another node, and keep a line about it."""
        name = _shown(wanted)
        line = f"the coordinator knows this key, but not as that of {name}"
        self._tell(connection, f"{line}; {COPY}")
        if wanted.is_answered:
            self._misnamed.append(f"a node with the key of {owner.decode()} called itself {name}")

    def _tell(self, connection: bytes, line: str) -> None:
        """Send a Fault that says why the process on this connection cannot take part."""
        self._put(connection, encode(Fault(0, 0, FaultCode.UNUSABLE, line)))

    def _is_open(self, connection: bytes) -> bool:
        """True if a connection is open, as far as the system knows."""
        try:
            self._socket.send_multipart((connection, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN
        return True

    def send(self, name: bytes, frame: bytes) -> bool:
        """Send without blocking; False if the node is not connected, or too much waits for it."""
        if (line := self._lines.get(name)) is not None:
            is_sent = line.send(frame)
            if line.has_unsent:
                self._watch(line)
            return is_sent
        connection = self._names.connection(name)
        return connection is not None and self._put(connection, frame)

    def _put(self, connection: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart((connection, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_s: float = 0.2) -> None:
        """Close the sockets; frames that ZeroMQ has queued have `linger_s` seconds to leave."""
        for line in (*self._lines.values(), *(line for _, line in self._new_lines)):
            line.close()
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=int(linger_s * 1000))
        self._woken.close()
        self._waker.close()


_lives: dict[int, str] = {}  # by process id: a process that was forked from another has its own


def own_life() -> str:
    """Return the life of this process: a random word that tells it from all others."""
    return _lives.setdefault(os.getpid(), secrets.token_hex(8))


class Connection:
    """A node's socket, connected to the coordinator. One thread uses it.

    Heartbeats have another one.
    """

    def __init__(
        self,
        endpoint: str,
        name: bytes,
        *,
        busy_poll_s: float = 0.0,
        keys: NodeKeys | None = None,
        is_answered: bool = True,
        life: str = "",
        line: Line | None = None,
    ) -> None:
        """Connect to the coordinator. Raises ConfigurationError, TransportError.

        name         of this node
        busy_poll_s  how long a wait polls for frames without pause before it sleeps
        keys         of this node, for a coordinator on another host
        is_answered  True: the coordinator sends this node's frames over this connection
        life         random word that tells this process from others of the same name; "": its own
        line         over which all frames go while it is open; None: they go over ZeroMQ
        """
        check_endpoint(endpoint, is_encrypted=keys is not None)
        self.is_remote = endpoint.startswith(TCP)
        self._line = line
        self._came: deque[bytes] = deque()  # over the line, and not yet received by the caller
        self._context, self._socket = _new_socket(zmq.DEALER)
        self._socket.setsockopt(METADATA, spoken(Claim(name, life or own_life(), is_answered)))
        # Send an empty frame first on every connection, also after the library has reconnected: so
        # the coordinator knows which one reaches the node before the node has sent anything.
        self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_LIMIT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
        self._refusals: zmq.Socket[bytes] | None = None
        self._endpoint, self._has_keys = endpoint, keys is not None
        try:
            if self.is_remote:
                self._lock_with(keys or open_hand())
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(f"cannot connect to {endpoint}: {error.strerror}") from error
        self._frames = zmq.Poller()
        self._frames.register(self._socket, zmq.POLLIN)
        self._busy_poll_s = busy_poll_s
        self._num_unfinished = 0  # failed handshakes since the last one that succeeded
        self._has_greeted = False  # after as many as are too many, a coordinator was there

    def _lock_with(self, keys: NodeKeys) -> None:
        self._socket.curve_publickey = keys.own.public.encode()
        self._socket.curve_secretkey = keys.own.secret.encode()
        self._socket.curve_serverkey = keys.coordinator.encode()
        # While the link is cut no frames are queued: they would be stale when it works again.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._refusals = self._socket.get_monitor_socket(HANDSHAKES)

    def refusal(self) -> str:
        """Return why the coordinator does not accept this node's key; "" if no reason is known."""
        if self._refusals is None:
            return ""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._refusals, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return (
                        f"the coordinator at {self._endpoint} does not know this node's key; {COPY}"
                    )
                is_over = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._num_unfinished = 0 if is_over else self._num_unfinished + 1
                self._has_greeted &= not is_over
        # A coordinator with another key gives no reason. A coordinator that has just ended gives
        # none either, but only once, and a tunnel that leads to no coordinator yet gives none.
        if self._num_unfinished < UNFINISHED_HANDSHAKES:
            return ""
        # Those behind a tunnel say nothing of a coordinator that has come since.
        was_there, self._has_greeted = self._has_greeted, _greets(self._endpoint)
        if not (was_there and self._has_greeted):
            self._num_unfinished = 0
            return ""
        if not self._has_keys:
            return f"what listens at {self._endpoint} takes nobody without keys; give --keys DIR"
        return (
            f"what listens at {self._endpoint} has another key than coordinator.key says; "
            "copy that file from the coordinator, and start the coordinator with --keys DIR"
        )

    def answered(self) -> None:
        """Note that the coordinator has answered: handshakes need not be watched any more."""
        if self._refusals is not None:
            self._socket.disable_monitor()
            self._refusals = None

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[bytes]:
        """Yield the frames that have arrived; waits for the first at most `timeout_s`.

        At most NODE_FRAMES_AT_ONCE are read in one call, or what one read of the line brings, so
        that a peer that sends without end does not keep the node from its own work.

        exact  True: the timeout is kept to about 0.1 ms
        """
        if self._line is not None or self._came:
            # What a caller leaves, once it has what it waited for, comes with the next call.
            if (line := self._line) is not None and not self._came:
                self._came.extend(line.receive(timeout_s, self._busy_poll_s, exact=exact))
                if not line.is_open:
                    self._line = None
                    line.close()
            while self._came:
                yield self._came.popleft()
            return
        is_ready = bool(_wait(self._frames, timeout_s, self._busy_poll_s, exact=exact))
        with contextlib.suppress(zmq.Again):
            for _ in range(NODE_FRAMES_AT_ONCE):
                if not is_ready:
                    break
                if frame := self._socket.recv(zmq.NOBLOCK):  # empty: a test that we are connected
                    yield frame
                # To poll costs a third of a receive that finds no frame.
                is_ready = bool(self._frames.poll(0))

    def has_frames(self) -> bool:
        """True if frames have arrived that were not received yet."""
        if self._line is not None:
            return bool(self._came) or self._line.wait(0.0)
        return bool(self._frames.poll(0))

    def send(self, frame: bytes) -> bool:
        """Send without blocking; False if too much waits already, or the line is closed."""
        if self._line is not None:
            return self._line.send(frame)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_s: float = 0.5) -> None:
        """Close the sockets; frames that ZeroMQ has queued have `linger_s` seconds to leave."""
        self.answered()
        if self._line is not None:
            self._line.close()
        self._context.destroy(linger=int(linger_s * 1000))
