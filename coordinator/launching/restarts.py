"""When a drafter that has ended is started again (pure).

Without a drafter everything goes on, more slowly; so one that had worked is started again, later
each time, a few times in a row. What has worked once may do so again: after these it is tried
rarely, but for as long as the coordinator lives, and at once when a place has come for it. One that
never worked would fail in the same way.
"""

from dataclasses import dataclass, replace

from proto.messages import Role
from proto.node_config import NodeConfig

BACK_OFF_S = 1.0  # before the first start again; twice as long before each that follows
STEADY_S = 60.0  # one that has worked for so long may be started again as often as a new one
RARELY_S = 120.0  # between the starts after those in a row


@dataclass(frozen=True, slots=True)
class Restart:
    """A process in the place of one that has ended.

    config  with an identity of its own
    words   what people are told of it; empty: they have been told
    """

    config: NodeConfig
    words: str


@dataclass(slots=True)
class _Place:
    """What is known of the processes that had one drafter's place.

    config   of the first one
    number   of processes after the first
    streak   how many of them since one had worked for STEADY_S
    is_rare  no more are started in a row
    due      when the next is started; None: not at all
    """

    config: NodeConfig
    has_worked: bool = False
    number: int = 0
    streak: int = 0
    is_rare: bool = False
    due: float | None = None

    @property
    def identity(self) -> str:
        """Of the latest process: no two have the same."""
        first = self.config.identity
        return f"{first}.{self.number}" if self.number else first


class Restarts:
    """The drafters of one coordinator. Times are seconds of a monotonic clock.

    most  starts in a row after the first; 0: none is started again, ever
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: list[_Place] = []

    def started(self, config: NodeConfig) -> None:
        """A node is started for the first time."""
        if config.role is Role.DRAFTER:
            self._places.append(_Place(config))

    def ended(
        self, identity: str, now: float, *, worked_s: float | None, is_unusable: bool
    ) -> None:
        """A process has ended.

        worked_s     for so long it had been ready; None: it never was
        is_unusable  it would end in the same way again, as things are now
        """
        place = next((one for one in self._places if one.identity == identity), None)
        if place is None or place.due is not None:
            return
        place.has_worked |= worked_s is not None
        if worked_s is not None and worked_s >= STEADY_S:
            place.streak = 0
        if not place.has_worked or not self._most:
            return
        was_rare, place.is_rare = place.is_rare, is_unusable or place.streak >= self._most
        if place.is_rare and not was_rare:
            place.streak = self._most  # the first of the rare ones is told of
        pause_s = RARELY_S if place.is_rare else BACK_OFF_S * 2**place.streak
        place.due = now + pause_s

    def hurry(self, now: float) -> None:
        """A place has come for a node that had lost its own: try now what would be tried later."""
        for place in self._places:
            if place.due is not None:
                place.due = min(place.due, now)

    def due(self, now: float) -> list[Restart]:
        """What is to be started now."""
        return [
            self._again(place)
            for place in self._places
            if place.due is not None and now >= place.due
        ]

    def _again(self, place: _Place) -> Restart:
        place.due = None
        place.number += 1
        place.streak += 1
        words = f"the {place.config.role} is started again"
        if place.is_rare:
            is_first = place.streak == self._most + 1
            words = f"{words}, from now on every {RARELY_S / 60:.0f} minutes" if is_first else ""
        return Restart(replace(place.config, identity=place.identity), words)
