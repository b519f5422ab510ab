"""Runs a drafter beside the target's model, in one process and on one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drafter_node import compute as drafter
from drafter_node import worker as drafting
from engine.checkpoint.files import one_line
from engine.device import on_threads
from engine.loading import Engine
from node.entrance import Entrance, Own
from node.events import CopyPrefix, MoveRows, Wipe
from node.forwards import Forwards, SimulatedDevice, vocabulary_of
from node.loop import Loop
from node.process import Heart
from node.turns import Ended, Launched
from proto.links.transport import Connection
from proto.messages import HEADS_SOURCE
from proto.node_config import NodeConfig
from target_node import compute as target
from target_node.at_home import DrafterDone, DrafterFailed, Event, ForDrafter, Home, Targets
from target_node.known import Known as TargetKnown

Work = target.Compute | ForDrafter


class WithDrafter:
    """A target and a drafter on one device: runs what both ask for, and makes the node's loop.

    dispatcher  state machine of both (`at_home.Home`)
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        own_drafter: Engine,
        targets: Targets,
        of_target: TargetKnown,
        launch: Callable[[target.Compute], Launched[target.Computed]],
        vocab_size: int,
        heart: Heart,
    ) -> None:
        device = SimulatedDevice(config.home_ms / 1e3, config.home_ms_per_row / 1e3)
        executor, num_lanes = own_drafter.executor, engine.executor.lanes.count
        self._engine = engine
        self._heart = heart
        self._has_failed = False
        self._num_threads = own_drafter.num_threads
        self._launch = launch
        self._executor = executor
        self._steps = Forwards(executor, heart, device, vocabulary_of(config), own_drafter.pass_s)
        self._drafter = drafting.Worker(config, own_drafter, self._steps, vocab_size, lambda: False)
        known = replace(drafting.known_of(own_drafter, device, HEADS_SOURCE), is_at_home=True)
        self.dispatcher = Home(
            targets,
            drafting.machines_of(own_drafter, known, min(num_lanes, executor.lanes.count)),
            known=known,
            of_target=of_target,
            layers=drafting.layers_of(own_drafter),
        )

    def launch(self, action: Work) -> Launched[Event]:
        """Start a pass of the target, or run an action for the drafter; return its result."""
        if isinstance(action, target.Compute):
            return self._launch(action)
        with on_threads(self._num_threads):  # as many as are fastest for the drafter
            done = self._ask(action)
        self._steps.wait()
        return Ended(done)

    def _ask(self, action: ForDrafter) -> Event:
        was_step = isinstance(action.action, drafter.Compute)
        if self._has_failed:  # this was asked before the machine knew of the failure
            return DrafterFailed(was_step)
        try:
            return self._of_drafter(action)
        except AssertionError:  # a bug of ours, which must not be hidden
            raise
        except Exception as error:  # noqa: BLE001 (whatever their code raises costs drafts alone)
            self._has_failed = True
            self._heart.trouble(f"its drafter has failed, and drafts no more: {one_line(error)}")
            return DrafterFailed(was_step)

    def _of_drafter(self, wanted: ForDrafter) -> DrafterDone:
        match wanted.action:
            case drafter.Compute() as steps:
                return DrafterDone(self._drafter.compute(steps))
            case MoveRows(moves):
                self._executor.move(*moves)
            case CopyPrefix(source, to, length):
                self._executor.copy_prefix(source, to, length)
            case Wipe(lane, start):
                self._executor.wipe(lane, start)
            case _:
                raise AssertionError(f"unknown action {wanted.action}")
        return DrafterDone()

    def loop(self, connection: Connection, heart: Heart, own: Own) -> Loop[Work, Event]:
        """Return the loop that runs the node's machines, executor and connection.

        own  what the target's model can take
        """
        entrance: Entrance[Event, Any] = Entrance(self.dispatcher, own)
        return Loop(connection, heart, self._engine.executor, entrance, self.launch)
