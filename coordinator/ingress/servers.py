"""Which servers can be asked, and which one a request goes to (pure).

Theory of operation
-------------------
Each server is asked for its health about once a second (`probed`), and is in one of three states:

    READY  it answers that it is well: it gets requests
    BUSY   it answers, but not that: it drains, or waits for its models. It gets none; streams go on
    LOST   it cannot be reached: its streams go on elsewhere

A refused connection makes it lost at once. A server that is stopped still accepts connections, but
answers nothing: after NUM_SILENT questions in a row it is lost too. A connection that breaks is
that of one request, which goes on elsewhere; whether the server is lost, the next question tells.

A request goes to the ready server with the fewest requests in work. Of requests that begin alike
the next ones go where the first one went, which has the beginning in its cache, as long as that has
at most MORE_AT_HOME requests more than the least busy one.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

NUM_SILENT = 3
MORE_AT_HOME = 2
MAX_HOMES = 4096  # beginnings of which it is known where they went


class State(Enum):
    """What a server can do."""

    READY = auto()
    BUSY = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class Server:
    """One server.

    num_lives  how often it was lost: a stream of an earlier life is broken
    is_doubted a connection to it broke: it is to be asked for its health at once
    """

    url: str
    state: State = State.LOST
    num_running: int = 0
    num_silent: int = 0
    num_lives: int = 0
    is_doubted: bool = False


@dataclass(slots=True)
class Servers:
    """All servers, in the order in which they were named."""

    all: Sequence[Server]
    num_moved: int = 0  # streams that went on elsewhere
    ended: str = ""  # why this process ends, once it does
    _homes: dict[Hashable, Server] = field(default_factory=dict)  # the newest comes last

    @classmethod
    def at(cls, urls: Sequence[str]) -> "Servers":
        """Return the servers at these addresses; they were not asked yet."""
        return cls([Server(url) for url in urls])

    @property
    def num_ready(self) -> int:
        """Return how many can be asked."""
        return sum(server.state is State.READY for server in self.all)

    def probed(self, server: Server, *, is_well: bool | None) -> None:
        """Note what a server has answered about its health; None: nothing within the time."""
        if is_well is None:
            server.num_silent += 1
            if server.num_silent >= NUM_SILENT or server.state is State.LOST:
                self.broke(server)
            return
        server.num_silent = 0
        server.state = State.READY if is_well else State.BUSY

    def broke(self, server: Server) -> None:
        """Note that a server is lost."""
        if server.state is not State.LOST:
            server.num_lives += 1
        server.state = State.LOST

    def choose(
        self,
        tried: Collection[Server] = (),
        beginning: Hashable = None,
        avoided: Server | None = None,
    ) -> Server | None:
        """Return the server that a request goes to; None: there is none.

        tried      those that have refused it
        beginning  of the request; None: it has none that others may share
        avoided    is asked only if there is no other
        """
        able = [one for one in self.all if one.state is State.READY and one not in tried]
        able = [one for one in able if one is not avoided] or able
        if not able:
            return None
        least = min(able, key=lambda one: one.num_running)
        home = self._homes.pop(beginning, None)
        if home is None or home not in able or home.num_running > least.num_running + MORE_AT_HOME:
            home = least
        if beginning is not None:
            self._homes[beginning] = home
            if len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        return home
