"""A target with its model and without its process: messages in, messages out."""

from types import SimpleNamespace
from typing import Any

from engine.model_executor import ModelExecutor
from node.costs import NOTHING_KNOWN, Costs
from node.dispatcher import Dispatcher
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    Tick,
    WaitUntil,
    Wipe,
)
from node.forwards import Forwards, SimulatedDevice
from node.lanes import Lanes
from proto.messages import Message
from target_node.compute import Action, Compute, Computed
from target_node.known import Known
from target_node.scheduling import Schedule
from target_node.verifying import Verifying
from target_node.worker import Worker


def heart() -> Any:
    """Of a node that nobody watches."""
    watch = SimpleNamespace(
        enter=lambda phase: None, forward=lambda rows, asked: None, num_received=0
    )
    trouble = list[str]().append
    return SimpleNamespace(
        watch=watch, progress=0, num_uncaptured=0, trouble=trouble, begins=lambda rows, s: None
    )


class RealTarget:
    """The machines of a target, and what they ask for done by an executor.

    lanes   of its cache
    sent    what it has said
    passes  the parts of its passes, texts by their session
    """

    def __init__(self, executor: ModelExecutor, chunk: int = 32) -> None:
        self.executor = executor
        known = Known(fixed_rows=executor.fixed_rows, costs=Costs(NOTHING_KNOWN), chunk=chunk)
        self.lanes = lanes = Lanes(executor.lanes.count, executor.capacity)
        schedule = Schedule(lanes, known, num_per_pass=executor.num_lanes_per_pass)
        self.dispatcher: Dispatcher[Verifying, Computed, Action] = Dispatcher(lanes, schedule)
        self.worker = Worker(Forwards(executor, heart(), SimulatedDevice(0.0, 0.0)))
        self.sent: list[Message] = []
        self.passes: list[list[int]] = []
        self.copies: list[CopyPrefix] = []
        self.now = 0.0

    def hear(self, *messages: Message) -> None:
        """Messages come."""
        for message in messages:
            self._handle(Arrived(message))

    def turn(self) -> bool:
        """All messages have been handled; whether a pass was made."""
        num_passes = len(self.passes)
        self._handle(Tick())
        self.now += 10.0  # whatever is waited for is late
        return len(self.passes) > num_passes

    def run(self, most: int = 200) -> None:
        """Until it has nothing to do."""
        for _ in range(most):
            if not self.turn() and not self.turn():
                return

    def _handle(self, event: Any) -> None:
        for action in self.dispatcher.handle(event, self.now):
            self._perform(action)
        self.dispatcher.check()

    def _perform(self, action: Action) -> None:
        match action:
            case Send(message):
                self.sent.append(message)
            case MoveRows(moves):
                self.executor.move(*moves)
            case CopyPrefix(source, target, length):
                self.copies.append(action)
                self.executor.copy_prefix(source, target, length)
            case Wipe(lane, start):
                self.executor.wipe(lane, start)
            case Compute():
                self.passes.append([part.opened.session for part in action.parts])
                self._handle(self.worker.compute(action))
                self._handle(Afterwards())
            case WaitUntil() | Allocate():
                pass
