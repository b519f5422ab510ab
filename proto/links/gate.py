"""Who may speak at a socket that is reached over TCP: only nodes whose keys are known.

Everything there is encrypted (CURVE). Keys are asked for before any frame is taken (ZAP, RFC 27 of
ZeroMQ); whoever has none that is known, speaks another protocol or does not finish its handshake is
refused, and counted. On a loopback address without keys the same is done with a key that everybody
knows: it keeps no secret, but then there is one kind of connection only.

What a hostile peer can do to libzmq 4.3.5, and why it cannot here:

* Two connections under one ROUTER identity end the process where identities are handed over, and so
  does an identity of the peer's choice that the library's own counter comes to. So the identity of
  every connection is drawn here and given to the library with the answer to its keys, which counts
  more than what the peer has asked for.
* The library's own heartbeats, or a peer's PING, end the process where a connection breaks while
  its queue is full. So there are no heartbeats of the library (TCP's do the same), and no queue
  that is read from is ever full.
* A message of ever more parts is kept until its last one. So whoever has sent much more than has
  come out of the socket is cut off (`Backlog`).
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

# What connections have sent and nobody could read yet: bounded for all of them together.
#
# ZeroMQ keeps the parts of a message until its last one has come, and counts messages rather than
# bytes in its queues. So a peer that is let in could fill the memory. The system knows how much has
# come over a connection, the reader how much of that came out: the rest lies in between. Where all
# connections together have more than the limit, the one that has most is shut down.

LIMIT_BYTES = 1 << 29  # the features of a long prompt are a fifth of it
# Of each part: header of the frame, name of the command, nonce, box and flags. Short frames have
# less: so too little is held against a peer, rather than too much.
OVERHEAD_BYTES = 42
TCP_INFO_RECEIVED = struct.Struct("128xQ")  # of `struct tcp_info`: tcpi_bytes_received


@dataclass(slots=True)
class _Connection:
    inode: int  # a number may be another connection's by now, an inode is not
    num_bytes: int = 0  # that came out


class Backlog:
    """Of the connections of one socket, by their file descriptors."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._connections: dict[int, _Connection] = {}

    def opened(self, connection: int) -> None:
        """One was taken."""
        if inode := _inode(connection):
            self._connections[connection] = _Connection(inode)

    def closed(self, connection: int) -> None:
        """One is gone."""
        self._connections.pop(connection, None)

    def came(self, connection: int, num_bytes: int, num_parts: int) -> None:
        """A message was read."""
        if known := self._connections.get(connection):
            known.num_bytes += num_bytes + num_parts * OVERHEAD_BYTES

    def limit(self) -> None:
        """Shut down who has most, where all have too much."""
        kept = {
            connection: _received(connection, known.inode) - known.num_bytes
            for connection, known in self._connections.items()
        }
        if sum(size for size in kept.values() if size > 0) > self._limit_bytes:
            worst = max(kept, key=kept.__getitem__)
            _shut_down(worst, self._connections[worst].inode)


def _inode(connection: int) -> int:
    """Of an open file; 0: it is closed."""
    try:
        return os.fstat(connection).st_ino
    except OSError:
        return 0


def _received(connection: int, inode: int) -> int:
    """Bytes that have come over it so far; 0: it is closed."""
    info = b""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=connection)
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RECEIVED.size)
        finally:
            borrowed.detach()
    # Asked afterwards: the library may have closed it, and its number may be another one's by now.
    if len(info) < TCP_INFO_RECEIVED.size or _inode(connection) != inode:
        return 0
    return int(TCP_INFO_RECEIVED.unpack(info)[0])


def _shut_down(connection: int, inode: int) -> None:
    """The library sees that the peer has gone, and closes it."""
    # A copy of the number stays this connection's, whatever the library does meanwhile.
    with (
        contextlib.suppress(OSError),
        socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as copied,
    ):
        if _inode(copied.fileno()) == inode:
            copied.shutdown(socket.SHUT_RDWR)


# -- gate ------------------------------------------------------------------------------------------

HANDSHAKE_LIMIT_MS = 5000  # after that a connection that has not said who it is is closed
WAITING_CONNECTIONS = 512  # that wait to be taken
IDENTITY_BYTES = 16
PROPERTY = "X-Node"  # what a node says of itself, in the handshake
# The library reads what the peer has asked for after it has asked here. An answer that is there
# already would count less than that; so it comes a little later.
ANSWERED_AFTER_S = 0.01
CLAIM_CHARS = 100
EVENTS = "inproc://events"
ZAP = "inproc://zeromq.zap.01"  # where the library asks
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def spoken(claim: Claim) -> bytes:
    """A claim as a property of the handshake."""
    kind = "work" if claim.is_answered else "beats"
    return f"{PROPERTY}:{kind} {claim.life} {claim.name.decode()}".encode()


def heard(words: str) -> Claim | None:
    """The claim in such a property; None: it is none."""
    kind, _, rest = words.partition(" ")
    life, _, name = rest.partition(" ")
    if not name or not life or kind not in ("work", "beats") or len(words) > CLAIM_CHARS:
        return None
    return Claim(name.encode(), life, is_answered=kind == "work")


def property_of(frame: "zmq.Frame", name: str) -> str:
    """A property of the connection that a frame has come over; empty if there is none."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


class Gate:
    """Stands before the next address that a socket is bound to; those before it stay as they are.

    Used by the thread of the socket. Raises zmq.ZMQError where it cannot be made.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sock: "zmq.Socket[bytes]",
        keys: CoordinatorKeys,
    ) -> None:
        self._keys = keys
        self.num_unknown = 0  # keys that were shown and that nobody knows
        # Connections with a known key: all, and those that something was let through from.
        self._num_let_in = 0
        self._num_heard = 0
        self._num_mute = 0  # that are gone, and nothing was let through from
        self._num_refused = 0  # never becomes less
        self._socket = sock
        self._asked = context.socket(zmq.ROUTER)
        self._asked.bind(ZAP)
        sock.curve_secretkey = keys.own.secret.encode()
        sock.curve_publickey = keys.own.public.encode()
        sock.curve_server = True
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        sock.setsockopt(zmq.BACKLOG, WAITING_CONNECTIONS)
        self._open: set[int] = set()  # connections, as the system knows them
        self._speaking: set[int] = set()  # of those, the ones that frames have come from
        self._backlog = Backlog()
        # With a limit the library would wait at it, and with it every connection.
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        sock.monitor(EVENTS, WATCHED)
        self._monitor.connect(EVENTS)
        self._stopped, self._stopper = socket.socketpair()
        self._thread = threading.Thread(target=self._answer, name="gate", daemon=True)
        self._thread.start()

    # -- who may come in: the thread of the gate --------------------------------------------------

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        answers: deque[tuple[float, list[bytes]]] = deque()  # and when each is given
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
        """Status, its words, the name of a user, and properties of the connection."""
        key = z85.encode(given[0]) if len(given) == 1 else b""
        if not self._keys.lets_in(key.decode()):
            self.num_unknown += 1
            return b"400", b"unknown key", b"", b""
        self._num_let_in += 1
        identity = secrets.token_bytes(IDENTITY_BYTES)
        length = len(identity).to_bytes(4, "big")
        return b"200", b"OK", key, b"\x08Identity" + length + identity

    # -- what comes: the thread of the socket -----------------------------------------------------

    def claim(self, frame: "zmq.Frame") -> Claim | None:
        """What the connection of this frame says of itself, if its key is that node's."""
        key, words = property_of(frame, "User-Id"), property_of(frame, PROPERTY)
        claim = heard(words) if words else self._of_older_release(key)
        if claim is None or not self._keys.is_of(claim.name, key):
            return None
        self.speaks(self.number(frame))
        return claim

    def owner(self, frame: "zmq.Frame") -> bytes:
        """The node whose key the connection of this frame has shown; empty: nobody's."""
        return self._keys.name_of(property_of(frame, "User-Id")) or b""

    def _of_older_release(self, key: str) -> Claim | None:
        """It gave no name in its handshake; its key has one."""
        name = self._keys.name_of(key)
        return None if name is None else Claim(name, NO_LIFE)

    def number(self, frame: "zmq.Frame") -> int:
        """Of the connection, as the system knows it."""
        return int(frame.get(zmq.SRCFD))

    def speaks(self, connection: int) -> None:
        """Something was let through."""
        if connection in self._speaking:
            return
        self._watch()  # one that had this number before
        if connection in self._open:  # else it has gone in the meantime, and was counted as mute
            self._speaking.add(connection)
            self._num_heard += 1

    def came(self, connection: int, num_bytes: int, num_parts: int) -> None:
        """So much has come out of the socket."""
        self._backlog.came(connection, num_bytes, num_parts)

    @property
    def num_refused(self) -> int:
        """Connections that were refused so far. Asked often: what is not read would pile up.

        The library tells of most refusals, not of all, and of a completed handshake it does not say
        which connection it was. So they are those that have gone and nothing was let through from,
        less those that were let in and nothing was let through from: among these are some that are
        still open, for a moment, and until then as many refusals are not told yet.
        """
        self._watch()
        self._backlog.limit()
        num_let_in_and_mute = self._num_let_in - self._num_heard
        self._num_refused = max(self._num_refused, self._num_mute - num_let_in_and_mute)
        return self._num_refused

    def _watch(self) -> None:
        """Take note of the connections that have come and gone."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if not event["endpoint"].startswith(b"tcp"):  # the nodes of this host have no keys
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
        """Before its context goes."""
        self._socket.disable_monitor()
        with contextlib.suppress(OSError):
            os.write(self._stopper.fileno(), b"\0")
        self._thread.join()
        self._stopped.close()
        self._stopper.close()
