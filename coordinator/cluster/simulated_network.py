"""The coordinator's end of a network whose links are slow, unsteady or lossy, for rehearsals.

It stands in the place of the `Listener` that it is made of. Everything that goes over a link passes
the coordinator, so both directions of every link are delayed here and nowhere else: what a node has
sent waits before it is received, and what is sent to a node waits before it leaves.
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
    """A listener with the interface of `Listener`. One thread uses it; any may call `wake`.

    seed         what is lost, and how late each frame is; of each link and direction its own
    may_be_lost  asked of a frame
    spares       likewise: whether it passes as if there were no such link
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
        """Where nodes connect."""
        return self._listener.endpoint

    def slow_down(self, node: bytes, links: Links) -> None:
        """From now on the link to this node is such a one, for both of its connections."""
        ways = (
            (self._from_nodes, "from", links.from_node),
            (self._to_nodes, "to", links.to_node),
        )
        for directions, way, link in ways:
            draw = random.Random(f"{self._seed} {way} {node.decode()}").random
            directions[node] = Direction(link, draw)

    def wake(self) -> None:
        """Make a waiting `receive` return (from any thread)."""
        self._listener.wake()

    def receive(self, timeout_s: float) -> Iterator[Addressed]:
        """The frames that have arrived; waits at most so long, and no longer than for the next."""
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
        """Send without blocking; False if that is known to fail. Over a slow link nobody knows."""
        direction = self._to_nodes.get(node)
        if direction is None:
            return self._listener.send(node, frame)
        return self._put(direction, node, frame)

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; what is on its way is lost."""
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
    """Whether a simulated link may lose it: a node introduces itself once, all else is repaired."""
    try:
        return kind_of(frame) not in (Hello, Welcome)
    except RemoteProtocolError:
        return True


def spares(frame: bytes) -> bool:
    """Whether it passes beside a simulated link: what is only there to be measured."""
    try:
        return kind_of(frame) is TracePart
    except RemoteProtocolError:
        return False
