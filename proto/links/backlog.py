"""What connections have sent and nobody could read yet: bounded for all of them together.

ZeroMQ keeps the parts of a message until its last one has come, and counts messages rather than
bytes in its queues. So a peer that is let in could fill the memory. The system knows how much has
come over a connection, the reader how much of that came out: the rest lies in between. Where all
connections together have more than the limit, the one that has most is shut down.
"""

import contextlib
import os
import socket
import struct
from dataclasses import dataclass

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
