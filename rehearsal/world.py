"""A coordinator, its nodes and the links between them in virtual time.

Nothing here decides anything about a text. The world carries messages (every one through the
codec), runs forwards on virtual caches, and tells the watcher what happened.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from coordinator.text.session import NodeId
from drafter_node import events as drafter
from proto.messages import Message, Role, Welcome
from rehearsal.host import Host
from rehearsal.luck import Luck
from rehearsal.node import Node
from rehearsal.setting import Setting
from rehearsal.timeline import Timeline
from rehearsal.watcher import Watcher
from target_node import events as target

Deliver = Callable[[bytes], None]


class Link(Protocol):
    """One way between two processes."""

    def send(self, frame: bytes) -> None:
        """Put a frame on the way."""


class Models(Protocol):
    """A target and a drafter: the place of the engines. A digest names the path that a row saw."""

    def draft(
        self, part: drafter.Part, digests: Sequence[int], index: int
    ) -> tuple[drafter.Children, ...]:
        """What the drafter of this index proposes behind each path that was asked for."""

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """What the target says behind each path that was asked for."""


class PerfectLink:
    """Everything arrives after `hop_s`, in order."""

    def __init__(self, timeline: Timeline, hop_s: float, deliver: Deliver) -> None:
        self._timeline = timeline
        self._hop_s = hop_s
        self._deliver = deliver

    def send(self, frame: bytes) -> None:
        """See `Link`."""
        self._timeline.at(self._timeline.now + self._hop_s, partial(self._deliver, frame))


def unheard(_who: str, _verb: str, _what: Any) -> None:
    """Nobody listens to the story."""


class World:
    """One run.

    make_link  of (name, seconds of a hop, who is handed the frames); None: perfect ones
    tell       is told (who, verb, what) of everything
    """

    def __init__(
        self,
        setting: Setting,
        models: Models,
        timeline: Timeline,
        watcher: Watcher,
        luck: Luck,
        *,
        make_link: Callable[[str, float, Deliver], Link] | None = None,
        tell: Callable[[str, str, Any], None] = unheard,
    ) -> None:
        self.setting = setting
        self.models = models
        self.timeline = timeline
        self.watcher = watcher
        self.luck = luck
        self.tell = tell
        self.over = False
        self._make_link = make_link or self._perfect_link
        self.nodes = [Node(self, Role.DRAFTER, index) for index in range(setting.num_drafters)]
        self.nodes.append(Node(self, Role.TARGET))
        self.host = Host(self)
        # Every life of a node has links of its own: what was sent to it reaches no other.
        self.downlinks: dict[NodeId, Link] = {}
        self.uplinks: dict[NodeId, Link] = {}

    def begin(self) -> None:
        """Start all nodes."""
        for node in self.nodes:
            self.launch(node)
            self.host.greet(node.id, node.role)

    def run(self) -> None:
        """Everything, until the last text is complete or the watcher has had enough."""
        self.host.start()
        while not self.over:
            self.timeline.step()
            self.watcher.watch_clock()
        self.watcher.ended()

    def launch(self, node: Node) -> None:
        """Start a process: a new life, that the coordinator expects."""
        node.life += 1
        node_id, hop_s = node.id, self.setting.costs(node.role).hop_s

        def deliver(frame: bytes) -> None:
            if node.id == node_id:
                node.receive(frame)

        receive = partial(self.host.receive, node_id)
        self.downlinks[node_id] = self._make_link(f"-> {node.name}", hop_s, deliver)
        self.uplinks[node_id] = self._make_link(f"<- {node.name}", hop_s, receive)
        self.host.expect(node_id, node.role)

    def welcome(self, node_id: NodeId, message: Message) -> None:
        """The coordinator has let a node in."""
        assert isinstance(message, Welcome)
        node = next(node for node in self.nodes if node.id == node_id)
        node.start(message.source)

    def _perfect_link(self, _name: str, hop_s: float, deliver: Deliver) -> Link:
        return PerfectLink(self.timeline, hop_s, deliver)
