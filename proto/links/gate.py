"""Who may speak at a socket that other hosts reach: only nodes whose keys are known.

Everything from there is encrypted (CURVE). Keys are asked for before any frame is taken (ZAP, RFC
27 of ZeroMQ); whoever has none that is known, speaks another protocol or does not finish its
handshake is refused, and counted.
"""

import contextlib

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from proto.links.keys import CoordinatorKeys
from proto.node_config import HEARTBEAT_SUFFIX

HANDSHAKE_LIMIT_MS = 5000  # after that a connection that has not said who it is is closed
BACKLOG = 512  # connections that wait to be taken
# A link that was cut comes back before its old connection is known to be dead: the new one counts.
TAKES_OVER = 1


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
        self._nodes = keys.nodes  # whoever started more nodes adds their keys to it
        self._num_refused = 0
        self._socket = sock
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()
        sock.curve_secretkey = keys.own.secret.encode()
        sock.curve_publickey = keys.own.public.encode()
        sock.curve_server = True
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        sock.setsockopt(zmq.BACKLOG, BACKLOG)
        sock.setsockopt(zmq.ROUTER_HANDOVER, TAKES_OVER)
        self._speaking: set[int] = set()  # connections that frames have come from
        self._monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether somebody with this public key may speak (asked in the authenticator's thread)."""
        return key.decode() in tuple(self._nodes.values())

    def is_own(self, identity: "zmq.Frame", frame: "zmq.Frame") -> bool:
        """Whether what has come was sent by the node of that name, and not by another one."""
        try:
            key = frame.get("User-Id")
        except zmq.ZMQError:
            return True  # not through this gate
        if (connection := frame.get(zmq.SRCFD)) not in self._speaking:
            self._count_refused()  # one that had this number before
            self._speaking.add(connection)
        name = identity.bytes.removesuffix(HEARTBEAT_SUFFIX)
        return self._nodes.get(name) == key

    @property
    def num_refused(self) -> int:
        """Connections that were refused so far. Asked often: what is not read would pile up."""
        self._count_refused()
        return self._num_refused

    def _count_refused(self) -> None:
        """The library tells of most refusals, not of all.

        So whoever goes and has not said anything that it let through is one.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                gone = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if gone["endpoint"].startswith(b"tcp"):  # the nodes of this host have no keys
                    connection = int(gone["value"])
                    self._num_refused += connection not in self._speaking
                    self._speaking.discard(connection)

    def close(self) -> None:
        """Before its context goes."""
        self._socket.disable_monitor()
        self._authenticator.stop()
