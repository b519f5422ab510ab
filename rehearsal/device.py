"""A device in virtual time: it does in order what a host gives it, while the host goes on.

Theory of operation
-------------------
As a CUDA stream, a device is a queue of orders:

    launch            a forward, which takes a time        -> Handle
    move, copy, wipe  what becomes of rows of the cache; they take no time, and wait for their turn

A forward reads and writes the cache when it ends, the last moment at which a real one may do so:
whatever has overtaken it by mistake is seen by its rows. What it reads from the host must be as it
was at the launch.

The host is told when a forward has ended, and only then may it read the result. All forwards write
their results to one buffer, which belongs to the newest launch: the result of the forward before
has to be read by then. A host that does otherwise gets a `DeviceError`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.layout.slots import Feed, Move
from rehearsal.cache import VirtualCache
from rehearsal.timeline import Timeline

Digests = list[list[int]]
"""What each row of a forward has seen, feed by feed."""


class DeviceError(AssertionError):
    """The host has done what a real device does not forgive."""


@dataclass(slots=True)
class _Buffer:
    """Where the results are written. `owner`: the newest launch, from that launch on."""

    owner: "Handle | None" = None


class Handle:
    """A forward that a device has been given, and the way to its result.

    began, ends_at  when the device computes it
    """

    def __init__(self, buffer: _Buffer, began: float, ends_at: float) -> None:
        self.began = began
        self.ends_at = ends_at
        self._buffer = buffer
        self._is_ready = False
        self._result: Any = None  # in the buffer, as long as that is ours

    @property
    def is_ready(self) -> bool:
        """Whether the forward has ended."""
        return self._is_ready

    def result(self) -> Any:
        """Read what the forward has computed.

        Raises:
            DeviceError: it has not ended, or a later launch has overwritten its result.
        """
        if not self._is_ready:
            raise DeviceError("a result is read before it is ready")
        if self._buffer.owner is not self:
            raise DeviceError("a result is read after the next launch has overwritten it")
        return self._result

    def write(self, result: Any) -> None:
        """The forward has ended; this is for its device alone."""
        self._is_ready, self._result = True, result


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward in the queue.

    given    a hash of the feeds, as they were at the launch
    compute  makes the result of what the rows have seen
    """

    feeds: tuple[Feed, ...]
    given: int
    compute: Callable[[Digests], Any]
    handle: Handle

    def run(self, lanes: Sequence[VirtualCache]) -> None:
        """Read and write the cache."""
        if hash(self.feeds) != self.given:
            raise DeviceError("what a forward was given has changed since its launch")
        seen = [lanes[feed.lane].run(feed) for feed in self.feeds]
        self.handle.write(self.compute(seen))


class Device:
    """The device of one process.

    lanes     its cache
    on_ended  called whenever a forward has ended
    """

    def __init__(
        self, lanes: Sequence[VirtualCache], timeline: Timeline, on_ended: Callable[[], None]
    ) -> None:
        self.lanes = lanes
        self._timeline = timeline
        self._on_ended = on_ended
        self._buffer = _Buffer()
        # Orders that have not been done, oldest first. The first is a forward: others are done as
        # soon as nothing is before them.
        self._queue: deque[_Forward | Callable[[], None]] = deque()
        self._free_at = timeline.now  # when the last of its forwards ends

    def stop(self) -> None:
        """The process dies: nothing that was ordered happens any more."""
        self._queue.clear()

    def launch(
        self,
        feeds: Sequence[Feed],
        compute: Callable[[Digests], Any],
        cost_s: float,
        host_s: float = 0.0,
    ) -> Handle:
        """Order a forward that takes `cost_s`; its result is `compute` of what its rows see.

        host_s  before it, while the host makes it ready and the device idles
        """
        began = max(self._free_at, self._timeline.now) + host_s
        self._free_at = began + cost_s
        handle = self._buffer.owner = Handle(self._buffer, began, self._free_at)
        given = tuple(feeds)
        self._queue.append(_Forward(given, hash(given), compute, handle))
        self._timeline.at(self._free_at, self._end)
        return handle

    def move(self, move: Move) -> None:
        """Order that rows of a lane are copied to other slots."""
        self._order(partial(self.lanes[move.lane].move, move))

    def copy(self, source: int, target: int, length: int) -> None:
        """Order that the first rows of a lane are copied to another lane."""
        self._order(partial(self.lanes[target].copy, self.lanes[source], length))

    def wipe(self, lane: int, start: int) -> None:
        """Order that all rows of a lane from a slot on are forgotten."""
        self._order(partial(self.lanes[lane].wipe, start))

    def _order(self, do: Callable[[], None]) -> None:
        if self._queue:
            self._queue.append(do)
        else:
            do()

    def _end(self) -> None:
        """The first forward of the queue ends, and what waits for nothing else is done."""
        if not self._queue:
            return  # the process has died
        forward = self._queue.popleft()
        assert isinstance(forward, _Forward), "a forward is behind an order that could be done"
        forward.run(self.lanes)
        while self._queue and not isinstance(self._queue[0], _Forward):
            order = self._queue.popleft()
            assert not isinstance(order, _Forward)
            order()
        self._on_ended()
