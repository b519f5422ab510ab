"""How long nodes that load are waited for: as long as they have something new to tell (pure)."""

from collections.abc import Mapping

from proto.messages import Role
from proto.node_config import FETCHING


class Patience:
    """Waits for nodes; the time begins anew whenever one of them tells of something new.

    limit_s  longest time without news (seconds)
    now      when the waiting begins (seconds, monotonic)

    A node that reads weights tells how much it has read, and one that fetches its model from
    another machine is waited for until it has it.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self._since = now
        self._states: dict[Role, str] = {}

    def is_over(self, states: Mapping[Role, str], now: float) -> bool:
        """True if there was no news for too long; `states` says what each node is doing."""
        if dict(states) != self._states or FETCHING in states.values():
            self._states, self._since = dict(states), now
        return now - self._since > self.limit_s
