"""Simulates slow, unsteady or lossy links to the nodes, inside the coordinator.

It is used in the place of a `Listener`, which it contains. All messages pass the coordinator, so
both directions of every link are delayed here and nowhere else: a frame from a node waits before it
is received, and a frame to a node waits before it leaves.
"""

import random
import time
from collections.abc import Callable, Iterator

from coordinator.cluster.link import Direction, Links
from proto.codec import kind_of
from proto.errors import RemoteProtocolError
from proto.links.transport import Listener
from proto.messages import Hello, TracePart, Welcome

Addressed = tuple[bytes, bytes]  # a node and a frame


class SimulatedNetwork:
    """Delays and loses frames; has the interface of `Listener`, for one thread.

    Any thread may call `wake`.

    seed         decides which frames are lost and how late each is, for each direction apart
    may_be_lost  True if this frame may be lost
    spares       True if this frame is exempt from the simulated link
    """

    def __init__(
        self,
        listener: Listener,
        *,
        seed: int,
        may_be_lost: Callable[[bytes], bool],
        spares: Callable[[bytes], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._listener = listener
        self._seed = seed
        self._may_be_lost = may_be_lost
        self._spares = spares
        self._clock = clock
        self._from_nodes: dict[bytes, Direction[Addressed]] = {}  # by the name of a node
        self._to_nodes: dict[bytes, Direction[Addressed]] = {}

    @property
    def endpoint(self) -> str:
        """Return the address to which nodes connect."""
        return self._listener.endpoint

    def slow_down(self, node: bytes, links: Links) -> None:
        """Simulate this link to a node from now on, for both of its connections."""
        ways = (
            (self._from_nodes, "from", links.from_node),
            (self._to_nodes, "to", links.to_node),
        )
        for directions, way, link in ways:
            draw = random.Random(f"{self._seed} {way} {node.decode()}").random
            directions[node] = Direction(link, draw)

    def wake(self) -> None:
        """Make a waiting `receive` return; may be called from any thread."""
        self._listener.wake()

    def receive(self, timeout_s: float) -> Iterator[Addressed]:
        """Yield (node, frame) of the frames that have arrived; wait at most `timeout_s` for one."""
        left_s = self._next_s() - self._clock()
        for node, frame in self._listener.receive(min(timeout_s, left_s), exact=True):
            direction = self._from_nodes.get(node)
            if direction is None or (self._spares is not None and self._spares(frame)):
                yield node, frame
            else:
                self._put(direction, node, frame)
        now = self._clock()
        for direction in tuple(self._to_nodes.values()):
            for node, frame in direction.take(now):
                self._listener.send(node, frame)
        for direction in tuple(self._from_nodes.values()):
            yield from direction.take(now)

    def send(self, node: bytes, frame: bytes) -> bool:
        """Send a frame without blocking; False if it is known to fail (never on a slow link)."""
        direction = self._to_nodes.get(node)
        if direction is None:
            return self._listener.send(node, frame)
        return self._put(direction, node, frame)

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; frames that are still delayed are lost."""
        self._listener.close(linger_s)

    def _put(self, direction: Direction[Addressed], node: bytes, frame: bytes) -> bool:
        may_be_lost = self._may_be_lost(frame)
        return direction.put(
            (node, frame), self._clock(), may_be_lost=may_be_lost, num_bytes=len(frame)
        )

    def _next_s(self) -> float:
        directions = (*self._from_nodes.values(), *self._to_nodes.values())
        return min((direction.next_s for direction in directions), default=float("inf"))


def may_be_lost(frame: bytes) -> bool:
    """True if a simulated link may lose the frame: any but Hello and Welcome."""
    try:
        return kind_of(frame) not in (Hello, Welcome)
    except RemoteProtocolError:
        return True


def spares(frame: bytes) -> bool:
    """True if the message is exempt from the simulated link (trace traffic)."""
    try:
        return kind_of(frame) is TracePart
    except RemoteProtocolError:
        return False
