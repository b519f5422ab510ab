"""Frames between processes over ZeroMQ; with `keys.py` and `gate.py` the only ones that import it.

The coordinator binds one ROUTER (`Listener`), for the nodes of its own host and, encrypted, for
those of others; every node connects DEALERs (`Connection`). Sends never block: a frame that does
not fit into a queue is refused and the caller counts it. A ROUTER says so when a peer is unknown
(it would drop the frame silently otherwise), and nothing lingers at exit.
"""

import contextlib
import ipaddress
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import zmq

from proto.errors import ConfigurationError, TransportError, shown
from proto.links.gate import Gate
from proto.links.keys import HOW, CoordinatorKeys, NodeKeys
from proto.messages import MAX_FRAME_BYTES
from proto.system_errors import RAISE_THE_LIMIT

SEND_QUEUE_FRAMES = 4096
MAX_IPC_PATH_BYTES = 107  # sun_path less its terminating zero
CONNECT_LIMIT_MS = 2000  # the system itself would wait for minutes where a link is cut
RECONNECT_MS = 1000
NAME_AN_ADDRESS = "name an address of this host, and a port that you may use"
NAP_S, AWAKE_S = 50e-6, 80e-6  # a nap takes about as much longer as this


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_endpoint(endpoint: str, *, is_encrypted: bool = False) -> None:
    """Raises ConfigurationError for an endpoint that would be unsafe or cannot work."""
    if endpoint.startswith("ipc://"):
        if len(os.fsencode(endpoint[len("ipc://") :])) > MAX_IPC_PATH_BYTES:
            raise ConfigurationError(
                f"the socket path is longer than {MAX_IPC_PATH_BYTES} bytes: {endpoint}; "
                "set TMPDIR to a shorter folder"
            )
    elif endpoint.startswith("tcp://"):
        if not is_encrypted and not _is_loopback(endpoint[len("tcp://") :]):
            raise ConfigurationError(
                f"{endpoint} is not a loopback address; without keys nothing is encrypted, so "
                f"only tcp://127.0.0.1:PORT is allowed; give --keys DIR ({HOW})"
            )
    else:
        raise ConfigurationError(
            f"unknown endpoint {shown(endpoint)}: use ipc://PATH or tcp://HOST:PORT"
        )


def _common_options(sock: "zmq.Socket[bytes]") -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    sock.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
    sock.setsockopt(zmq.RCVHWM, SEND_QUEUE_FRAMES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)


def _milliseconds(timeout_s: float) -> int:
    """ZeroMQ waits in whole milliseconds; rounded up, so that a deadline has passed afterwards."""
    return math.ceil(max(0.0, timeout_s) * 1000)


def _wait(
    poller: zmq.Poller, timeout_s: float, busy_poll_s: float, *, exact: bool = False
) -> dict[Any, int]:
    """What is ready: now, or within `timeout_s`, of which `busy_poll_s` are spent asking.

    exact  the time is kept to about 0.1 ms
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
    """Whole milliseconds in the kernel, and the rest in naps: no core is kept busy."""
    end = time.perf_counter() + timeout_s
    ready = poller.poll(math.floor(timeout_s * 1000))
    while not ready and (left_s := end - time.perf_counter()) > 0:
        if left_s > NAP_S + AWAKE_S:
            time.sleep(NAP_S)
        ready = poller.poll(0)
    return ready


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that never block. Raises TransportError."""
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
    """A socket in a context of its own. Raises TransportError."""
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(kind)
    except zmq.ZMQError as error:
        # What it says depends on where it met the limit, but there is no other reason.
        raise TransportError(
            f"cannot open a socket: {error.strerror}; {RAISE_THE_LIMIT}"
        ) from error
    _common_options(sock)
    return context, sock


class Listener:
    """The coordinator's end. One thread uses it; any thread may call `wake`.

    endpoint  what to tell the nodes of this host: ":*" binds any free port; empty: none is there
    outside   and those of others
    """

    def __init__(
        self,
        endpoint: str,
        *,
        busy_poll_s: float = 0.0,
        outside: str = "",
        keys: CoordinatorKeys | None = None,
    ) -> None:
        """Listen. Raises ConfigurationError, TransportError.

        busy_poll_s  so long a wait asks for frames without pause, before it sleeps
        outside      for nodes of other hosts, with these keys
        """
        if endpoint:
            check_endpoint(endpoint)
        if outside:
            check_endpoint(outside, is_encrypted=keys is not None)
        self._woken, self._waker = _socket_pair()
        self._context, self._socket = _new_socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate: Gate | None = None
        self.outside = ""
        self.endpoint = self._bound(endpoint) if endpoint else ""
        if outside:
            if keys is not None:
                self._gate = self._guarded_with(keys)
            self.outside = self._bound(outside)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._frames = zmq.Poller()
        self._frames.register(self._socket, zmq.POLLIN)
        self._busy_poll_s = busy_poll_s

    def _guarded_with(self, keys: CoordinatorKeys) -> Gate:
        try:
            return Gate(self._context, self._socket, keys)
        except zmq.ZMQError as error:
            self.close(linger_s=0.0)
            raise TransportError(
                f"cannot guard the socket: {error.strerror}; {RAISE_THE_LIMIT}"
            ) from error

    def _bound(self, endpoint: str) -> str:
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
        """Connections from outside that were refused so far."""
        return 0 if self._gate is None else self._gate.num_refused

    def wake(self) -> None:
        """Make a waiting `receive` return (from any thread)."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """All frames that are there, as (identity, frame); waits for the first at most so long.

        exact  that time is kept to about 0.1 ms, and not only to whole milliseconds
        """
        if self._woken.fileno() in _wait(self._poller, timeout_s, self._busy_poll_s, exact=exact):
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        with contextlib.suppress(zmq.Again):
            # To poll costs a third of asking for a frame in vain.
            while self._frames.poll(0):
                if self._gate is None:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK)
                else:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    is_own = len(frames) == 2 and self._gate.is_own(*frames)
                    parts = [part.bytes for part in frames] if is_own else []
                if len(parts) == 2:
                    yield parts[0], parts[1]

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send without blocking; False if the peer is unknown or its queue is full."""
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; what was sent has so long to leave."""
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=int(linger_s * 1000))
        self._woken.close()
        self._waker.close()


class Connection:
    """A node's end. Used by one thread; a heartbeat thread makes its own."""

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        *,
        busy_poll_s: float = 0.0,
        keys: NodeKeys | None = None,
    ) -> None:
        """Connect. Raises ConfigurationError, TransportError.

        busy_poll_s  so long a wait asks for frames without pause, before it sleeps
        keys         to a coordinator on another host
        """
        self.is_encrypted = keys is not None
        check_endpoint(endpoint, is_encrypted=self.is_encrypted)
        self._context, self._socket = _new_socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_LIMIT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
        if keys is not None:
            self._socket.curve_publickey = keys.own.public.encode()
            self._socket.curve_secretkey = keys.own.secret.encode()
            self._socket.curve_serverkey = keys.coordinator.encode()
            # While a link is cut nothing piles up that would be stale when it is there again.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(f"cannot connect to {endpoint}: {error.strerror}") from error
        self._frames = zmq.Poller()
        self._frames.register(self._socket, zmq.POLLIN)
        self._busy_poll_s = busy_poll_s

    def receive(self, timeout_s: float) -> Iterator[bytes]:
        """All frames that are there; waits for the first at most so long."""
        if not _wait(self._frames, timeout_s, self._busy_poll_s):
            return
        with contextlib.suppress(zmq.Again):
            yield self._socket.recv(zmq.NOBLOCK)
            # To poll costs a third of asking for a frame in vain.
            while self._frames.poll(0):
                yield self._socket.recv(zmq.NOBLOCK)

    def has_frames(self) -> bool:
        """Whether any are there."""
        return bool(self._frames.poll(0))

    def send(self, frame: bytes) -> bool:
        """Send without blocking; False if the queue is full."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_s: float = 0.5) -> None:
        """Close the socket; what was sent has so long to leave."""
        self._context.destroy(linger=int(linger_s * 1000))
