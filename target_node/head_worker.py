"""Runs heads beside the target's model, in one process and on one device."""

from collections.abc import Callable
from typing import Any

from drafter_node import compute as drafter
from drafter_node import worker as drafting
from drafter_node.drafting import Drafting
from drafter_node.scheduling import Schedule
from drafter_node.statistics import Known
from engine.checkpoint.files import one_line
from engine.loading import Engine
from node.costs import Passes
from node.dispatcher import Dispatcher
from node.economics import PREFILL_CHUNKS
from node.entrance import Entrance, Own
from node.events import CopyPrefix, MoveRows, Wipe
from node.forwards import Forwards, SimulatedDevice, vocabulary_of
from node.lanes import Lanes
from node.loop import Launched, Loop
from node.process import Heart
from proto.links.transport import Connection
from proto.messages import HEADS_SOURCE
from proto.node_config import NodeConfig
from target_node import compute as target
from target_node.colocated_heads import Event, ForHeads, HeadsDone, HeadsFailed, Home, Targets
from target_node.statistics import Known as TargetKnown

Work = target.Compute | ForHeads


class WithHeads:
    """A target and its heads on one device: runs what both ask for, and makes the node's loop.

    dispatcher  state machine of both (`colocated_heads.Home`)
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        heads: Engine,
        targets: Targets,
        of_target: TargetKnown,
        launch: Callable[[target.Compute], Launched[target.Computed]],
        vocab_size: int,
        heart: Heart,
    ) -> None:
        device = SimulatedDevice(config.heads_ms / 1e3, config.heads_ms_per_row / 1e3)
        self._engine = engine
        self._heart = heart
        self._have_failed = False
        self._launch = launch
        self._executor = heads.executor
        self._steps = Forwards(heads.executor, heart, device, vocabulary_of(config), heads.pass_s)
        self._heads = drafting.Worker(config, heads, self._steps, vocab_size, lambda: False)
        steps = Passes(device.at_least(heads.pass_s))
        chunk = PREFILL_CHUNKS[heads.loaded.device.type]
        about = drafting.about_head(heads)
        known = Known(heads.max_len, HEADS_SOURCE, steps, chunk=chunk, **about)
        count = engine.executor.lanes.count
        lanes = Lanes(count, heads.executor.capacity, is_head=True)
        together = min(heads.executor.num_lanes_per_pass, count)
        schedule = Schedule(lanes, known, num_per_pass=together)
        dispatcher: Dispatcher[Drafting, drafter.Proposed, drafter.Action] = Dispatcher(
            lanes, schedule
        )
        layers = drafting.layers_of(heads)
        self.dispatcher = Home(targets, dispatcher, known=known, of_target=of_target, layers=layers)

    def launch(self, action: Work) -> Launched[Event]:
        """Start a pass of the target, or run an action for the heads; return its result."""
        if isinstance(action, target.Compute):
            return self._launch(action)
        done = self._ask(action)
        self._steps.wait()
        return Launched(done)

    def _ask(self, action: ForHeads) -> Event:
        was_step = isinstance(action.action, drafter.Compute)
        if self._have_failed:  # this was asked before the machine knew of the failure
            return HeadsFailed(was_step)
        try:
            return self._of_heads(action)
        except AssertionError:  # a bug of ours, which must not be hidden
            raise
        except Exception as error:  # noqa: BLE001 (whatever their code raises costs drafts alone)
            self._have_failed = True
            self._heart.trouble(f"its heads have failed, and draft no more: {one_line(error)}")
            return HeadsFailed(was_step)

    def _of_heads(self, wanted: ForHeads) -> HeadsDone:
        match wanted.action:
            case drafter.Compute() as steps:
                return HeadsDone(self._heads.compute(steps))
            case MoveRows(moves):
                self._executor.move(*moves)
            case CopyPrefix(source, to, length):
                self._executor.copy_prefix(source, to, length)
            case Wipe(lane, start):
                self._executor.wipe(lane, start)
            case _:
                raise AssertionError(f"unknown action {wanted.action}")
        return HeadsDone()

    def loop(self, connection: Connection, heart: Heart, own: Own) -> Loop[Work, Event]:
        """Return the loop that runs the node's machines, executor and connection.

        own  what the target's model can take
        """
        entrance: Entrance[Event, Any] = Entrance(self.dispatcher, own)
        return Loop(connection, heart, self._engine.executor, entrance, self.launch)
