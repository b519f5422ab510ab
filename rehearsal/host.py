"""The coordinator in virtual time: the real router and real sessions behind perfect sockets.

What `coordinator/cluster/service.py` does with a thread, a socket and a clock is done here with the
links and the timeline of a world; nothing is decided here either.
"""

from typing import TYPE_CHECKING

from coordinator.cluster import events as e
from coordinator.cluster.routing import Router
from coordinator.text.running import Result, Running
from coordinator.text.session import NodeId, Session
from proto import codec
from proto.errors import RemoteProtocolError
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    PROTOCOL_VERSION,
    SESSION_KEY_BYTES,
    Fingerprint,
    Hello,
    Role,
    SamplingSpec,
    Welcome,
)
from rehearsal.setting import Text

if TYPE_CHECKING:
    from rehearsal.world import World

SECRET = "secret"
VOCABULARY = 1 << 10
PAUSE_S = 0.01  # of a reader, before the next text


class Host:
    """The router's loop. Nodes that die are replaced, so their texts wait for that."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.router = Router(SECRET, max_num_seqs=world.setting.max_num_seqs, awaits_target=True)
        self._texts: dict[int, tuple[Session, Text]] = {}  # submitted and not begun, by session
        self._num_submitted = 0
        self._num_left = len(world.setting.texts)  # texts that are not complete

    def start(self) -> None:
        """Submit the first text, and begin to tick."""
        self._submit()
        self._tick()

    def _submit(self) -> None:
        """Submit the next text, and see to it that the one after it comes."""
        setting = self.world.setting
        text = setting.texts[self._num_submitted]
        self._num_submitted = number = self._num_submitted + 1
        session = Session(
            number,
            self.world.luck.randbytes(SESSION_KEY_BYTES),
            text.prompt,
            sampling=SamplingSpec(temperature=setting.temperature, seed=number),
            policy=setting.policy,
            limits=text.limits,
            rule=setting.rule,
            lookup=setting.lookup,
        )
        self._texts[number] = session, text
        self._handle(e.TextSubmitted(Running(session, self.world.timeline.now)))
        if setting.submit_every_s is not None:
            self._submit_later(setting.submit_every_s)

    def _submit_later(self, delay_s: float) -> None:
        if self._num_submitted < len(self.world.setting.texts):
            self.world.timeline.at(self.world.timeline.now + delay_s, self._submit)

    # -- the nodes --------------------------------------------------------------------------------

    def expect(self, node_id: NodeId, role: Role) -> None:
        """A process is started."""
        self.router.registry.expect(role, node_id, self.world.timeline.now)

    def greet(self, node_id: NodeId, role: Role) -> None:
        """A node has introduced itself. (The handshake is never lost.)"""
        self.world.watcher.disturbed()
        is_head = self.world.setting.is_head and role is Role.DRAFTER
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
            num_lanes=self.world.setting.num_lanes(role),
            layers=(-1,) if is_head else (),
            hidden_size=1,
            num_layers=1,
        )
        self._handle(e.Arrived(node_id, hello))

    def ended(self, node_id: NodeId) -> None:
        """A node's process has ended, and that has been noticed."""
        self.world.watcher.disturbed()
        self._handle(e.NodeEnded(node_id, "it has died", is_unusable=False))

    def receive(self, node_id: NodeId, frame: bytes) -> None:
        """Forward before anything else; then tell the router. As in `Service._on_frame`."""
        event: e.Event
        try:
            kind = codec.kind_of(frame)
            for receiver in self.router.forward(node_id, kind, frame, self.world.timeline.now):
                self.world.watcher.passed_on(receiver, frame, self.router)
                self.world.downlinks[receiver].send(frame)
            if kind in e.UNREAD:
                return
            event = e.Arrived(node_id, codec.decode(frame))
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
        self.world.watcher.routed(self.router)
        # One after another, as they were begun; some may be complete already.
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
