"""A line: frames between two processes of one host, over a pair of connected sockets.

ZeroMQ hands each frame to a thread of its own, on both sides, and each hand-over is a sleep and a
wake-up. A line is read and written by the loops themselves: from the coordinator to two nodes and
back takes 66 us, over ZeroMQ 240 (docs/LOG.md). Whoever starts a node on its own host passes it one
end (`NodeConfig.line`). Its heartbeats and its trace go over ZeroMQ, because another thread sends
them, and so does everything where there is no line.

Sends never block. What the system does not take at once waits here, at most `MOST_WAITING` frames;
a frame beyond that is refused, and the caller counts it.
"""

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

from proto.errors import TransportError
from proto.messages import MAX_FRAME_BYTES

MOST_WAITING = 4096  # frames
READ_BYTES = 1 << 18
BUFFER_BYTES = 1 << 20  # asked of the system, which may give less
AWAKE_S = 100e-6  # a process that wakes from a sleep needs that long until it runs as before
_LENGTH = struct.Struct("<I")


def pair() -> tuple["Line", socket.socket]:
    """Return our end of a new line, and the end to pass to a node. Raises OSError."""
    ours, theirs = socket.socketpair()
    return Line(ours), theirs


class Line:
    """One end of a line; for one thread.

    is_open  False: the other end was closed, or has sent what no line sends
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self.is_open = True
        self._end = end
        self._unsent: deque[memoryview] = deque()
        self._rest = bytearray()  # of what was read: the beginning of a frame
        self._needed = 0  # bytes that the rest must have before it is looked at again

    @classmethod
    def inherited(cls, number: int) -> "Line":
        """Return the end with this descriptor, which was passed to us. Raises TransportError."""
        try:
            # The lowest free number: `select` knows no large ones, and our parent may have many.
            low = os.dup(number)
            os.close(number)
            return cls(socket.socket(fileno=low))
        except OSError as error:
            raise TransportError(f"cannot use the line to the coordinator: {error}") from error

    def fileno(self) -> int:
        """Return the descriptor, for a poller."""
        return self._end.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if frames wait until the system takes more."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> bool:
        """Send a frame without blocking; False if the line is closed or too much waits."""
        if not self.is_open or len(self._unsent) >= MOST_WAITING:
            return False
        self._unsent.append(memoryview(_LENGTH.pack(len(frame)) + frame))
        self.flush()
        return self.is_open

    def flush(self) -> None:
        """Send what waits, as far as the system takes it."""
        while self._unsent:
            data = self._unsent[0]
            try:
                count = self._end.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._is_over()
                return
            if count < len(data):
                self._unsent[0] = data[count:]
                return
            self._unsent.popleft()

    def read(self) -> Sequence[bytes]:
        """Return the frames that have arrived whole, about READ_BYTES at most. Never waits."""
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return ()
        except OSError:
            data = b""
        if not data:
            self._is_over()
            return ()
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return ()
            data = bytes(self._rest)
        frames, at = self._cut(data)
        self._rest = bytearray(data[at:])
        return frames

    def _cut(self, data: bytes) -> tuple[Sequence[bytes], int]:
        """Return the whole frames in the data, and where the rest begins."""
        frames: list[bytes] = []
        at = self._needed = 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if not 0 < length <= MAX_FRAME_BYTES:
                self._is_over()
                break
            end = at + _LENGTH.size + length
            if len(data) < end:
                self._needed = end - at
                break
            frames.append(data[at + _LENGTH.size : end])
            at = end
        return frames, at

    def wait(self, timeout_s: float, *, exact: bool = False) -> bool:
        """Wait at most so long, kept to about 0.1 ms; True if there is something to read.

        What waits to be sent leaves meanwhile.

        exact  True: at the end of the wait this process is awake, so that it goes on at once
        """
        until = time.monotonic() + timeout_s
        if exact and timeout_s > 0:
            if timeout_s > AWAKE_S and self.wait(timeout_s - AWAKE_S):
                return True
            while time.monotonic() < until:
                if self.wait(0.0):
                    return True
            return False
        while True:
            writing = [self._end] if self._unsent else []
            reading, may_write, _ = select.select([self._end], writing, [], max(0.0, timeout_s))
            if reading or not may_write:
                return bool(reading)
            self.flush()
            if not self.is_open:
                return True  # the caller sees that when it reads
            timeout_s = until - time.monotonic()

    def receive(
        self, timeout_s: float, busy_poll_s: float = 0.0, *, exact: bool = False
    ) -> Sequence[bytes]:
        """Return the frames that have come; wait for the first at most `timeout_s`.

        busy_poll_s  how much of that time is spent polling without pause before it sleeps
        exact        as for `wait`
        """
        now = time.perf_counter()
        end, end_of_asking = now + timeout_s, now + min(timeout_s, busy_poll_s)
        is_ready = self.wait(0.0)
        while not is_ready and (now := time.perf_counter()) < end_of_asking:
            is_ready = self.wait(0.0)
        if not is_ready and now < end:
            is_ready = self.wait(end - now, exact=exact)
        return self.read() if is_ready else ()

    def _is_over(self) -> None:
        self.is_open = False
        self._unsent.clear()

    def close(self) -> None:
        """Close this end."""
        self._is_over()
        with contextlib.suppress(OSError):
            self._end.close()
