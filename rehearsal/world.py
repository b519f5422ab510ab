"""A coordinator, its nodes and the links between them in virtual time.

This file decides nothing about a text. It carries messages (every one through the codec) between
coordinator and nodes (`rehearsal/node.py`), and tells the watcher what happened.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from coordinator.cluster import router_events as e
from coordinator.cluster.routing import Router
from coordinator.text.session import Session
from coordinator.text.session_events import Emit, EmitPrompt, EmitRead, NodeId
from coordinator.text.timed_session import Result, TimedSession
from drafter_node import compute as drafter
from proto import codec
from proto.errors import OutsideError, RemoteProtocolError
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    PROTOCOL_VERSION,
    SESSION_KEY_BYTES,
    Fingerprint,
    Hello,
    Message,
    Role,
    SamplingSpec,
    Welcome,
)
from rehearsal.node import SimulatedNode
from rehearsal.setting import VOCABULARY, Setting, Text
from rehearsal.timeline import Luck, Timeline
from target_node import compute as target

# -- watcher ---------------------------------------------------------------------------------------

# An observer of the run: a judge in tests, a ledger in the predictor.


class Watcher(Protocol):
    """Observes a run: each method is called when its event happens."""

    def begun(self, session: Session, text: Text) -> None:
        """Called when a text has begun."""

    def disturbed(self) -> None:
        """Called when a node has come or gone, or a link has lost or reordered a frame."""

    def told(self, node_id: NodeId, message: Message, router: Router) -> None:
        """Called when the router sends a message of its own to a node."""

    def passed_on(self, receiver: NodeId, frame: bytes, router: Router) -> None:
        """Called when the router passes a frame of one node on to another."""

    def routed(self, router: Router, event: e.Event) -> None:
        """Called when the router has handled an event, before its actions are done."""

    def delivered(self, session: int, item: Emit | EmitPrompt | EmitRead) -> None:
        """Called when a text's reader is given tokens, or logprobs of the prompt."""

    def completed(self, session: int, result: Result) -> None:
        """Called when a text's reader is told that the text is complete."""

    def launched(self, node: SimulatedNode, action: drafter.Compute | target.Compute) -> None:
        """Called when a node begins a Compute: one forward, or the first of a chain."""

    def occupied(self, node: SimulatedNode, began: float, until: float) -> None:
        """Called when a device computes a forward, or a step of a chain, [began, until) seconds."""

    def sent(self, node: SimulatedNode, message: Message) -> None:
        """Called when a node sends a message."""

    def heard(self, node: SimulatedNode, event: Any) -> None:
        """Called when a node's machine was given an event, before its actions are done."""

    def handled(self, node: SimulatedNode, event: Any) -> None:
        """Called when a node's machine was given an event, after its actions are done."""

    def rested(self, node: SimulatedNode) -> None:
        """Called when a node has handled all messages that had arrived, and has ticked."""

    def watch_clock(self) -> None:
        """Called when virtual time has passed."""

    def ended(self) -> None:
        """Called when the last text is complete."""


# -- host ------------------------------------------------------------------------------------------

# The coordinator in virtual time: the real router and real sessions, with perfect sockets.
#
# `coordinator/cluster/service.py` uses a thread, a socket and a clock; this class uses the links
# and the timeline of a world instead. It decides nothing either.

SECRET = "secret"
PAUSE_S = 0.01  # seconds between the end of a text and the next one


class Host:
    """The coordinator in virtual time: the real router, and readers of the texts.

    If the last target dies, texts wait until it is replaced.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        self.router = self._new_router()
        self._texts: dict[int, tuple[Session, Text]] = {}  # submitted, but not begun, by session
        self._num_submitted = 0
        self._num_left = len(world.setting.texts)  # texts that are not complete
        self._num_read: Counter[int] = Counter()  # tokens that were handed to readers, by session

    def _new_router(self) -> Router:
        """Return a router that knows no text and no node."""
        setting = self.world.setting
        return Router(
            SECRET,
            max_num_seqs=setting.max_num_seqs,
            awaits_target=True,
            keeps_bits=setting.keeps_bits,
        )

    def start(self) -> None:
        """Submit the first text, and begin to tick."""
        self._submit()
        self._tick()

    def _submit(self) -> None:
        """Submit the next text, and schedule the one after it if they come at fixed times."""
        self._num_submitted += 1
        self._ask(self._num_submitted)
        if (every_s := self.world.setting.submit_every_s) is not None:
            self._submit_later(every_s)

    def _ask(self, number: int, written: tuple[int, ...] = ()) -> None:
        """Submit the text of this number, behind tokens that it has already."""
        setting = self.world.setting
        text = setting.texts[number - 1]
        session = Session(
            number,
            self.world.luck.randbytes(SESSION_KEY_BYTES),
            text.prompt,
            sampling=SamplingSpec(temperature=setting.temperature, seed=number),
            policy=setting.policy,
            limits=text.limits,
            rule=setting.rule,
            lookup=setting.lookup,
            written=written,
        )
        self._texts[number] = session, text
        self._handle(e.TextSubmitted(TimedSession(session, self.world.timeline.now)))

    def _submit_later(self, delay_s: float) -> None:
        if self._num_submitted < len(self.world.setting.texts):
            self.world.timeline.at(self.world.timeline.now + delay_s, self._submit)

    def _read(self, session: int, num_tokens: int) -> None:
        """Count the tokens that a reader gets; if it stops reading, tell the router soon."""
        before, read_len = self._num_read[session], self.world.setting.texts[session - 1].read_len
        self._num_read[session] += num_tokens
        if read_len is not None and before < read_len <= before + num_tokens:
            left = e.TextLeft(session, is_complete=True)
            self.world.timeline.at(self.world.timeline.now, partial(self._handle, left))

    # -- the nodes --------------------------------------------------------------------------------

    def expect(self, node: SimulatedNode) -> None:
        """Tell the router that a node's process was started."""
        now, is_by_hand = self.world.timeline.now, node.is_by_hand
        self.router.registry.expect(node.role, node.id, now, is_by_hand=is_by_hand)

    def greet(self, node: SimulatedNode) -> None:
        """Give the router the Hello of a node. (The handshake is never lost.)"""
        self.world.watcher.disturbed()
        role, setting = node.role, self.world.setting
        is_head = setting.is_head and role is Role.DRAFTER
        hello = Hello(
            version=PROTOCOL_VERSION,
            role=role,
            secret=SECRET,
            fingerprint=Fingerprint(VOCABULARY, "", ()),
            logits_size=VOCABULARY,
            max_model_len=VOCABULARY,
            model="toy",
            dtype="float32",
            device="virtual",
            num_parameters=1,
            load_us=0,
            num_lanes=setting.num_lanes(role),
            layers=(-1,) if is_head else (),
            hidden_size=1,
            num_layers=1,
            bits="bits" if setting.same_bits else f"bits of {node.place}",
        )
        self._handle(e.Arrived(node.id, hello))

    def ended(self, node_id: NodeId) -> None:
        """Tell the router that a node's process has ended."""
        self.world.watcher.disturbed()
        self._handle(e.NodeEnded(node_id, "it has died", is_unusable=False))

    def receive(self, node_id: NodeId, frame: bytes) -> None:
        """Pass a node's frame on to other nodes first, then give it to the router.

        As in `Service._on_frame`.
        """
        event: e.Event
        try:
            kind = codec.kind_of(frame)
            receivers = self.router.forward(node_id, kind, frame, self.world.timeline.now)
            for receiver in receivers or ():
                self.world.watcher.passed_on(receiver, frame, self.router)
                self.world.downlinks[receiver].send(frame)
            if kind in e.UNREAD:
                return
            event = e.Arrived(node_id, codec.decode(frame))
        except OutsideError as error:
            event = e.Outside(node_id, codec.session_of(frame), str(error))
        except RemoteProtocolError as error:
            event = e.Garbled(node_id, str(error))
        self._handle(event)

    # -- the router -------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._handle(e.Tick())
        self.world.timeline.at(self.world.timeline.now + HEARTBEAT_INTERVAL_S, self._tick)

    def _handle(self, event: e.Event) -> None:
        actions = self.router.handle(event, self.world.timeline.now)
        self.world.tell("router", "handles", event)
        if self.router.mishap is not None:
            raise self.router.mishap
        self.world.watcher.routed(self.router, event)
        # The texts that the router has begun, in order; some may be complete already.
        queued = set(self.router.queued)
        for session in [one for one in self._texts if one not in queued]:
            self.world.watcher.begun(*self._texts.pop(session))
        for action in actions:
            self.world.tell("router", "does", action)
            self._perform(action)

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Send(node_id, frame):
                if codec.kind_of(frame) is Welcome:
                    self.world.welcome(node_id, codec.decode(frame))
                else:
                    self.world.watcher.told(node_id, codec.decode(frame), self.router)
                    self.world.downlinks[node_id].send(frame)
            case e.Deliver(session, item):
                self.world.watcher.delivered(session, item)
                if isinstance(item, Emit):
                    self._read(session, len(item.tokens))
            case e.End(session, Result() as result):
                self.world.watcher.completed(session, result)
                self._num_left -= 1
                self.world.over = self._num_left == 0
                if self.world.setting.submit_every_s is None:
                    self._submit_later(PAUSE_S)
            case e.End(_, error) | e.Abort(error):
                raise AssertionError(f"a text was given up: {error}")
            case e.Warn():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")


# -- world -----------------------------------------------------------------------------------------

Deliver = Callable[[bytes], None]


class Link(Protocol):
    """One direction of the connection between two processes."""

    def send(self, frame: bytes) -> None:
        """Send a frame to the process at the other end."""


class Models(Protocol):
    """A target and a drafter model, in place of the engines; a digest names the path a row saw."""

    def draft(
        self, part: drafter.Part, digests: Sequence[int], index: int
    ) -> tuple[drafter.Children, ...]:
        """Return what the drafter of this index proposes after each asked path."""

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """Return what the target chooses after each asked path."""


class PerfectLink:
    """A link over which every frame arrives after `hop_s` seconds, in order."""

    def __init__(self, timeline: Timeline, hop_s: float, deliver: Deliver) -> None:
        self._timeline = timeline
        self._hop_s = hop_s
        self._deliver = deliver

    def send(self, frame: bytes) -> None:
        """Send a frame; it is delivered `hop_s` seconds later."""
        self._timeline.at(self._timeline.now + self._hop_s, partial(self._deliver, frame))


def unheard(_who: str, _verb: str, _what: Any) -> None:
    """Ignore an event; the default for `tell`."""


class World:
    """One run of a coordinator and its nodes in virtual time.

    watcher    observes the run
    luck       source of random numbers
    make_link  makes a link, given its name, the seconds of a hop, and the receiver of its frames;
               None: perfect links
    tell       is called with (who, verb, what) for every event and action
    make_host  makes the coordinator
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
        make_host: Callable[["World"], Host] = Host,
    ) -> None:
        self.setting = setting
        self.models = models
        self.timeline = timeline
        self.watcher = watcher
        self.luck = luck
        self.tell = tell
        self.over = False
        self._make_link = make_link or self._perfect_link
        self.nodes = [
            SimulatedNode(self, Role.DRAFTER, index) for index in range(setting.num_drafters)
        ]
        self.nodes += [
            SimulatedNode(self, Role.TARGET, index) for index in range(setting.num_targets)
        ]
        self.host = make_host(self)
        # Every life of a node has links of its own: frames for one life never reach another.
        self.downlinks: dict[NodeId, Link] = {}
        self.uplinks: dict[NodeId, Link] = {}

    def begin(self) -> None:
        """Start all nodes, and let the coordinator greet them."""
        for node in self.nodes:
            self.launch(node)
            self.host.greet(node)

    def run(self) -> None:
        """Run until the last text is complete, or the watcher raises an error."""
        self.host.start()
        while not self.over:
            self.timeline.step()
            self.watcher.watch_clock()
        self.watcher.ended()

    def launch(self, node: SimulatedNode) -> None:
        """Start a node's process: a new life, which the coordinator expects."""
        node.life += 1
        node_id, hop_s = node.id, self.setting.costs(node.role).hop_s

        def deliver(frame: bytes) -> None:
            if node.id == node_id:
                node.receive(frame)

        receive = partial(self.host.receive, node_id)
        self.downlinks[node_id] = self._make_link(f"-> {node.name}", hop_s, deliver)
        self.uplinks[node_id] = self._make_link(f"<- {node.name}", hop_s, receive)
        self.host.expect(node)

    def welcome(self, node_id: NodeId, message: Message) -> None:
        """Start the work of a node that the coordinator has accepted."""
        assert isinstance(message, Welcome)
        node = next(node for node in self.nodes if node.id == node_id)
        node.start(message.source)

    def _perfect_link(self, _name: str, hop_s: float, deliver: Deliver) -> Link:
        return PerfectLink(self.timeline, hop_s, deliver)
