"""Decides when a node that has ended is started again (pure).

A node that had worked is started again a few times in a row, with a longer pause each time. After
these it depends on its role:

    a drafter  Without it texts go on, but more slowly. So it is tried rarely, but for as long as
               the coordinator lives, and at once when the cluster has room for it again.
    a target   Without it texts wait. So it is not tried any more, and the coordinator ends: whoever
               waits learns of it.

A node that never worked is not started again: it would fail in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.launching.places import name_among
from proto.messages import Role
from proto.node_config import NodeConfig

BACK_OFF_S = 1.0  # pause before the first restart; twice as long before each further one
STEADY_S = 60.0  # a node that worked for this time gets the full number of restarts again
RARELY_S = 120.0  # pause between starts once the restarts in a row are used up


@dataclass(frozen=True, slots=True)
class Restart:
    """A node process to start in the place of one that has ended.

    config  the config of the new process, with a new identity
    words   the line that tells people of the restart; empty: they know already
    """

    config: NodeConfig
    words: str


@dataclass(slots=True)
class _Succession:
    """What is known of the processes that ran as one node, one after the other.

    config      the config of the first process
    has_worked  one of the processes has been ready
    number      how many processes were started after the first
    streak      how many of these since one had worked for STEADY_S
    is_rare     the restarts in a row are used up: the pause is now RARELY_S
    due         when the next process is started; None: no start is planned
    """

    config: NodeConfig
    has_worked: bool = False
    number: int = 0
    streak: int = 0
    is_rare: bool = False
    due: float | None = None

    @property
    def identity(self) -> str:
        """Return the identity of the latest process in this place; each process has its own."""
        first = self.config.identity
        return f"{first}.{self.number}" if self.number else first


class Restarts:
    """Decides when the nodes of one coordinator are restarted. Times are monotonic seconds.

    most  restarts in a row, by role; 0: no node of this role is ever started again
    """

    def __init__(self, most: Mapping[Role, int]) -> None:
        self._most = most
        self._places: list[_Succession] = []

    def started(self, config: NodeConfig) -> None:
        """Note that a node was started for the first time."""
        self._places.append(_Succession(config))

    def ended(
        self, identity: str, now: float, *, worked_s: float | None, is_unusable: bool
    ) -> bool:
        """Note that the process `identity` has ended, and plan its restart, if there is to be one.

        worked_s     for how many seconds it had been ready; None: it was never ready
        is_unusable  a new process would end in the same way for now: restart only rarely

        Returns True if it is the last process of its place: no other one is planned.
        """
        place = next((one for one in self._places if one.identity == identity), None)
        if place is None or place.due is not None:
            return False
        most, is_drafter = self._most.get(place.config.role, 0), place.config.role is Role.DRAFTER
        place.has_worked |= worked_s is not None
        if worked_s is not None and worked_s >= STEADY_S:
            place.streak = 0
        if not place.has_worked or not most:
            return True
        was_rare, place.is_rare = place.is_rare, is_unusable or place.streak >= most
        if place.is_rare and not is_drafter:
            return True
        if place.is_rare and not was_rare:
            place.streak = most  # so that people are told of the first rare restart
        pause_s = RARELY_S if place.is_rare else BACK_OFF_S * 2**place.streak
        place.due = now + pause_s
        return False

    def hurry(self, now: float) -> None:
        """Make all planned restarts due now, because the cluster has room for a node again."""
        for place in self._places:
            if place.due is not None:
                place.due = min(place.due, now)

    def due(self, now: float) -> list[Restart]:
        """Take and return the restarts that are due at `now`; each is returned once."""
        return [
            self._again(place)
            for place in self._places
            if place.due is not None and now >= place.due
        ]

    def _again(self, place: _Succession) -> Restart:
        place.due = None
        place.number += 1
        place.streak += 1
        name = name_among(place.identity, [one.identity for one in self._places])
        words = f"{'the ' * (name == place.config.role)}{name} is started again"
        if place.is_rare:
            is_first = place.streak == self._most[place.config.role] + 1
            words = f"{words}, from now on every {RARELY_S / 60:.0f} minutes" if is_first else ""
        return Restart(replace(place.config, identity=place.identity), words)
