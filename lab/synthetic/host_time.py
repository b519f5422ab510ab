"""The critical host time of a node: for how long its device is idle because of the host (pure).

Theory of operation
-------------------
A device that has ended a forward is idle until the next launch. That is not the host's fault if the
node has nothing to launch: a target that waits for drafts, a drafter whose window is full. The rest
of the idle time is the host's, and is critical: nothing else hides it.

    critical = launch - max(end, cause)

    launch  when the device begins: when the rows of a forward are laid out
    end     when the device has ended the forward before it
    cause   when there was something to launch. If the state machine asked for no forward at the
            last `Tick` after `end`, the cause is the first event after that tick: a frame, when
            the loop is handed it, or the deadline that the machine had set, whichever came first.
            Otherwise it is `end` itself.

So these count: waking up late for the end of a forward, handling the result, sending the verdict,
deciding, and everything else until the rows are laid out. These do not count: the time of a message
on its way, waking up for it included, because the node cannot know when it was sent; and the gaps
between the steps of a chain that one launch makes. The time within a launch overlaps with the
forward, as on a GPU.

A loop's clocks are `time.perf_counter` and `time.monotonic`, which on Linux are the same.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """A launch of forwards; times in seconds of the loop's clock.

    due           when it could have been launched at the earliest
    launched      when it was launched
    ends          when the device will have ended it
    num_forwards  forwards of this launch, one after another: steps of a chain
    """

    due: float
    launched: float
    ends: float
    num_forwards: int = 1

    @property
    def critical_s(self) -> float:
        """Return for how many seconds the device was idle because of the host."""
        return self.launched - self.due


class Watch:
    """Finds the critical host time of each launch; a loop calls a method for each thing it does."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._ends = 0.0  # end of the latest forward
        self._is_running = False  # True until the result of the latest forward is handled
        self._had_nothing = False  # at the last tick the device was free, but nothing was launched
        self._event: float | None = None  # time of the first frame since that tick
        self._deadline: float | None = None  # deadline that the state machine set at that tick

    def heard(self, now: float) -> None:
        """Note the time of a frame, if it is the first since the last tick without a launch."""
        if self._event is None:
            self._event = now

    def computed(self) -> None:
        """Note that the result of a forward is being handled."""
        self._is_running = False

    def ticked(self, deadline: float | None) -> None:
        """Note that the state machine was ticked and asked for no forward."""
        if not self._is_running:
            self._had_nothing, self._event, self._deadline = True, None, deadline

    def launched(self, now: float, ends: float, num_forwards: int = 1) -> None:
        """Note that forwards were launched at `now`, and when they end."""
        self.launches.append(Launch(self._due(now), now, ends, num_forwards))
        self._ends, self._is_running = ends, True
        self._had_nothing, self._event, self._deadline = False, None, None

    def _due(self, now: float) -> float:
        """Return when a launch at `now` could have been made at the earliest."""
        if not self._had_nothing:
            return min(now, self._ends) or now
        causes = [at for at in (self._event, self._deadline) if at is not None]
        return min([now, *causes])
