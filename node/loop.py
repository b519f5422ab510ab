"""The loop of a node's process, for ever: `turns.py` with a socket, the clock and the model."""

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from engine.checkpoint.files import one_line
from engine.errors import EngineError, lacks_memory
from engine.executor import Executor
from node.events import SharedAction
from node.process import BadFrames, Heart
from node.turns import Compute, Launched, Machine, Result, Turns
from proto.errors import NodeError
from proto.links.transport import Connection
from proto.liveness import FaultDetector

logger = logging.getLogger(__name__)


class Loop(Turns[Compute, Result]):
    """Serves one coordinator with one machine (`Turns`)."""

    def __init__(
        self,
        connection: Connection,
        heart: Heart,
        executor: Executor,
        dispatcher: Machine[Result, SharedAction | Compute],
        launch: Callable[[Compute], Launched[Result]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            *(connection, heart, executor, dispatcher, launch),
            decode=BadFrames().decode,
            clock=clock,
            warn=lambda line: logger.warning("%s", line),
            complain=lambda line: logger.error("%s", line),
        )

    def run(self, *, has_lifeline: bool = True) -> NoReturn:
        """Serve for ever; with a lifeline (`process.py`) the process ends when that closes.

        Raises:
            ClosedError: the coordinator says that it ends, or is silent; only without a lifeline.
            ConfigurationError: another process has this node's name; only without a lifeline.
            NodeError: the engine cannot go on, or its device does not answer.
            RefusedError: the coordinator has cut this node off, or a target has joined that it does
                not fit.
            RemoteProtocolError: too many garbled frames have come.
        """
        if not has_lifeline:
            self.silence = FaultDetector(time.monotonic())
        timeout_s = 0.0
        try:
            while True:
                timeout_s = self.turn(timeout_s)
        except EngineError as error:
            raise NodeError(str(error)) from error
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise NodeError(f"there is no memory left: {one_line(error)}") from error
        except AssertionError:
            logger.error("an invariant is violated after %s", self.dispatcher.story())
            raise
