"""Which of the texts that were asked for may begin, where more are asked for than fit (pure).

Theory of operation
-------------------
The nodes write `num_lanes` texts at once. A text that is asked for takes a free lane, or waits for
one. Where several clients wait, a free lane goes to the client that has the fewest lanes; among
clients with equally many, to the one whose oldest text has waited the longest. So a client that
asks for a hundred texts delays another one by a single text at most. The number of waiting texts
is bounded: what would exceed it is refused as a whole, so that a client can try again later.

    ask(client, n)  n new tickets, or None: the queue is full
    next()          the ticket that may begin now, or None; its lane is taken
    leave(ticket)   a text has ended, or its client does not wait any longer
"""

from collections import Counter, deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of one text, first in the queue and then in a lane (a sequence slot)."""

    client: str
    has_lane: bool = False


class Admission:
    """The queue of texts that wait for a lane, and the count of texts that have one.

    num_lanes    most texts that are written at once
    max_waiting  most texts that may wait for a lane
    """

    def __init__(self, num_lanes: int, max_waiting: int) -> None:
        self.num_lanes = num_lanes
        self.max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()  # oldest first
        self._lanes: Counter[str] = Counter()  # by client; no zeros

    @property
    def num_running(self) -> int:
        """Return the number of texts that have a lane."""
        return self._lanes.total()

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the clients whose texts have lanes."""
        return tuple(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Return the number of texts that wait for a lane."""
        return len(self._waiting)

    def ask(self, client: str, num_texts: int) -> list[Ticket] | None:
        """Queue new texts of a client and return their tickets; None: no room, nothing queued."""
        num_free = self.num_lanes - self.num_running
        if self.num_waiting + num_texts > num_free + self.max_waiting:
            return None
        tickets = [Ticket(client) for _ in range(num_texts)]
        self._waiting.extend(tickets)
        return tickets

    def next(self) -> Ticket | None:
        """Give a free lane to the text whose turn it is; return its ticket, or None: none could."""
        if not self._waiting or self.num_running >= self.num_lanes:
            return None
        # `min` keeps the first of equals, and the queue is in order of age.
        ticket = min(self._waiting, key=lambda one: self._lanes[one.client])
        self._waiting.remove(ticket)
        self._lanes[ticket.client] += 1
        ticket.has_lane = True
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Free the ticket's lane, or remove it from the queue. May be called twice."""
        if ticket.has_lane:
            ticket.has_lane = False
            self._lanes[ticket.client] -= 1
            if not self._lanes[ticket.client]:
                del self._lanes[ticket.client]
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def check(self) -> None:
        """Assert every invariant of the queue and the lanes (for tests)."""
        assert self.num_running <= self.num_lanes
        assert all(number > 0 for number in self._lanes.values())
        assert not any(ticket.has_lane for ticket in self._waiting)
