"""The critical host time of a node: for how long its device is idle because of the host (pure).

Theory of operation
-------------------
A device that has ended a forward is idle until the next launch. Of that time it is nobody's fault
if the machine has nothing to launch: a target that waits for drafts, a drafter whose window is
full. The rest is the host's, and is critical: nothing else hides it.

    critical = launch - max(end, cause)

    launch  when the device begins: when the rows of a forward are laid out
    end     when the device has ended the forward before it
    cause   when there was something to launch. If the machine asked for nothing at the last `Tick`
            after `end`, that is when the first event after that tick was there: a frame, as the
            loop is handed it, or the deadline that the machine had named, whichever came first.
            Otherwise `end` itself.

So waking up late for the end of a forward counts, and so do handling the result, sending the
verdict, deciding, and everything else until the rows are laid out. What does not count: the time of
a message on its way, waking up for it included, because the node cannot know when it was sent; and
the gaps between the steps of a chain that one launch makes. The time within a launch overlaps with
the forward, as on a GPU.

A loop's clocks are `time.perf_counter` and `time.monotonic`, which on Linux are the same.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """A launch: when it could have been, when it was, and when the device will have ended it.

    num_forwards  that it makes, one after another: steps of a chain
    """

    due: float
    launched: float
    ends: float
    num_forwards: int = 1

    @property
    def critical_s(self) -> float:
        """For how long the device was idle because of the host."""
        return self.launched - self.due


class Watch:
    """Finds the critical host time from what a loop does, one call for each thing."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._ends = 0.0  # of the latest forward
        self._is_running = False  # its result has not been handled
        self._had_nothing = False  # at the last tick, although the device was free
        self._event: float | None = None  # the first since that tick
        self._deadline: float | None = None  # that the machine named at that tick

    def heard(self, now: float) -> None:
        """A frame has come."""
        if self._event is None:
            self._event = now

    def computed(self) -> None:
        """A result is handled, at its end or later."""
        self._is_running = False

    def ticked(self, deadline: float | None) -> None:
        """The machine was asked, and has asked for no forward."""
        if not self._is_running:
            self._had_nothing, self._event, self._deadline = True, None, deadline

    def launched(self, now: float, ends: float, num_forwards: int = 1) -> None:
        """Forwards were launched."""
        self.launches.append(Launch(self._due(now), now, ends, num_forwards))
        self._ends, self._is_running = ends, True
        self._had_nothing, self._event, self._deadline = False, None, None

    def _due(self, now: float) -> float:
        if not self._had_nothing:
            return min(now, self._ends) or now
        causes = [at for at in (self._event, self._deadline) if at is not None]
        return min([now, *causes])
