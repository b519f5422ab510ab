"""A node in virtual time: the real follower and schedule behind a device that takes its time.

What `node/loop.py` does with a clock, a socket and a model is done here with the links, the
timeline and the models of a world; nothing is decided here either.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.text.session import NodeId
from drafter_node import compute as drafter
from drafter_node import scheduling as drafter_scheduling
from drafter_node import statistics as drafter_known
from node.economics import Costs, Passes
from node.follower import (
    Allocate,
    Arrived,
    CopyPrefix,
    Follower,
    Lanes,
    MoveRows,
    Send,
    Tick,
    WaitUntil,
    Wipe,
)
from proto import codec
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Heartbeat, Message, Role
from rehearsal.cache import CacheError, HeadCache, VirtualCache, feature_of
from target_node import compute as target
from target_node import scheduling as target_scheduling
from target_node import statistics as target_known
from target_node.drafts import rows_on_text

if TYPE_CHECKING:
    from rehearsal.world import World


class Node:
    """A node process: its texts, their schedule, its device, and the loop around them.

    index  which of its role it is
    """

    def __init__(self, world: "World", role: Role, index: int = 0) -> None:
        self.world = world
        self.role = role
        self.index = index
        self.name = f"{role} {index + 1}" if index else str(role)
        self.life = 0  # of the process; things that an earlier life asked for do not happen
        self.alive = False
        self.follower: Any = None
        self.lanes: list[VirtualCache] = []
        self.is_computing = False  # a result has not come yet
        self.deadline = float("inf")  # at which the schedule wants to be woken
        self.progress = 0  # finished forwards
        self._busy_until = 0.0
        self._is_called = False  # a message has come since the forward began
        self._inbox: deque[Message] = deque()
        self._stamp: tuple[int, float] | None = None  # the coordinator's latest, and when it came

    @property
    def id(self) -> NodeId:
        """Of the process: every life has its own."""
        return f"{self.name}.{self.life}".encode()

    def start(self, source: int) -> None:
        """Begin a life with nothing but a source number."""
        setting = self.world.setting
        self.alive = True
        count = setting.num_lanes(self.role)
        is_head = setting.is_head and self.role is Role.DRAFTER
        make = HeadCache if is_head else VirtualCache
        self.lanes = [make(setting.capacity) for _ in range(count)]
        self.is_computing, self.progress = False, 0
        self.deadline = float("inf")
        self._busy_until = self.world.timeline.now
        self._inbox.clear()
        self._stamp = None
        lanes = Lanes(count, setting.capacity, is_head=is_head)
        together = min(count, setting.num_per_pass)
        self.follower = Follower(lanes, self._schedule(lanes, source, together))
        self._later(HEARTBEAT_INTERVAL_S * self.world.luck.random(), self._beat)

    def _schedule(self, lanes: Lanes, source: int, together: int) -> Any:
        setting = self.world.setting
        if self.role is Role.DRAFTER:
            steps = Passes(setting.drafter.measured)
            reads = drafter_known.Known(
                setting.drafter_max_len, source, steps, is_head=setting.is_head
            )
            return drafter_scheduling.Schedule(lanes, reads, num_per_pass=together)
        known = target_known.Known(setting.fixed_rows, Costs(setting.target.measured))
        return target_scheduling.Schedule(lanes, known, num_per_pass=together)

    def crash(self) -> None:
        """End this life."""
        self.alive = False

    def receive(self, frame: bytes) -> None:
        """A frame has come."""
        if not self.alive:
            return
        self._inbox.append(codec.decode(frame))
        self._is_called = True
        if not (self.world.setting.blocking and self.is_computing):
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Heartbeat):
                self._stamp = message.stamp_us, self.world.timeline.now
            self._handle(Arrived(message))
        self._tick()

    def _tick(self) -> None:
        self.deadline = float("inf")
        self._handle(Tick())
        self.world.watcher.rested(self)

    def _handle(self, event: Any) -> None:
        actions = self.follower.handle(event, self.world.timeline.now)
        self.world.tell(self.name, "handles", event)
        self.world.watcher.heard(self, event)
        for action in actions:
            self._perform(action)
        self.world.watcher.handled(self, event)

    def _perform(self, action: Any) -> None:
        self.world.tell(self.name, "does", action)
        match action:
            case Send(message):
                self.world.watcher.sent(self, message)
                self.world.uplinks[self.id].send(codec.encode(message))
            case MoveRows(moves):
                for move in moves:
                    self.lanes[move.lane].move(move)
            case CopyPrefix(lane, to, length):
                self.lanes[to].copy(self.lanes[lane], length)
            case Wipe(lane, start):
                self.lanes[lane].wipe(start)
            case drafter.Compute() | target.Compute():
                self._compute(action)
            case WaitUntil(deadline):
                self.deadline = deadline
                self._later(deadline - self.world.timeline.now, self._wake)
            case Allocate():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")

    def _compute(self, action: drafter.Compute | target.Compute) -> None:
        """The device works in order; the result comes when the time that it costs is over."""
        if self.is_computing:
            raise CacheError("two forwards at once")
        self.world.watcher.launched(self, action)
        self.is_computing, self._is_called = True, False
        self._busy_until = max(self._busy_until, self.world.timeline.now)
        self._busy_until += self.world.setting.costs(self.role).host_s
        if isinstance(action, drafter.Compute):
            self._draft(action, action.parts, (), 0)
            return
        digests = self._digests(action.parts)
        seen, model_us = self._run(action.parts, digests)
        verify = self.world.models.verify
        outcomes = tuple(
            with_features(part, verify(part, asked), rows)
            for part, asked, rows in zip(action.parts, seen, digests, strict=True)
        )
        self._when_free(lambda: self._finish(target.Computed(action.ticket, outcomes, model_us)))

    def _draft(
        self,
        action: drafter.Compute,
        parts: Sequence[drafter.Part],
        before: tuple[drafter.Children, ...],
        before_us: int,
    ) -> None:
        """A step, after those of the same chain; another follows, unless a message has come."""
        seen, step_us = self._run(parts, self._digests(parts))
        models, model_us = self.world.models, before_us + step_us
        children = [
            models.draft(part, digests, self.index)
            for part, digests in zip(parts, seen, strict=True)
        ]
        chain, first = (*before, *children[0]), action.parts[0]

        def go_on() -> None:
            if not first.ahead:
                self._finish(drafter.Proposed(action.ticket, tuple(children), model_us))
            elif self._is_called or (part := first.after(chain)) is None:
                self._finish(drafter.Proposed(action.ticket, (chain,), model_us, len(chain)))
            else:
                self._draft(action, (part,), chain, model_us)

        self._when_free(go_on)

    def _digests(self, parts: Sequence[drafter.Part | target.Part]) -> list[list[int]]:
        """What each row of a forward has seen, part by part."""
        return [self.lanes[part.feed.lane].run(part.feed) for part in parts]

    def _run(
        self, parts: Sequence[drafter.Part | target.Part], digests: Sequence[Sequence[int]]
    ) -> tuple[list[Sequence[int]], int]:
        """Of a forward: what its rows that are asked have seen; and its microseconds."""
        num_rows = sum(len(part.feed.tokens) for part in parts)
        cost_s = self.world.setting.costs(self.role).forward.of(num_rows)
        began, self._busy_until = self._busy_until, self._busy_until + cost_s
        self.world.watcher.occupied(self, began, self._busy_until)
        pairs = zip(parts, digests, strict=True)
        return [seen[len(seen) - part.num_asked :] for part, seen in pairs], round(cost_s * 1e6)

    def _when_free(self, happen: Callable[[], None]) -> None:
        """When the device is."""
        self._later(self._busy_until - self.world.timeline.now, happen)

    def _finish(self, event: drafter.Proposed | target.Computed) -> None:
        self.is_computing = False
        self.progress += event.num_steps if isinstance(event, drafter.Proposed) else 1
        self._handle(event)
        self._drain()

    def _wake(self) -> None:
        if self.world.timeline.now >= self.deadline and not (
            self.world.setting.blocking and self.is_computing
        ):
            self._tick()

    def _beat(self) -> None:
        stamp_us, came = self._stamp or (0, 0.0)
        held_us = round((self.world.timeline.now - came) * 1e6) if stamp_us else 0
        marks = self.follower.marks
        beat = Heartbeat(marks, self.progress, "", stamp_us=stamp_us, held_us=held_us)
        self.world.uplinks[self.id].send(codec.encode(beat))
        self._later(HEARTBEAT_INTERVAL_S, self._beat)

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        life = self.life

        def if_still_alive() -> None:
            if self.alive and self.life == life:
                happen()

        self.world.timeline.at(self.world.timeline.now + delay_s, if_still_alive)


def with_features(
    part: target.Part, outcome: target.Outcome, digests: Sequence[int]
) -> target.Outcome:
    """The outcome with the features that are wanted, of rows that have seen these paths."""
    if not part.layers:
        return outcome
    rows = rows_on_text(part, outcome)
    data = b"".join(feature_of(digests[row]) for row in rows)
    return replace(outcome, features=target.FeatureRows("digest", len(rows), data))
