"""Lets clients connect: accepts their connections, and closes those that keep others out.

It stands in place of the accept loop of asyncio, which opens up to 2,048 connections before it
looks at the first one, and which, once no file descriptor is left, logs a traceback for each
attempt. Which connection is closed for another one is decided in `connections.py`. The way of a
request begins in `routes.py`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.http.connections import Connections, Stage
from coordinator.http.guard import CONNECTION
from proto.system import RAISE_THE_LIMIT

logger = logging.getLogger(__name__)

PAUSE_S = 0.05  # after which it is tried again to accept, where that failed
AT_ONCE = 16  # connections that are accepted before those that came earlier are looked at


class ClientProtocol(H11Protocol):
    """Speaks HTTP with one client, as uvicorn does, and tells the door how far it has come.

    A client that does not send a whole header within `limit_s`, after it has connected or was
    answered, is disconnected. uvicorn itself limits only the time between an answer and the first
    byte of the next request.
    """

    door: "Door"
    limit_s = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self._hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit when a client has connected."""
        super().connection_made(transport)
        self._note()
        self.door.make_room()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the client; the time limit runs until a whole header has come."""
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        """Start the time limit again, or the next request if its header has come already."""
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit when the client has gone."""
        self._stop_hurry()
        self.door.connections.leave(self)
        super().connection_lost(exc)

    def hold(self) -> None:
        """A request of this client is in work: the connection is not closed for others."""
        self.door.connections.hold(self)

    def release(self) -> None:
        """Undo `hold`."""
        self.door.connections.release(self, self.loop.time())

    def drop(self) -> None:
        """Close the connection at once; what the client has not read yet is lost."""
        self.door.connections.leave(self)
        self.transport.abort()

    def _note(self) -> None:
        """Tell the door how far this client has come, and start or stop the time limit."""
        if self.cycle is None:
            stage = Stage.SILENT
        else:
            stage = Stage.IDLE if self.cycle.response_complete else Stage.COMING
        self.door.connections.enter(self, stage, self.loop.time())
        if stage is Stage.COMING:
            self._stop_hurry()
        elif self._hurry is None:
            self._hurry = self.loop.call_later(self.limit_s, self._end)

    def _end(self) -> None:
        """Close the connection; what the client does not read of its answer in time is lost."""
        self.transport.close()
        self._hurry = self.loop.call_later(self.limit_s, self.transport.abort)

    def _stop_hurry(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None


class Door:
    """Accepts connections at a listening socket, and keeps their number within a limit.

    most  connections that may stay open
    """

    def __init__(self, most: int) -> None:
        self.connections: Connections[ClientProtocol] = Connections(most)
        self._bound: socket.socket | None = None  # None: not open
        self._make: Callable[[], asyncio.BaseProtocol]
        self._beginning: set[asyncio.Task[Any]] = set()  # accepted, not in `connections` yet
        self._again: asyncio.TimerHandle | None = None  # while it does not accept
        self._has_said = False

    def protocol(self, limit_s: float) -> type[ClientProtocol]:
        """Return the class of protocols for clients of this door, as uvicorn's settings take it."""
        return type("Protocol", (ClientProtocol,), {"door": self, "limit_s": limit_s})

    def open(self, bound: socket.socket, make: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accept connections from now on, in the running event loop.

        make  makes the protocol of a connection
        """
        self._make = make
        bound.setblocking(False)
        self._bound = bound
        self._resume()

    def close(self) -> None:
        """Accept no more connections; those that are open stay so. May be called twice."""
        if self._bound is not None:
            self._pause()
            self._bound = None

    def make_room(self) -> None:
        """Close the connections that are too many, but none that has a request in work."""
        now = asyncio.get_running_loop().time()
        while (surplus := self.connections.surplus(now)) is not None:
            surplus.drop()

    def _resume(self) -> None:
        self._again = None
        if self._bound is not None:
            asyncio.get_running_loop().add_reader(self._bound.fileno(), self._accept, self._bound)

    def _pause(self) -> None:
        if self._bound is not None:
            asyncio.get_running_loop().remove_reader(self._bound.fileno())
        if self._again is not None:
            self._again.cancel()

    def _wait(self) -> None:
        """Accept nothing for PAUSE_S seconds: clients wait in the system's queue."""
        self._pause()
        self._again = asyncio.get_running_loop().call_later(PAUSE_S, self._resume)

    def _accept(self, bound: socket.socket) -> None:
        """Accept the connections that wait, AT_ONCE at most."""
        now = asyncio.get_running_loop().time()
        while len(self._beginning) < AT_ONCE:
            if self.connections.is_crowded and self.connections.first(now) is None:
                self._wait()  # every connection has a request in work
                return
            try:
                made, _ = bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._say(error)
                if (first := self.connections.first(now)) is not None:
                    first.drop()
                self._wait()
                return
            made.setblocking(False)
            self._begin(made)

    def _begin(self, made: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(self._make, made))
        self._beginning.add(task)
        task.add_done_callback(self._begun)

    def _begun(self, task: "asyncio.Task[Any]") -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # a client that has gone already is no fault of ours

    def _say(self, error: OSError) -> None:
        """Log once that connections cannot be accepted."""
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "HTTP clients wait, because no connection can be accepted (%s); %s",
                error.strerror or error,
                RAISE_THE_LIMIT,
            )
