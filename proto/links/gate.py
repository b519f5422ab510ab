"""Admits only nodes whose keys are known to a socket that is reached over TCP.

All traffic over TCP is encrypted (CURVE). A peer's key is checked before any frame of it is taken
(ZAP, RFC 27 of ZeroMQ). A peer whose key is unknown, that speaks another protocol or that does not
finish its handshake is refused, and counted. On a loopback address without keys the same is done
with a key that everybody knows: it protects nothing, but so there is only one kind of connection.

How a hostile peer could harm libzmq 4.3.5, and what prevents it here:

* The library ends the process if a second connection takes over the ROUTER identity of another
  one, or if its own counter reaches an identity that a peer has chosen. So the identity of every
  connection is drawn here, and given to the library with the answer to its key; it overrules the
  identity for which the peer has asked.
* The library's own heartbeats, or a peer's PING, end the process if a connection breaks while its
  queue is full. So the library's heartbeats are off (TCP keepalive does their work), and receive
  queues have no limit, so that none is ever full.
* The library keeps a message of many parts until its last part has come. So a peer that has sent
  much more than was read from the socket is disconnected (`Backlog`).
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from proto.links.keys import CoordinatorKeys
from proto.links.names import NO_LIFE, Claim

# -- backlog ---------------------------------------------------------------------------------------

# The backlog: bytes that peers have sent and that could not be read yet. It is bounded for all
# connections together.
#
# ZeroMQ keeps the parts of a message until its last part has come, and counts messages rather than
# bytes in its queues. So a peer that was admitted could fill the memory. The operating system knows
# how many bytes have arrived over a connection, and the reader how many it has read; the difference
# is held by the library. If it exceeds the limit for all connections together, the connection with
# most of it is shut down.

LIMIT_BYTES = 1 << 29  # the features of a long prompt are a fifth of it
# For each part: header of the frame, name of the command, nonce, box and flags. Short frames have
# less, so that a peer's backlog is estimated too low rather than too high.
OVERHEAD_BYTES = 42
TCP_INFO_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in `struct tcp_info`


@dataclass(slots=True)
class _Connection:
    inode: int  # tells whether the file descriptor still belongs to this connection
    num_bytes: int = 0  # bytes that were read from the connection, as they travel


class Backlog:
    """Counts the unread bytes of each connection of a socket, and shuts one down at a limit.

    Connections are named by their file descriptors. Unread bytes have arrived at this host and have
    not been returned by the socket yet.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._connections: dict[int, _Connection] = {}

    def opened(self, connection: int) -> None:
        """Start counting the bytes of a new connection."""
        if inode := _inode(connection):
            self._connections[connection] = _Connection(inode)

    def closed(self, connection: int) -> None:
        """Stop counting the bytes of a connection that has ended."""
        self._connections.pop(connection, None)

    def came(self, connection: int, num_bytes: int, num_parts: int) -> None:
        """Add a message of this size, read from the socket, to the bytes read of its connection."""
        if known := self._connections.get(connection):
            known.num_bytes += num_bytes + num_parts * OVERHEAD_BYTES

    def limit(self) -> None:
        """Shut down the connection with most unread bytes, if their sum is above the limit."""
        kept = {
            connection: _received(connection, known.inode) - known.num_bytes
            for connection, known in self._connections.items()
        }
        if sum(size for size in kept.values() if size > 0) > self._limit_bytes:
            worst = max(kept, key=kept.__getitem__)
            _shut_down(worst, self._connections[worst].inode)


def _inode(connection: int) -> int:
    """Return the inode of an open file descriptor; 0 if it is closed."""
    try:
        return os.fstat(connection).st_ino
    except OSError:
        return 0


def _received(connection: int, inode: int) -> int:
    """Return how many bytes have arrived over a TCP connection so far; 0 if it is closed.

    connection, inode  its file descriptor, and the inode by which it is recognised
    """
    info = b""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=connection)
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RECEIVED.size)
        finally:
            borrowed.detach()
    # Checked afterwards: the library may have closed the connection, and its descriptor may by now
    # belong to another one.
    if len(info) < TCP_INFO_RECEIVED.size or _inode(connection) != inode:
        return 0
    return int(TCP_INFO_RECEIVED.unpack(info)[0])


def _shut_down(connection: int, inode: int) -> None:
    """Shut down a TCP connection, if it is still this one; the library then closes it."""
    # The copied descriptor stays with this connection, whatever the library does meanwhile.
    with (
        contextlib.suppress(OSError),
        socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as copied,
    ):
        if _inode(copied.fileno()) == inode:
            copied.shutdown(socket.SHUT_RDWR)


# -- gate ------------------------------------------------------------------------------------------

HANDSHAKE_LIMIT_MS = 5000  # a connection that has not finished its handshake by then is closed
WAITING_CONNECTIONS = 512  # most connections that wait to be accepted
IDENTITY_BYTES = 16
PROPERTY = "X-Node"  # metadata of the handshake in which a node gives its name
# The library asks here first, and then reads the identity for which the peer has asked. That would
# replace the identity in an answer that had come before; so the answer is given a little later.
ANSWERED_AFTER_S = 0.01
CLAIM_CHARS = 100
EVENTS = "inproc://events"
ZAP = "inproc://zeromq.zap.01"  # the address at which the library asks whether a key is known
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def spoken(claim: Claim) -> bytes:
    """Return the handshake metadata in which a node states its claim (name, life, is_answered)."""
    kind = "work" if claim.is_answered else "beats"
    return f"{PROPERTY}:{kind} {claim.life} {claim.name.decode()}".encode()


def heard(words: str) -> Claim | None:
    """Return the claim in a peer's handshake metadata; None if it is not valid."""
    kind, _, rest = words.partition(" ")
    life, _, name = rest.partition(" ")
    if not name or not life or kind not in ("work", "beats") or len(words) > CLAIM_CHARS:
        return None
    return Claim(name.encode(), life, is_answered=kind == "work")


def property_of(frame: "zmq.Frame", name: str) -> str:
    """Return a property of the connection over which a frame has come; "" if it has none."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


class Gate:
    """Checks keys (CURVE) at every address that the socket binds after this gate is made.

    Addresses that the socket was bound to earlier stay open. Used by the thread of the socket; a
    thread of its own answers the library. Raises zmq.ZMQError or OSError if it cannot be made.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sock: "zmq.Socket[bytes]",
        keys: CoordinatorKeys,
    ) -> None:
        self._keys = keys
        self.num_unknown = 0  # handshakes with an unknown key
        self._num_let_in = 0  # handshakes with a known key
        self._num_heard = 0  # connections from which a frame was accepted
        self._num_mute = 0  # connections that have ended, and from which no frame was accepted
        self._num_refused = 0  # refused connections; never becomes less
        self._socket = sock
        self._asked = context.socket(zmq.ROUTER)
        self._asked.bind(ZAP)
        sock.curve_secretkey = keys.own.secret.encode()
        sock.curve_publickey = keys.own.public.encode()
        sock.curve_server = True
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        sock.setsockopt(zmq.BACKLOG, WAITING_CONNECTIONS)
        self._open: set[int] = set()  # file descriptors of the open connections
        self._speaking: set[int] = set()  # those of them from which frames were accepted
        self._backlog = Backlog()
        # Without a limit: at a limit the library would block, and with it every connection.
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        sock.monitor(EVENTS, WATCHED)
        self._monitor.connect(EVENTS)
        self._stopped, self._stopper = socket.socketpair()
        self._thread = threading.Thread(target=self._answer, name="gate", daemon=True)
        self._thread.start()

    # -- checking keys: the thread of the gate ----------------------------------------------------

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        answers: deque[tuple[float, list[bytes]]] = deque()  # with the time at which each is due
        while True:
            left_s = answers[0][0] - time.monotonic() if answers else None
            ready = dict(poller.poll(None if left_s is None else max(0, 1 + int(1000 * left_s))))
            if self._stopped.fileno() in ready:
                break
            now = time.monotonic()
            if self._asked in ready:
                sender, _, _, request, _, _, _, _, *given = self._asked.recv_multipart()
                answer = [sender, b"", b"1.0", request, *self._verdict(given)]
                answers.append((now + ANSWERED_AFTER_S, answer))
            while answers and answers[0][0] <= now:
                self._asked.send_multipart(answers.popleft()[1])
        self._asked.close(linger=0)

    def _verdict(self, given: list[bytes]) -> tuple[bytes, bytes, bytes, bytes]:
        """Count a shown key; return the ZAP answer: status, text, user id (the key), metadata."""
        key = z85.encode(given[0]) if len(given) == 1 else b""
        if not self._keys.lets_in(key.decode()):
            self.num_unknown += 1
            return b"400", b"unknown key", b"", b""
        self._num_let_in += 1
        identity = secrets.token_bytes(IDENTITY_BYTES)
        length = len(identity).to_bytes(4, "big")
        return b"200", b"OK", key, b"\x08Identity" + length + identity

    # -- frames that arrive: the thread of the socket ---------------------------------------------

    def claim(self, frame: "zmq.Frame") -> Claim | None:
        """Return the claim of the frame's connection, if its key is that node's; else None.

        A frame of a connection whose claim is right counts as accepted (see `speaks`).
        """
        key, words = property_of(frame, "User-Id"), property_of(frame, PROPERTY)
        claim = heard(words) if words else self._of_older_release(key)
        if claim is None or not self._keys.is_of(claim.name, key):
            return None
        self.speaks(self.number(frame))
        return claim

    def owner(self, frame: "zmq.Frame") -> bytes:
        """Return the name of the node whose key the frame's connection has shown; else b""."""
        return self._keys.name_of(property_of(frame, "User-Id")) or b""

    def _of_older_release(self, key: str) -> Claim | None:
        """Return the claim of a node of an older release, by its key; None: the key is unknown."""
        name = self._keys.name_of(key)
        return None if name is None else Claim(name, NO_LIFE)

    def number(self, frame: "zmq.Frame") -> int:
        """Return the file descriptor of the connection over which the frame has come."""
        return int(frame.get(zmq.SRCFD))

    def speaks(self, connection: int) -> None:
        """Note that a frame of this connection (a file descriptor) was accepted."""
        if connection in self._speaking:
            return
        self._watch()  # an earlier connection with this descriptor must be forgotten first
        if connection in self._open:  # else it has ended meanwhile, and was counted as mute
            self._speaking.add(connection)
            self._num_heard += 1

    def came(self, connection: int, num_bytes: int, num_parts: int) -> None:
        """Note that a message of `num_bytes` in `num_parts` was read from this connection."""
        self._backlog.came(connection, num_bytes, num_parts)

    @property
    def num_refused(self) -> int:
        """Return how many connections were refused so far.

        Must be read often: it also reads pending events.

        The library reports most refusals, not all, and does not say which connection has completed
        a handshake. So the number is computed: connections that have ended without an accepted
        frame, less those that had a known key and no accepted frame. Some of the latter are still
        open for a moment, and for that long the number is too low by as many.
        """
        self._watch()
        self._backlog.limit()
        num_let_in_and_mute = self._num_let_in - self._num_heard
        self._num_refused = max(self._num_refused, self._num_mute - num_let_in_and_mute)
        return self._num_refused

    def _watch(self) -> None:
        """Read the library's events: which connections were opened and which were closed."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if not event["endpoint"].startswith(b"tcp"):  # nodes over ipc:// have no keys
                    continue
                connection = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._backlog.opened(connection)
                    self._open.add(connection)
                else:
                    self._backlog.closed(connection)
                    self._num_mute += connection not in self._speaking
                    self._open.discard(connection)
                    self._speaking.discard(connection)

    def close(self) -> None:
        """End the gate's thread and sockets; called before the ZeroMQ context is destroyed."""
        self._socket.disable_monitor()
        with contextlib.suppress(OSError):
            os.write(self._stopper.fileno(), b"\0")
        self._thread.join()
        self._stopped.close()
        self._stopper.close()
