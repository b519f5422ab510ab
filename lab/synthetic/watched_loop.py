"""A node's loop that notes every launch: the product's own, with a `Watch` around it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from engine.executor import Executor
from lab.synthetic.host_time import Watch
from node.entrance import Handles
from node.events import Afterwards, Arrived, Tick, WaitUntil
from node.forwards import Simulated
from node.loop import Loop
from node.process import Heart
from node.turns import Launched
from proto.links.transport import Connection
from proto.messages import Close, SessionMark


class _Heard:
    """A connection that tells the watch about each received frame."""

    def __init__(self, connection: Connection, watch: Watch) -> None:
        self._connection, self._watch = connection, watch
        self.send = connection.send

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[bytes]:
        """Yield the received frames, as `Connection.receive` does."""
        for frame in self._connection.receive(timeout_s, exact=exact):
            self._watch.heard(time.perf_counter())
            yield frame


class _Asked:
    """A dispatcher (the node's state machine) that tells the watch what it is asked and answers.

    At the end of each text it writes the launches to a file.
    """

    def __init__(self, dispatcher: Handles[Any, Any], watch: Watch, path: Path) -> None:
        self._dispatcher, self._watch, self._path = dispatcher, watch, path
        self.story = dispatcher.story

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return the dispatcher's `marks`."""
        return self._dispatcher.marks

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Let the dispatcher handle an event, and return its actions."""
        if not isinstance(event, Arrived | Tick | Afterwards):
            self._watch.computed()
        actions = self._dispatcher.handle(event, now)
        if isinstance(event, Tick) and not any(hasattr(action, "ticket") for action in actions):
            deadlines = [a.deadline for a in actions if isinstance(a, WaitUntil)]
            self._watch.ticked(min(deadlines, default=None))
        if isinstance(event, Arrived) and isinstance(event.message, Close):
            self._write()
        return actions

    def _write(self) -> None:
        """Append the forwards launched since the last call to the file, as one line of JSON."""
        launches, self._watch.launches = self._watch.launches, []
        with self._path.open("a") as file:
            file.write(json.dumps({"launches": launches}) + "\n")


def watched_loop(
    path: Path,
    connection: Connection,
    heart: Heart,
    executor: Executor,
    dispatcher: Handles[Any, Any],
    launch: Callable[[Any], Launched[Any]],
) -> Loop[Any, Any]:
    """Return a loop that notes every launch, and adds a line to `path` at the end of each text."""
    watch = Watch()

    def noted(action: Any) -> Launched[Any]:
        began = time.perf_counter()
        launched = launch(action)
        assert isinstance(launched, Simulated), "the device is not simulated"
        num_forwards = getattr(launched.result, "num_steps", 1)  # a target's launch is one forward
        if num_forwards == 1:  # the device begins when the rows are laid out
            began = launched.due_at - launched.result.model_us / 1e6
        watch.launched(began, launched.due_at, num_forwards)
        return launched

    heard = cast(Connection, _Heard(connection, watch))
    return Loop(heard, heart, executor, _Asked(dispatcher, watch, path), noted)
