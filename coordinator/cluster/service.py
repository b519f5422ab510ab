"""Runs the router: with a thread, the socket and the clock; starts and restarts nodes.

Of texts and nodes nothing is decided in this file; requests beyond its limits are refused. A frame
is first passed on to the nodes that the router names; only then is it decoded and given to the
router. Tokens are decoded to text elsewhere: the thread that submitted a text reads its
`TokenStream`. Every wait has a limit.
"""

import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from coordinator.cluster.link import Links
from coordinator.cluster.node import Health
from coordinator.cluster.registry import Registry, names_by_hand
from coordinator.cluster.router_events import (
    UNREAD,
    Abort,
    Action,
    Arrived,
    Deliver,
    End,
    Event,
    Garbled,
    Kill,
    NodeEnded,
    Outside,
    Send,
    TextLeft,
    TextSubmitted,
    Tick,
    Warn,
)
from coordinator.cluster.routing import Router
from coordinator.cluster.simulated_network import SimulatedNetwork, may_be_lost, spares
from coordinator.cluster.snapshot import (
    NAME_IN_USE,
    NO_KEY,
    OTHER_NAME,
    Snapshot,
    Tally,
    ending_of,
    number_of,
    taken,
)
from coordinator.cluster.status_socket import StatusSocket
from coordinator.cluster.story import Story
from coordinator.launching.launcher import NodeLauncher
from coordinator.launching.restarts import Restarts
from coordinator.text.session import Session
from coordinator.text.stream import Reader, TokenStream
from coordinator.text.timed_session import TimedSession, check_opening
from coordinator.tracing.tape import Tape
from proto.codec import decode, encode, kind_of, session_of
from proto.errors import (
    ClosedError,
    NodeError,
    OutsideError,
    RemoteProtocolError,
    SlipstreamError,
    printable,
    shown,
)
from proto.links.transport import Listener
from proto.messages import (
    MAX_SESSIONS,
    PROTOCOL_VERSION,
    SESSION_KEY_BYTES,
    Fault,
    FaultCode,
    Heartbeat,
    Hello,
    Limits,
    Lookup,
    Message,
    Policy,
    Role,
    Rule,
    SamplingSpec,
    TracePart,
)
from proto.node_config import EXIT_UNUSABLE, NodeConfig
from proto.stopwatch import Phase, Stopwatch

logger = logging.getLogger(__name__)

TIMER_S = 0.05
ROUND_TRIP_LIMIT_S = 1.0
SNAPSHOT_LIMIT_S = 2.0
GOODBYE_LIMIT_S = 2.0  # enough for a forward pass and a round trip
GOODBYE_AGAIN_S = 0.02
MAX_SAID = 64  # warnings with names from peers, which may send any number of names
END_LIMIT_S = 1.0  # for the end of the loop, in addition to GOODBYE_LIMIT_S
UNCOUNTED = (Heartbeat, TracePart)
NO_LINKS: Mapping[Role, Links] = MappingProxyType({})
NO_RESTARTS: Mapping[Role, int] = MappingProxyType({})


class Service:
    """Runs a router in a thread: receives frames, performs the router's actions, watches processes.

    max_num_seqs      most texts that each target works on at once, if it has room for as many
    links, link_seed  the simulated links, by the role of the nodes at their end, and their seed
    restarts          how often in a row a node of a role that has ended is soon started again
    awaits_target     texts wait for another target if theirs is lost. Without it they do so only
                      while the target is started again; else the pair ends then
    keeps_bits        no text goes on at a target that may compute other bits than its own
    traced            record what every process does
    """

    def __init__(
        self,
        launcher: NodeLauncher,
        *,
        busy_poll_s: float = 0.0,
        max_num_seqs: int = 1,
        links: Mapping[Role, Links] = NO_LINKS,
        link_seed: int = 0,
        restarts: Mapping[Role, int] = NO_RESTARTS,
        awaits_target: bool = False,
        keeps_bits: bool = False,
        traced: bool = False,
    ) -> None:
        self._launcher = launcher
        self._restarts = Restarts(restarts)
        self._starts_targets = not launcher.is_by_hand and restarts.get(Role.TARGET, 0) > 0
        self._links = links
        self._door = listener = Listener(
            launcher.endpoint,
            busy_poll_s=busy_poll_s,
            outside=launcher.outside,
            keys=launcher.keys,
        )
        self.outside = listener.outside
        self.num_refused = 0  # refused connections from outside
        self._said: set[str] = set()  # warnings of refused peers; each is given once
        self._network = (
            SimulatedNetwork(listener, seed=link_seed, may_be_lost=may_be_lost, spares=spares)
            if links
            else None
        )
        self._listener = self._network or listener
        self.endpoint = self._listener.endpoint
        self.secret = launcher.secret
        self._router = Router(
            self.secret,
            max_num_seqs=max_num_seqs,
            awaits_target=awaits_target or self._starts_targets,
            keeps_bits=keeps_bits,
        )
        if not links:
            self.registry.host = socket.gethostname()
        # Events from other threads; the loop gives them to the router.
        self._events: deque[TextSubmitted | TextLeft | NodeEnded] = deque()
        self._lock = threading.Lock()  # guards the next two
        # The streams of texts that were submitted and have not ended, by session number.
        self._streams: dict[int, TokenStream] = {}
        # Session numbers are never used twice, also after a restart of the coordinator, because
        # nodes compare them. So they begin at a random number.
        self._last_session = secrets.randbits(30) << 32
        self._failure: SlipstreamError | None = None
        self.watch = Stopwatch(time.monotonic_ns)  # times the loop; same clock as the stamps
        self.tape = Tape(time.monotonic_ns) if traced else None
        self.registry.traced = traced
        self._num_dropped = 0  # frames that could not be sent because a queue was full
        self.num_bytes = 0  # of all frames received and sent, without UNCOUNTED
        self.tally = Tally()
        self._story = Story()  # of the loop
        self._asked: deque[queue.SimpleQueue[Snapshot]] = deque()  # threads that wait
        self._since = time.time()
        self._status = StatusSocket(launcher.folder, self.status)
        self._stopping = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        # The loop shares Python's global lock with threads that decode text: switch quickly.
        sys.setswitchinterval(0.0005)

    # -- called from other threads ----------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """Return the nodes of this coordinator."""
        return self._router.registry

    def start(self) -> None:
        """Start the thread and begin to listen."""
        self._thread.start()
        self._status.start()
        self._note("the coordinator starts, process %d, nodes: %s", os.getpid(), self._launcher.way)

    def launch(self, config: NodeConfig) -> None:
        """Start a node and expect its Hello."""
        now = time.monotonic()
        self._restarts.started(config)
        self._expect(config, now)
        self._start(config)

    def _start(self, config: NodeConfig) -> None:
        """Start a node process, with a line to it where the launcher has one. Raises NodeError."""
        self._launcher.start(config, with_line=True)
        if (line := self._launcher.take_line(config.identity)) is not None:
            self._door.add_line(config.identity.encode(), line)

    def _expect(self, config: NodeConfig, now: float, *, is_again: bool = False) -> None:
        identity = config.identity.encode()
        self.registry.expect(
            config.role, identity, now, is_again=is_again, is_by_hand=self._launcher.is_by_hand
        )
        if self._network is not None and (link := self._links.get(config.role)) is not None:
            is_by_hand = self._launcher.is_by_hand
            for name in names_by_hand(config.role) if is_by_hand else (identity,):
                self._network.slow_down(name, link)

    @property
    def restarts(self) -> Counter[Role]:
        """Return how many nodes of each role have taken the place of one that had ended."""
        return self.tally.restarts + self._router.successors

    @property
    def num_texts(self) -> int:
        """Return the number of texts that were asked for and have not ended."""
        return len(self._streams)

    def check_alive(self) -> None:
        """Raise the error that ended the service, if any; in a forked child ClosedError."""
        if os.getpid() != self._owner:
            raise ClosedError("a forked process cannot use its parent's nodes; start some in it")
        if self._failure is not None:
            # Raise a copy each time: raising the same exception again adds to its traceback.
            raise copy(self._failure) from self._failure
        if self._stopping:
            raise ClosedError("the coordinator was closed")

    def wait_for_traces(self) -> None:
        """Wait until every ready node has sent all its trace records, at most one second."""
        deadline = time.monotonic() + ROUND_TRIP_LIMIT_S
        if (tape := self.tape) is None or self._failure is not None or self._stopping:
            return
        nodes = [node.id for role in Role for node in self.registry.ready(role)]
        # Two more parts, because the next one may have been on its way already.
        wanted = {node: tape.num_parts(node) + 2 for node in nodes}
        while time.monotonic() < deadline:
            if all(tape.num_parts(node) >= number for node, number in wanted.items()):
                break
            time.sleep(0.01)

    def wait_for_round_trips(self) -> None:
        """Wait until every node on another host has answered a heartbeat, at most one second."""
        deadline = time.monotonic() + ROUND_TRIP_LIMIT_S
        while self._launcher.keys is not None and time.monotonic() < deadline:
            nodes = [node for role in Role for node in self.registry.ready(role)]
            if all(node.round_trips.now_s is not None for node in nodes):
                break
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        """Return the coordinator's state as JSON; `hung` is true if its loop does not answer."""
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": round(self._since, 3),
            "protocol": PROTOCOL_VERSION,
            "nodes_started": self._launcher.way,
            "listens": self.outside or (self.endpoint if self._launcher.is_by_hand else ""),
            "logs": str(self._launcher.logs.folder),
        }
        mine: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._asked.append(mine)
        try:
            return {**about, "hung": False, **mine.get(timeout=SNAPSHOT_LIMIT_S).as_json()}
        except queue.Empty:
            return {**about, "hung": not self._stopping and self._failure is None}

    @property
    def alone_on(self) -> str:
        """Return where a target may run without drafts; empty: where it runs with them."""
        return self._launcher.alone_on

    def states(self) -> dict[Role, str]:
        """Return what the nodes of each role do, for people: one that is not ready, if any."""
        present = sorted(self.registry.present, key=lambda one: one.health is Health.READY)
        return {node.role: node.state for node in reversed(present)}

    @property
    def awaits_target(self) -> bool:
        """True if a target that was lost is started again, so that texts may wait for it."""
        return self._starts_targets and bool(self.registry.hellos(Role.TARGET))

    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        sampling: SamplingSpec,
        policy: Policy,
        limits: Limits,
        rule: Rule = Rule.COUPLED,
        lookup: Lookup | None = None,
        reader: Reader | None = None,
        is_watched: bool = False,
        written: tuple[int, ...] = (),
    ) -> TokenStream:
        """Queue a text and return its stream, through which its tokens come.

        Tokens of the answer that were `written` elsewhere stand behind the prompt already.

        The nodes begin with texts in the order of submission. With a `reader` the text is always
        queued. Without one, NodeError is raised while MAX_SESSIONS texts have not ended. The passes
        of a text that `is_watched` say what both devices did (`Emit.spans`). Raises
        ConfigurationError if the text cannot be encoded in a message, NodeError, ClosedError.
        """
        self.check_alive()
        key = os.urandom(SESSION_KEY_BYTES)
        # Under the lock, because session numbers must grow in the order of the queue.
        with self._lock:
            if reader is None and len(self._streams) >= MAX_SESSIONS:
                raise NodeError(f"{MAX_SESSIONS} texts are queued already; try again later")
            number = self._last_session + 1
            machine = Session(
                number,
                key,
                prompt,
                sampling=sampling,
                policy=policy,
                limits=limits,
                rule=rule,
                lookup=lookup,
                is_watched=is_watched,
                written=written,
            )
            check_opening(machine)
            self._last_session = number
            stream = self._streams[number] = TokenStream(
                partial(self._tell, TextLeft(number, is_complete=False)),
                partial(self._tell, TextLeft(number, is_complete=True)),
                self.check_alive,
                reader,
            )
            since = time.monotonic() if reader is None else reader.since
            self._tell(TextSubmitted(TimedSession(machine, since)))
        return stream

    def _tell(self, event: TextSubmitted | TextLeft | NodeEnded) -> None:
        """Add an event for the router and wake the loop, which handles it."""
        self._events.append(event)
        self._listener.wake()

    def close(self, why: str = "it was closed") -> None:
        """Stop the loop and end the nodes. May be called twice. `why` goes into the log."""
        if os.getpid() == self._owner:
            self._status.close()
        if not self._stopping and os.getpid() == self._owner:  # not in a forked child
            self._note("the coordinator ends: %s", why)
        self._stopping = True
        self._listener.wake()
        if self._thread.is_alive():
            self._thread.join(GOODBYE_LIMIT_S + END_LIMIT_S)
        self._launcher.close()

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        next_timer = 0.0
        enter = self.watch.enter
        if self.tape is not None:
            self.watch.record(self.tape.recorder)
        try:
            while not self._stopping:
                enter(Phase.WAIT)
                for node, frame in self._listener.receive(TIMER_S):
                    enter(Phase.DECODE)
                    self._on_frame(node, frame)
                    enter(Phase.WAIT)
                enter(Phase.DECIDE)
                now = time.monotonic()
                while self._events:
                    self._handle(self._events.popleft(), now)
                # Not for every frame, because the timer asks the kernel about each process.
                if now >= next_timer:
                    next_timer = now + TIMER_S
                    self._on_timer(now)
        except SlipstreamError as error:
            self._failure = error
            self._note("everything ends: %s", error)
            self._note("this came after %s", self._story.told())
        finally:
            if self._failure is None:
                self._failure = ClosedError("the coordinator was closed")
                if not self._stopping:
                    self._failure = NodeError("the coordinator's loop has ended unexpectedly")
                    line = f"the coordinator's loop ends unexpectedly after {self._story.told()}"
                    logger.error("%s", line)
                    self._note("%s", line)
            for stream in tuple(self._streams.values()):
                stream.put(self._failure)
            self._say_goodbye()
            self._listener.close()

    def _on_frame(self, node: bytes, frame: bytes) -> None:
        now = time.monotonic()
        enter = self.watch.enter
        event: Event
        kind: type[Message] | None = None
        try:
            kind = kind_of(frame)
            if kind not in UNCOUNTED:
                self.num_bytes += len(frame)
            if self.tape is not None:
                self.tape.received(node, kind, frame)
            if (receivers := self._router.forward(node, kind, frame, now)) is None:
                return
            for receiver in receivers:
                enter(Phase.SEND)
                self._send(receiver, frame)
            if kind in UNREAD and not self._router.watches(kind, frame):
                self._story.passed_on(node, kind, session_of(frame), now)
                return
            enter(Phase.DECODE)
            message = decode(frame)
            if self.tape is not None and isinstance(message, TracePart):
                self.tape.add(node, message)
                return
            if self._is_of_stranger(node, message):
                return
            event = Arrived(node, message)
        except OutsideError as error:
            event = Outside(node, session_of(frame), str(error))
        except RemoteProtocolError as error:
            event = Garbled(node, str(error), is_hello=kind is Hello)
        enter(Phase.DECIDE)
        self._handle(event, now)

    def _is_of_stranger(self, node: bytes, message: Message) -> bool:
        """True for a Fault of a node, started by hand, that was not accepted: ignore it."""
        is_new = self.registry.worked_s(node, time.monotonic()) is None
        return is_new and isinstance(message, Fault) and self._launcher.is_by_hand

    def _say_goodbye(self) -> None:
        """Tell nodes started by hand that the coordinator ends; wait briefly for them.

        A node that disconnects has read the message. If this end closed the connection first, a
        node in the middle of a forward pass would lose the messages that it has not read yet.
        """
        if not self._launcher.is_by_hand:
            return
        frame = encode(Fault(0, 0, FaultCode.CLOSED, "the coordinator has ended"))
        there = [node.id for node in self.registry.nodes if self.registry.find(node.id)]
        deadline = time.monotonic() + GOODBYE_LIMIT_S
        # Past any simulated links, which end with the coordinator.
        while (there := [node for node in there if self._door.send(node, frame)]) and (
            time.monotonic() < deadline
        ):
            for _ in self._door.receive(0.0):
                pass  # unread frames would make the system reset the connection at once
            time.sleep(GOODBYE_AGAIN_S)

    @property
    def _why_refused(self) -> str:
        if self._launcher.keys is None:
            return (
                "it is no node, or one with keys; "
                "where nodes have keys the coordinator is given --keys DIR too"
            )
        return "its key is not known here" if self._door.num_unknown else "it has shown no key"

    def _count_refused(self) -> None:
        number = self._door.num_refused
        if number > self.num_refused:
            place = self.outside or self.endpoint
            self._say_once(f"refused a connection to {place}: {self._why_refused}")
            self.tally.refused(NO_KEY, number - self.num_refused)
        self.num_refused = number
        for line in self._door.turned_away():
            self._say_once(line)
            self.tally.refused(NAME_IN_USE)
        for line in self._door.misnamed():
            self._say_once(f"{line}, and was turned away")
            self.tally.refused(OTHER_NAME)

    def _say_once(self, line: str) -> None:
        if line not in self._said and len(self._said) < MAX_SAID:
            self._said.add(line)
            self._warn(line)

    def _on_timer(self, now: float) -> None:
        self._count_refused()
        while self._asked:
            pids = self._launcher.pids()
            self._asked.popleft().put(taken(self._router, self.tally, pids, now))
        for end in self._launcher.ended():
            is_unusable = end.status == EXIT_UNUSABLE
            self._handle(NodeEnded(end.identity.encode(), end.line, is_unusable), now)
        self._handle(Tick(), now)
        if self._launcher.has_room_again():
            self._restarts.hurry(now)
        for restart in self._restarts.due(now):
            if restart.words:
                self._warn(restart.words)
            self.tally.restarted(restart.config.role)
            self._expect(restart.config, now, is_again=True)
            # In a thread, because a cluster may take long and texts must go on meanwhile.
            starting = threading.Thread(
                target=self._start_again, args=(restart.config,), name="restart", daemon=True
            )
            try:
                starting.start()
            except RuntimeError as error:
                self._not_started(restart.config, str(error))

    def _start_again(self, config: NodeConfig) -> None:
        """Start a node in the place of one that has ended; if that fails, plan the next attempt.

        Runs in a thread of its own. Whatever fails here would otherwise end that thread alone, and
        the router would wait for the node forever.
        """
        try:
            self._start(config)
        except SlipstreamError as error:
            self._not_started(config, str(error))
        except Exception as error:  # noqa: BLE001 (of the system, of Python, of Ray)
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._not_started(config, f"cannot start the {config.role} process ({why})")

    def _not_started(self, config: NodeConfig, line: str) -> None:
        if not self._stopping:
            self._tell(NodeEnded(config.identity.encode(), line, is_unusable=False))

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, NodeEnded):
            is_last = self._restarts.ended(
                event.node.decode(),
                now,
                worked_s=self.registry.worked_s(event.node, now),
                is_unusable=event.is_unusable,
            )
            event = replace(event, is_last=is_last)
        self._story.note(event, now)
        for action in self._router.handle(event, now):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(node, frame):
                self.watch.enter(Phase.SEND)
                self._send(node, frame)
                self.watch.enter(Phase.DECIDE)
            case Kill(node):
                self._launcher.kill(node.decode())
            case Deliver(session, item):
                self._streams[session].put(item)
            case End(session, last):
                with self._lock:
                    stream = self._streams.pop(session)
                stream.put(last)
                self.tally.ended(last)
                name = f" (request {shown(stream.name)})" if stream.name else ""
                self._note("text %d%s %s", number_of(session), name, ending_of(last))
                if isinstance(last, SlipstreamError) and last.__cause__ is not None:  # our mistake
                    story = self._story.told(session)
                    self._note("text %d was broken off after %s", number_of(session), story)
            case Warn(line):
                self._warn(line)
            case Abort(error):
                raise error

    def _warn(self, line: str) -> None:
        """Show a line to people and write it to the log; it may have words of a peer."""
        line = printable(line)
        logger.warning("%s", line)
        self._note("%s", line)

    def _note(self, form: str, *values: object) -> None:
        self._launcher.logs.note(form % values)

    def _count(self, kind: type[Message], frame: bytes) -> None:
        if kind not in UNCOUNTED:
            self.num_bytes += len(frame)
        if kind is Fault:
            fault = decode(frame)
            if isinstance(fault, Fault) and fault.code is FaultCode.REFUSED:
                self.tally.refused(fault.detail)

    def _send(self, node: bytes, frame: bytes) -> None:
        self._count(kind_of(frame), frame)
        if self.tape is not None:
            self.tape.sends(node, frame)
        if not self._listener.send(node, frame):
            self._num_dropped += 1
