"""Where the time of a loop goes: every moment belongs to one phase, and a switch costs little."""

from collections.abc import Callable
from enum import IntEnum


class Phase(IntEnum):
    """What a loop is doing. A process without a model has no use for the middle ones."""

    WAIT = 0  # for messages, and taking them from the socket
    DECODE = 1
    DECIDE = 2  # the state machine: tree, slots, launch rule
    PREPARE = 3  # masks and tensors
    MODEL = 4
    CHOOSE = 5  # processors, noise, sampling; on a GPU the wait for the model is here
    MOVE = 6  # cache rows
    SEND = 7  # encoding included


class Stopwatch:
    """Adds up nanoseconds per phase. One thread uses it; any thread may read `totals_us`.

    clock  nanoseconds of a monotonic clock
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._totals = [0] * len(Phase)
        self._phase = Phase.WAIT
        self._since = clock()

    def enter(self, phase: Phase) -> None:
        """End the phase that was and begin another."""
        now = self._clock()
        self._totals[self._phase] += now - self._since
        self._phase = phase
        self._since = now

    @property
    def totals_us(self) -> tuple[int, ...]:
        """Microseconds in each phase so far, but for the one that is going on."""
        return tuple(total // 1000 for total in self._totals)
