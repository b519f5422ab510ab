"""The thin loop around sessions and registry: one thread that moves frames and asks the machines.

A `Draft` is passed on unread and a `Verdict` is passed on before anything else is done with it;
then the machines decide. Text is rendered elsewhere: whoever submitted a request reads its
`Stream` in a thread of their own. Every wait has a limit.
"""

import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial

from coordinator.cluster.launcher import NodeLauncher
from coordinator.cluster.registry import Health, Node, Registry
from coordinator.text import session as s
from coordinator.text.running import MISHAPS, Ending, Running, check_opening
from coordinator.text.stream import Result, Stream
from proto.codec import decode, encode, kind_of
from proto.errors import (
    ClosedError,
    IncompatibleError,
    NodeError,
    RemoteProtocolError,
    SlipstreamError,
)
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    MAX_SESSIONS,
    MODEL_SOURCE,
    NGRAM_SOURCE,
    SESSION_KEY_BYTES,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Heartbeat,
    Hello,
    Limits,
    Lookup,
    Message,
    Policy,
    PromptLogprobs,
    Role,
    Rule,
    SamplingSpec,
    Verdict,
)
from proto.node import EXIT_UNUSABLE, HEARTBEAT_SUFFIX, MAX_BAD_FRAMES, NodeConfig
from proto.stopwatch import Phase, Stopwatch
from proto.transport import Listener

logger = logging.getLogger(__name__)

TIMER_S = 0.05


class Service:
    """The nodes, the sessions, and the thread that joins them."""

    def __init__(self, launcher: NodeLauncher, *, busy_poll_s: float = 0.0) -> None:
        self._launcher = launcher
        self._listener = Listener(launcher.endpoint, busy_poll_s=busy_poll_s)
        self.endpoint = self._listener.endpoint
        self.secret = secrets.token_hex(16)
        self.registry = Registry(self.secret)
        self._identities: dict[Role, bytes] = {}  # of the nodes that are not gone
        self._active: Running | None = None  # the text that the nodes work on
        self._waiting: deque[Running] = deque()  # submitted, oldest first
        # Other threads append a text that begins or the number of one to be ended.
        self._commands: deque[Running | Ending] = deque()
        self._lock = threading.Lock()  # guards the next two
        self._num_open = 0  # texts that have been submitted and not ended; <= MAX_SESSIONS
        # Never used again, also after a restart of the coordinator: nodes compare session ids.
        self._last_session = secrets.randbits(30) << 32
        self._failure: SlipstreamError | None = None
        self.watch = Stopwatch(time.perf_counter_ns)  # of the loop
        self._num_dropped = 0  # frames that a queue refused
        self._stopping = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        # The loop shares Python's lock with whoever renders text: hand it over quickly.
        sys.setswitchinterval(0.0005)

    # -- called from other threads ----------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def launch(self, config: NodeConfig) -> None:
        """Start a node and expect its Hello."""
        identity = config.identity.encode()
        self._identities[config.role] = identity
        self.registry.expect(config.role, identity, time.monotonic())
        self._launcher.start(config)

    def check_alive(self) -> None:
        """Raises what ended the service, if something did, or if this is a forked child's copy."""
        if os.getpid() != self._owner:
            raise ClosedError("a forked process cannot use its parent's nodes; start some in it")
        if self._failure is not None:
            # A new one each time: an exception that is raised again keeps every traceback.
            raise copy(self._failure) from self._failure
        if self._stopping:
            raise ClosedError("the coordinator was closed")

    def states(self) -> dict[Role, str]:
        """What each node is doing, for people."""
        nodes = [self.registry.of(role) for role in tuple(self._identities)]
        return {node.role: node.state for node in nodes if node is not None}

    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        sampling: SamplingSpec,
        policy: Policy,
        limits: Limits,
        rule: Rule = Rule.COUPLED,
        lookup: Lookup | None = None,
    ) -> Stream:
        """Queue a text; its tokens come through the stream.

        The nodes serve one text at a time, in the order of submission. Raises ConfigurationError if
        they could not be told of it, NodeError, ClosedError.
        """
        self.check_alive()
        key = os.urandom(SESSION_KEY_BYTES)
        # Under the lock, because session ids must grow in the order in which texts are served.
        with self._lock:
            if self._num_open >= MAX_SESSIONS:
                raise NodeError(f"{MAX_SESSIONS} texts are queued already; try again later")
            number = self._last_session + 1
            machine = s.Session(
                number,
                key,
                prompt,
                sampling=sampling,
                policy=policy,
                limits=limits,
                rule=rule,
                lookup=lookup,
            )
            check_opening(machine)
            self._num_open += 1
            self._last_session = number
            stream = Stream(
                partial(self._end_soon, Ending(number, is_complete=False)),
                partial(self._end_soon, Ending(number, is_complete=True)),
                self.check_alive,
            )
            self._commands.append(Running(machine, stream, time.monotonic()))
        self._listener.wake()
        return stream

    def _end_soon(self, ending: Ending) -> None:
        """End a text, if it has not ended yet."""
        self._commands.append(ending)
        self._listener.wake()

    def close(self) -> None:
        """Stop the loop and end the nodes. May be called twice."""
        self._stopping = True
        self._listener.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self._launcher.close()

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = next_timer = 0.0
        enter = self.watch.enter
        try:
            while not self._stopping:
                enter(Phase.WAIT)
                for identity, frame in self._listener.receive(TIMER_S):
                    enter(Phase.DECODE)
                    self._on_frame(identity, frame)
                    enter(Phase.WAIT)
                enter(Phase.DECIDE)
                now = time.monotonic()
                while self._commands:
                    self._on_command(self._commands.popleft())
                self._serve_next(now)
                # Not for every frame: it asks the kernel about each process.
                if now >= next_timer:
                    next_timer = now + TIMER_S
                    self._on_timer(now)
                if now >= next_beat:
                    next_beat = now + HEARTBEAT_INTERVAL_S
                    self._beat()
        except SlipstreamError as error:
            self._failure = error
        finally:
            if self._failure is None:
                self._failure = ClosedError("the coordinator was closed")
                if not self._stopping:
                    self._failure = NodeError("the coordinator's loop has ended unexpectedly")
            texts = [self._active, *self._waiting, *self._commands]
            for running in texts:
                if isinstance(running, Running):
                    running.stream.put(self._failure)
            self._listener.close()

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        node = self.registry.find(identity.removesuffix(HEARTBEAT_SUFFIX))
        if node is None:
            return  # nobody that we started
        now = time.monotonic()
        if self.registry.heard(node, now):
            self._step(s.NodeJoined(node.role), now)
        try:
            kind = kind_of(frame)
            if kind is Draft and node.role is Role.DRAFTER:
                self.watch.enter(Phase.SEND)
                self._send_frame(Role.TARGET, frame)
                return
            if kind is Verdict and node.role is Role.TARGET:
                self.watch.enter(Phase.SEND)
                self._send_frame(Role.DRAFTER, frame)
                self.watch.enter(Phase.DECODE)
            message = decode(frame)
        except RemoteProtocolError as error:
            self._on_bad_frame(node, error, now)
            return
        self.watch.enter(Phase.DECIDE)
        self._on_message(node, message, now)

    def _on_bad_frame(self, node: Node, error: RemoteProtocolError, now: float) -> None:
        node.num_bad_frames += 1
        logger.warning("dropped a frame of the %s: %s", node.role, error)
        if node.num_bad_frames > MAX_BAD_FRAMES:
            line = f"the {node.role} keeps sending garbled frames; the last: {error}"
            self._failed(node, line, now)

    def _on_message(self, node: Node, message: Message, now: float) -> None:
        match message:
            case Verdict() if node.role is Role.TARGET:
                self._step(s.VerdictArrived(message), now, message.session)
            case PromptLogprobs() if node.role is Role.TARGET:
                self._step(s.PromptScored(message), now, message.session)
            case Heartbeat():
                node.state = message.state
                node.marks = message.marks
                node.times_us = message.times_us
                node.num_uncaptured = message.num_uncaptured
                if message.progress != node.progress and node.role is Role.TARGET:
                    self._step(s.Progressed(), now)
                node.progress = message.progress
            case Hello():
                self._on_hello(node, message, now)
            case Fault(code=FaultCode.FAILED | FaultCode.UNUSABLE as code):
                line = f"the {node.role} failed: {message.detail}"
                self._failed(node, line, now, is_unusable=code is FaultCode.UNUSABLE)
            case Fault():
                self._step(s.FaultArrived(node.role, message), now, message.session)
            case _:
                logger.warning("ignored a %s from the %s", type(message).__name__, node.role)

    def _on_hello(self, node: Node, hello: Hello, now: float) -> None:
        source = MODEL_SOURCE if node.role is Role.DRAFTER else NGRAM_SOURCE
        answer = self.registry.greet(node, hello, source)
        self._send(node.role, answer)
        if isinstance(answer, Fault):
            raise IncompatibleError(answer.detail)
        self._step(s.NodeJoined(node.role), now)

    def _on_timer(self, now: float) -> None:
        for obituary in self._launcher.ended():
            node = self.registry.of(obituary.role)
            assert node is not None
            if node.health is not Health.GONE:  # else it has said itself why it ends
                is_unusable = obituary.status == EXIT_UNUSABLE
                self._failed(node, obituary.line, now, is_unusable=is_unusable)
        for node in self.registry.newly_silent(now):
            if node.role is Role.TARGET:
                silence = node.detector.silence_s(now)
                raise NodeError(f"the target has been silent for {silence:.0f} s; is it stopped?")
            self._lost(node, now)
        self._step(s.Tick(), now)

    def _failed(self, node: Node, line: str, now: float, *, is_unusable: bool = False) -> None:
        """A node is gone: the end of everything, or of the drafts.

        is_unusable  as it was configured it cannot work: from the start, an error of the user
        """
        was_ready = node.health is not Health.EXPECTED
        self.registry.gone(node)
        del self._identities[node.role]
        if node.role is Role.DRAFTER and (was_ready or not is_unusable):
            logger.warning("%s; going on without drafts", line)
            self._lost(node, now)
            return
        made = self._active.machine.num_generated if self._active is not None else 0
        raise NodeError(f"{line} (after {made} tokens)" if was_ready else line)

    def _lost(self, node: Node, now: float) -> None:
        self._step(s.NodeLost(node.role), now)

    # -- one text after another -------------------------------------------------------------------

    def _on_command(self, command: Running | Ending) -> None:
        if isinstance(command, Running):
            self._waiting.append(command)
            return
        texts = [self._active, *self._waiting]
        for running in texts:
            if running is None or running.machine.session != command.session:
                continue
            with self._alone(running):
                self._close(running, "stop" if command.is_complete else "cancelled")
                result = running.result(FinishReason.STOP) if command.is_complete else None
                self._end(running, result or ClosedError("the text was cancelled"))

    def _close(self, running: Running, reason: str) -> None:
        """Tell the nodes to forget a text."""
        for action in running.machine.close(reason):
            self._perform(running, action, 0.0)

    def _serve_next(self, now: float) -> None:
        """Begin with the text that has waited longest, if the nodes are free."""
        if self._active is not None or not self._waiting:
            return
        self._active = self._waiting.popleft()
        self._active.started = now
        self._step(s.Started(), now)
        for role in (Role.TARGET, Role.DRAFTER):
            if self.registry.ready(role) is not None:
                self._step(s.NodeJoined(role), now)
            elif self.registry.of(role) is not None:
                self._step(s.NodeLost(role), now)

    def _end(self, running: Running, last: Result | SlipstreamError) -> None:
        if running is self._active:
            self._active = None
        else:
            self._waiting.remove(running)
        with self._lock:
            self._num_open -= 1
        running.stream.put(last)

    # -- doing what the machines say --------------------------------------------------------------

    def _step(self, event: s.Event, now: float, session: int | None = None) -> None:
        """Tell the active text, or only if it is `session`: what comes late means nothing."""
        running = self._active
        if running is None or session not in (None, running.machine.session):
            return
        with self._alone(running):
            for action in running.machine.handle(event, now):
                self._perform(running, action, now)

    @contextmanager
    def _alone(self, running: Running) -> Iterator[None]:
        """What goes wrong inside ends this text and no other."""
        try:
            yield
        except MISHAPS as error:
            self._close(running, "failed")
            if running is self._active or running in self._waiting:
                self._end(running, running.broken_off(error))

    def _perform(self, running: Running, action: s.Action, now: float) -> None:
        match action:
            case s.Send(role, message):
                self._send(role, message)
            case s.Emit():
                running.emitted.append((now, len(action.tokens)))
                running.stream.put(action)
            case s.EmitPrompt():
                running.stream.put(action)
            case s.Finish(reason):
                self._end(running, running.result(reason))
            case s.Fail(detail):
                self._end(running, NodeError(detail))

    def _beat(self) -> None:
        marks = () if self._active is None else (self._active.machine.mark,)
        for role in tuple(self._identities):
            if self.registry.ready(role) is not None:
                self._send(role, Heartbeat(marks, 0, ""))

    def _send(self, role: Role, message: Message) -> None:
        self.watch.enter(Phase.SEND)
        self._send_frame(role, encode(message))
        self.watch.enter(Phase.DECIDE)

    def _send_frame(self, role: Role, frame: bytes) -> None:
        identity = self._identities.get(role)
        if identity is not None and not self._listener.send(identity, frame):
            self._num_dropped += 1
