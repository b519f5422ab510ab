"""A device in virtual time: it performs orders one after another, while the host goes on.

Theory of operation
-------------------
Like a CUDA stream, a device is a queue of orders:

    launch            run a forward, which takes a time    -> Handle
    move, copy, wipe  change rows of the cache; these take no time, but wait for their turn

A forward reads and writes the cache when it ends, the last moment at which a real one may do so: so
its rows show if an order has overtaken it by mistake. Its inputs on the host must not be changed
after the launch.

The host is told when a forward has ended, and may read the result only then. All forwards write
their results to one buffer, which belongs to the newest launch: the result of the forward before
has to be read by then. A host that breaks these rules gets a `DeviceError`.
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
"""For each feed of a forward, the digest of the path that each row has seen."""


class DeviceError(AssertionError):
    """The host has made a mistake that would give wrong results on a real device."""


@dataclass(slots=True)
class _Buffer:
    """The buffer for results. `owner` is the newest launch, from that launch on."""

    owner: "Handle | None" = None


class Handle:
    """A forward that a device was given; the host reads its result here.

    began, ends_at  when the device computes it (seconds of virtual time)
    """

    def __init__(self, buffer: _Buffer, num_rows: int, began: float, ends_at: float) -> None:
        self.num_rows = num_rows
        self.began = began
        self.ends_at = ends_at
        self._buffer = buffer
        self._is_ready = False
        self._result: Any = None  # valid as long as the buffer belongs to this forward

    @property
    def is_ready(self) -> bool:
        """True if the forward has ended."""
        return self._is_ready

    def result(self) -> Any:
        """Return the result of the forward.

        Raises:
            DeviceError: the forward has not ended, or a later launch has overwritten its result.
        """
        if not self._is_ready:
            raise DeviceError("a result is read before it is ready")
        if self._buffer.owner is not self:
            raise DeviceError("a result is read after the next launch has overwritten it")
        return self._result

    def write(self, result: Any) -> None:
        """Store the result of the forward, which has ended; only its device calls this."""
        self._is_ready, self._result = True, result


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward in the queue.

    given    hash of the feeds at the launch
    compute  makes the result from the digests that the rows have seen
    """

    feeds: tuple[Feed, ...]
    given: int
    compute: Callable[[Digests], Any]
    handle: Handle

    def run(self, lanes: Sequence[VirtualCache]) -> None:
        """Run the rows on the cache, and store the result."""
        if hash(self.feeds) != self.given:
            raise DeviceError("what a forward was given has changed since its launch")
        seen = [lanes[feed.lane].run(feed) for feed in self.feeds]
        self.handle.write(self.compute(seen))


class Device:
    """The device of one process, with its queue and its cache.

    lanes     the cache, one for each lane
    on_ended  called whenever a forward has ended
    """

    def __init__(
        self, lanes: Sequence[VirtualCache], timeline: Timeline, on_ended: Callable[[], None]
    ) -> None:
        self.lanes = lanes
        self._timeline = timeline
        self._on_ended = on_ended
        self._buffer = _Buffer()
        # Orders that are not done yet, oldest first. The first is always a forward: other orders
        # are done as soon as no order is before them.
        self._queue: deque[_Forward | Callable[[], None]] = deque()
        self._free_at = timeline.now  # when the last of its forwards ends

    def stop(self) -> None:
        """Drop all orders, because the process dies."""
        self._queue.clear()

    def launch(
        self,
        feeds: Sequence[Feed],
        compute: Callable[[Digests], Any],
        cost_s: float,
        host_s: float = 0.0,
    ) -> Handle:
        """Queue a forward of `cost_s` seconds; return its handle; `compute` makes its result.

        host_s  seconds of preparation on the host before it, in which the device is idle
        """
        began = max(self._free_at, self._timeline.now) + host_s
        self._free_at = began + cost_s
        given = tuple(feeds)
        num_rows = sum(len(feed.tokens) for feed in given)
        handle = self._buffer.owner = Handle(self._buffer, num_rows, began, self._free_at)
        self._queue.append(_Forward(given, hash(given), compute, handle))
        self._timeline.at(self._free_at, self._end)
        return handle

    def move(self, move: Move) -> None:
        """Queue a copy of rows of a lane to other slots."""
        self._order(partial(self.lanes[move.lane].move, move))

    def copy(self, source: int, target: int, length: int) -> None:
        """Queue a copy of the first `length` rows of lane `source` to lane `target`."""
        self._order(partial(self.lanes[target].copy, self.lanes[source], length))

    def wipe(self, lane: int, start: int) -> None:
        """Queue the removal of all rows of a lane from slot `start` on."""
        self._order(partial(self.lanes[lane].wipe, start))

    def _order(self, do: Callable[[], None]) -> None:
        if self._queue:
            self._queue.append(do)
        else:
            do()

    def _end(self) -> None:
        """End the first forward of the queue, and perform the orders up to the next forward."""
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
