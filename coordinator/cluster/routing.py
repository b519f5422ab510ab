"""Runs the queue of texts and decides which nodes work on which text (pure).

Theory of operation
-------------------
The router owns the submitted texts, their queue, and the nodes, which it knows by id. Each text is
a state machine of its own (`text/session.py`); an error in one ends that text alone.

    TextSubmitted     the oldest begin as soon as the target has room for them        -> Send(Open)
    Arrived(Hello)    a node that fits is welcomed and offered the open texts         -> Send
    Arrived, Tick     the actions of the text's state machine         -> Send, Deliver, End
    node lost         its texts go on without it, or with another (`deaths.py`)  -> Warn | Abort
    Arrived(Hello)    a node by hand that does not fit; texts go on    -> Send(Fault), Warn

Frames of drafts and verdicts are passed on before they are decoded: `forward` returns the
receivers. A draft goes to the target of its text, hidden states (`Features`) go to those of its
drafters that are heads, and neither is decoded here, but for the drafts of texts whose readers want
to know when the drafter computed (`watches`). A verdict (the result of a pass) goes to the
drafters of its text; only then is it decoded and given to the session.

For each target that is ready at most max_num_seqs texts are open, and at most as many as it has
lanes (a lane is the part of the cache for one text); the others wait in the order in which they
came. A node works on as many texts as it has lanes. When a text ends, the node gets open texts that
it had no room for, the oldest first. Where a target is lost, or replaced by one with fewer lanes,
the youngest texts stay open without a target until it is their turn.

A text has one target: of those with a free lane, the one with the fewest texts. Another one goes on
with it only if that is lost (`moves.py`), and then ignores what the lost one still sends of it. A
drafter drafts for the texts of all targets. Under coupled verification all drafters draft for a
text. Under the classical rules (rejection sampling) only one does: choosing between the drafts of
two would bias the text. If that drafter is lost, another one, or the same one when it comes back,
takes over and keeps the text. While an open text has drafts of a drafter, another one gets its
source number only if no other is left (`Registry.free_source`).
"""

from collections import Counter, deque

from coordinator.cluster.conduct import MOST_DRAFTS, Answer, Refusals
from coordinator.cluster.deaths import Deaths
from coordinator.cluster.fitting import UNREADABLE
from coordinator.cluster.moves import STRANDED, Home, Moves
from coordinator.cluster.node import Health, Node, on_host
from coordinator.cluster.open_text import (
    NOBODY,
    SessionNodes,
    breach_in,
    check,
    floods_in,
    marks_for,
    num_free,
    sender_of,
    sessions_of,
    stranded,
    works_on,
)
from coordinator.cluster.registry import NOBODY_DRAFTS, Registry
from coordinator.cluster.router_events import (
    PASSED_ON,
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
from coordinator.text import session_events as s
from coordinator.text.timed_session import MISHAPS, Result, TimedSession
from proto.codec import encode, head_of, session_of
from proto.errors import (
    ClosedError,
    IncompatibleError,
    NodeError,
    OutsideError,
    SlipstreamError,
    TextError,
)
from proto.liveness import HEARTBEAT_INTERVAL_S, MAX_BAD_FRAMES
from proto.messages import (
    BROKEN_OFF,
    Draft,
    Fault,
    FaultCode,
    Features,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    PromptLogprobs,
    Role,
    Verdict,
    Welcome,
)
from proto.node_config import READY_BUT

# -- routing ---------------------------------------------------------------------------------------


class Router:
    """The texts and nodes of one coordinator: a state machine from events to actions.

    max_num_seqs   most texts that are open at once for each target, if it has room for as many
    awaits_target  if no target is left, texts wait for another one; else the coordinator ends
    keeps_bits     no text goes on at a target that may compute other bits than its own
    """

    def __init__(
        self,
        secret: str,
        *,
        max_num_seqs: int = 1,
        awaits_target: bool = False,
        keeps_bits: bool = False,
    ) -> None:
        self.registry = Registry(secret)
        self.mishap: Exception | None = None  # the latest error inside a text's state machine
        # Processes by hand that took the place of another one, by role. Restarts by this
        # coordinator are counted in the service's tally.
        self.successors: Counter[Role] = Counter()
        self._deaths = Deaths(awaits_target=awaits_target)
        self._refusals = Refusals()
        self._max_num_seqs = max_num_seqs
        self._keeps_bits = keeps_bits
        self._moves = Moves()
        self._open: dict[int, SessionNodes] = {}  # by session, oldest first
        self._waiting: deque[TimedSession] = deque()  # submitted, oldest first
        self._watched: set[int] = set()  # open texts whose drafts are decoded here as well
        self._next_beat = 0.0
        self._actions: list[Action] = []  # actions for the event that is handled now

    def forward(
        self, node_id: s.NodeId, kind: type[Message], frame: bytes, now: float
    ) -> tuple[s.NodeId, ...] | None:
        """Return the nodes to which this frame is passed on, undecoded; None: it is dropped.

        A verdict is passed on to nobody while the text's drafters rest (`text/rest.py`).

        Drafts and features are not decoded in time, so their sender is noted as alive in this call.

        Raises RemoteProtocolError, and OutsideError if its first fields are not its sender's.
        """
        if kind not in PASSED_ON:
            return NOBODY
        session, incarnation, source = head_of(frame, 3)
        text = self._open.get(session)
        if text is None or node_id not in (text.drafters if kind is Draft else text.targets):
            return NOBODY
        if kind in UNREAD:
            self.registry.lives(node_id, now)
        if why := text.breach_of_life(node_id, incarnation):
            raise OutsideError(f"{kind.__name__} with {why}")
        if kind is Features:
            return self.registry.readers(text.drafters)
        if kind is Verdict:
            return NOBODY if text.timed.machine.holds_back else text.drafters
        if not self.registry.is_source(node_id, source):
            raise OutsideError(f"Draft with source {source}, which is not its own")
        return text.targets if text.flow.passes(node_id, frame) else None

    def watches(self, kind: type[Message], frame: bytes) -> bool:
        """True for a draft of a watched text, which is decoded after it was passed on."""
        return bool(self._watched) and kind is Draft and session_of(frame) in self._watched

    def handle(self, event: Event, now: float) -> list[Action]:
        """Update the state by one event; return the actions to do (`now` in seconds)."""
        self._actions = []
        num_open = len(self._open)
        match event:
            case Arrived(node_id, Hello() as hello):
                node = self.registry.take_place(node_id, hello.role, now)
                if node is not None and node.may_say(hello):
                    self._on_hello(node, hello, now)
                elif node is not None:
                    self._on_outside(node, 0, "a second Hello, which differs from its first", now)
            case Arrived(node_id, message):
                self._on_arrived(node_id, message, now)
            case Garbled():
                self._on_garbled(event, now)
            case Outside(node_id, session, reason):
                if (node := self.registry.find(node_id)) is not None:
                    self._on_outside(node, session, reason, now)
            case Tick():
                self._on_tick(now)
            case NodeEnded():
                self._on_ended(event, now)
            case TextSubmitted(timed):
                self._waiting.append(timed)
            case TextLeft():
                self._on_left(event)
        if len(self._open) < num_open:
            self._give_free_lanes(now)
        while self._waiting and len(self._open) < self._room:
            self._begin(self._waiting.popleft(), now)
        self._actions += map(Warn, self._moves.told())
        return self._actions

    @property
    def _room(self) -> int:
        """Return how many texts may be open now."""
        ready = self.registry.ready(Role.TARGET)
        return sum(min(self._max_num_seqs, target.num_lanes) for target in ready)

    @property
    def sessions(self) -> tuple[int, ...]:
        """Return the session numbers of the open texts, oldest first."""
        return tuple(self._open)

    @property
    def open_texts(self) -> tuple[SessionNodes, ...]:
        """Return the open texts with their nodes, oldest first."""
        return tuple(self._open.values())

    @property
    def num_queued(self) -> int:
        """Return how many texts wait to be opened."""
        return len(self._waiting)

    @property
    def queued(self) -> tuple[int, ...]:
        """Return the session numbers of the texts that wait, oldest first."""
        return tuple(timed.machine.session for timed in self._waiting)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        texts = self._open.values()
        assert len(texts) <= self._max_num_seqs * len(self.registry.of_role(Role.TARGET))
        assert self._watched <= self._open.keys()
        assert len(texts) >= self._room or not self._waiting, "a text waits for nothing"
        check(self._open, self.registry.nodes)

    # -- what nodes say ---------------------------------------------------------------------------

    def _on_arrived(self, node_id: s.NodeId, message: Message, now: float) -> None:
        """Handle any message but a Hello; ignored if its node is unknown or gone."""
        node = self.registry.find(node_id)
        if node is None:
            return
        if isinstance(message, Heartbeat) and self.registry.is_of_newcomer(node, message):
            return
        self._heard(node, now)
        if reason := breach_in(self._open, node, message, now):
            self._on_outside(node, getattr(message, "session", 0), reason, now)
        else:
            self._on_message(node, message, now)

    def _on_outside(self, node: Node, session: int, reason: str, now: float) -> None:
        """Count a message that is dropped, and tell its sender; cut off a drafter that goes on."""
        node.num_bad_frames += 1
        answer = node.conduct.broke(now)
        if answer is Answer.TELL:
            self._do(Warn(f"dropped a message of {self.registry.title(node)}: {reason}"))
            self._do(Send(node.id, encode(Fault(session, 0, FaultCode.OUTSIDE, reason))))
        elif answer is Answer.ENOUGH and node.role is Role.DRAFTER:
            line = f"keeps sending messages outside of their texts; the last: {reason}"
            self._cut_off(node, line, now)

    def _on_complaint(self, node: Node, fault: Fault, now: float) -> None:
        """Handle that a node has dropped a message that was passed on to it."""
        sender = self.registry.find(sender_of(self._open, fault))
        if sender is not None and sender.role is not node.role:
            words = f"{fault.detail} (found by {self.registry.title(node)})"
            self._on_outside(sender, fault.session, words, now)

    def _cut_off(self, drafter: Node, line: str, now: float) -> None:
        """Send away a drafter that breaks the protocol without end."""
        self._do(Send(drafter.id, encode(Fault(0, 0, FaultCode.REFUSED, f"it {line}"))))
        words = f"{self.registry.title(drafter)} {line}"
        self._failed(drafter, NodeEnded(drafter.id, words), now)

    def _heard(self, node: Node, now: float) -> None:
        """Note a node's message; if the node had been silent, give it its texts again."""
        if self.registry.heard(node, now):
            self._do(Warn(f"{self.registry.title(node)} is there again"))
            self._joined(node, now)

    def _on_message(self, node: Node, message: Message, now: float) -> None:
        # Of a target that was silent, and whose text another one writes, verdicts may still come.
        is_at_work = works_on(self._open, getattr(message, "session", 0), node)
        match message:
            case Verdict() if is_at_work:
                self._step(message.session, s.VerdictArrived(message), now)
            case Draft() if is_at_work:
                self._step(message.session, s.DraftArrived(message), now)
            case PromptLogprobs() if is_at_work:
                self._step(message.session, s.PromptScored(message), now)
            case Heartbeat():
                self._on_heartbeat(node, message, now)
            case Fault(session=0, code=FaultCode.FAILED | FaultCode.UNUSABLE as code):
                line = f"{self.registry.title(node)} failed: {message.detail}"
                is_unusable = code is FaultCode.UNUSABLE
                self._failed(node, NodeEnded(node.id, line, is_unusable), now)
            case Fault(code=FaultCode.OUTSIDE):
                self._on_complaint(node, message, now)
            case Fault():
                self._step(message.session, s.FaultArrived(node.id, message), now)

    def _on_heartbeat(self, node: Node, beat: Heartbeat, now: float) -> None:
        has_worked = beat.progress != node.progress
        if beat.state != node.state and beat.state.startswith(READY_BUT):
            self._do(Warn(f"{self.registry.title(node)}: {beat.state.removeprefix(READY_BUT)}"))
        if self.registry.beaten(node, beat, now):
            words = node.round_trips.words
            title = self.registry.title(node)
            self._do(Warn(f"a message to {title} and back takes longer: {words}"))
        if (trip_s := node.round_trips.now_s) is not None:
            self._step_each(node, s.RoundTripMeasured(node.id, trip_s), now)
        if node.role is Role.TARGET:
            self._on_work(node, beat, now, has_worked=has_worked)

    def _on_work(self, node: Node, beat: Heartbeat, now: float, *, has_worked: bool) -> None:
        """Tell a target's texts whether it works, and how far it has read each of them."""
        if node.under_way.is_overdue and not has_worked:
            self._step_each(node, s.Overran(node.under_way.words), now)
        elif has_worked or node.under_way.num_rows:
            read = {mark.session: mark.num_read for mark in beat.marks}
            for session in sessions_of(self._open, node):
                self._step(session, s.Progressed(read.get(session, 0)), now)

    def _on_hello(self, node: Node, hello: Hello, now: float) -> None:
        known = (source for text in self._open.values() for source in text.sources)
        source = self.registry.free_source(node, known)
        line, is_successor = self.registry.word_of(node, hello), node.is_replaced_by(hello)
        answer: Welcome | Fault
        if source is None:
            reason = f"there is no source number left for one more {node.role}"
            answer = Fault(0, 0, FaultCode.REFUSED, reason)
        else:
            answer = self.registry.greet(node, hello, source)
        self._do(Send(node.id, encode(answer)))
        if isinstance(answer, Fault):
            self._refused(node, answer.detail, now, is_lasting=source is not None, host=hello.host)
            return
        self._refusals.accepted(node.id)
        self.successors[node.role] += is_successor and node.is_by_hand
        self.registry.joined(node, now)
        if line:
            self._do(Warn(line))
        if node.is_by_hand and node.role is Role.TARGET:
            for drafter, reason in self.registry.misfits(node):
                self._turn_out(drafter, reason, now)
        self._joined(node, now)

    def _refused(
        self, node: Node, reason: str, now: float, *, is_lasting: bool = True, host: str = ""
    ) -> None:
        """Handle that a node was told that it does not fit.

        If a user started it by hand, only that node ends: a drafter is no longer waited for; for a
        target, another one is. A node that already has this name is not affected.
        """
        if node.is_by_hand:
            if node.role is Role.DRAFTER:
                node.is_awaited = False
            self._say_refused(node, reason, host)
        elif not is_lasting or node.is_again:
            self._failed(node, NodeEnded(node.id, reason), now)
        else:
            self._do(Abort(IncompatibleError(reason)))

    def _say_refused(self, node: Node, reason: str, host: str) -> None:
        """Warn people of a refusal, once per reason (old releases try again and again)."""
        if self._refusals.is_news(node.id, reason):
            others = "waiting for another" if node.role is Role.TARGET else "going on without it"
            name = f"{self.registry.title(node)}{on_host(host)}"
            self._do(Warn(f"refused {name}: {reason}; {others}"))

    def _turn_out(self, drafter: Node, reason: str, now: float) -> None:
        """Send away a drafter, started by hand, that does not fit the new target."""
        self._do(Send(drafter.id, encode(Fault(0, 0, FaultCode.REFUSED, reason))))
        self._say_refused(drafter, reason, drafter.hello.host if drafter.hello is not None else "")
        self.registry.gone(drafter)
        self._lost(drafter, now)

    def _on_garbled(self, event: Garbled, now: float) -> None:
        """Refuse a Hello that cannot be decoded; warn of other frames and count them.

        Such a Hello of a node started by hand is perhaps of another release, so it is answered;
        other frames of nodes that were not accepted are ignored. A node that sends too many garbled
        frames has failed.
        """
        node = self.registry.find(event.node)
        if event.is_hello and (place := self.registry.take_named(event.node, now)) is not None:
            place.has_rival = True
            self._do(Send(place.id, encode(Fault(0, 0, FaultCode.REFUSED, UNREADABLE))))
            self._refused(place, UNREADABLE, now)
            return
        if node is None or node.has_rival or (node.is_by_hand and node.hello is None):
            return
        self._heard(node, now)
        node.num_bad_frames += 1
        node.num_garbled += 1
        self._do(Warn(f"dropped a frame of {self.registry.title(node)}: {event.reason}"))
        if node.num_garbled > MAX_BAD_FRAMES:
            title = self.registry.title(node)
            line = f"{title} keeps sending garbled frames; the last: {event.reason}"
            self._failed(node, NodeEnded(node.id, line), now)

    # -- nodes come and go ------------------------------------------------------------------------

    def _joined(self, node: Node, now: float) -> None:
        """Offer all open texts to a node that is ready, or is back."""
        self._lost(node, now, but=node.num_lanes)  # the process before it may have had more
        for session in self.sessions:
            self._offer(session, node, now)

    def _offer(self, session: int, node: Node, now: float) -> None:
        """Let a node work on a text if the text can use it and it has a free lane."""
        text = self._open.get(session)
        if text is None:
            return
        workers = text.workers(node.role)
        if node.id not in workers:
            if not text.wants(node) or num_free(self._open, node) <= 0:
                return
            text.set_workers(node.role, (*workers, node.id))
        if node.role is Role.DRAFTER:
            text.sources.add(node.source)
        else:
            self._moves.note(text.home, node)
            text.home = Home.of(node)
        self._step(session, s.NodeJoined(node.id, node.role, node.layers), now)

    def _give_free_lanes(self, now: float) -> None:
        """After a text has ended, give its lanes to other open texts, the oldest first."""
        for session in self.sessions:
            for role in (Role.TARGET, Role.DRAFTER):
                self._offer_to_all(session, role, now)

    def _lost(self, node: Node, now: float, *, but: int = 0) -> None:
        """Take a node's texts from it, but for so many of the oldest; offer them to other nodes."""
        for session in sessions_of(self._open, node)[but:]:
            if (text := self._open.get(session)) is not None:
                left = tuple(one for one in text.workers(node.role) if one != node.id)
                text.set_workers(node.role, left)
                self._step(session, s.NodeLost(node.id, node.role), now)
                self._offer_to_all(session, node.role, now)
                if node.role is Role.TARGET and not text.targets and self.registry.others(node):
                    self._moves.waits(node, is_bound=text.is_bound)

    def _offer_to_all(self, session: int, role: Role, now: float) -> None:
        """Offer a text to every ready node of this role that does not work on it yet.

        Those with the fewest texts are asked first, as a text has a single target.
        """
        if (text := self._open.get(session)) is not None:
            wanted = [node for node in self.registry.ready(role) if text.wants(node)]
            for node in sorted(wanted, key=lambda one: len(sessions_of(self._open, one))):
                self._offer(session, node, now)

    def _on_ended(self, end: NodeEnded, now: float) -> None:
        """Handle the end of a process; a node that is gone has reported its failure itself."""
        node = self.registry.ended(end.node)
        if node is not None and node.health is not Health.GONE:
            self._failed(node, end, now)
        elif node is not None and end.is_last and self.registry.lacks_target(node):
            self._do(Abort(NodeError(node.failure or end.line)))
        if node is not None and end.is_last and node.role is Role.TARGET:
            for text in stranded(self._open, self.registry.others(node)):
                self._close(text.timed, BROKEN_OFF)
                self._end(text.timed, NodeError(f"{node.failure or end.line}; {STRANDED}"))

    def _failed(self, node: Node, end: NodeEnded, now: float) -> None:
        """Handle that a node has ended, as `deaths.py` says."""
        written = sum(text.timed.machine.num_generated for text in self._open.values())
        answer = self._deaths.of(node, end, self.registry.others(node), written)
        node.failure = node.failure or end.line
        self.registry.gone(node, now)
        if answer is not None:
            self._do(answer)
        if not isinstance(answer, Abort):
            self._lost(node, now)

    def _on_tick(self, now: float) -> None:
        for node in self.registry.newly_silent(now):
            silence_s = node.detector.silence_s(now)
            line = f"{self.registry.title(node)} has been silent for {silence_s:.0f} s"
            answer = self._deaths.of_silence(node, line, self.registry.others(node))
            self._do(answer)
            if isinstance(answer, Abort):
                return
            self._lost(node, now)
            node.failure = line
            if node.role is Role.TARGET and not node.is_by_hand:
                self._do(Kill(node.id))  # a process that wakes again would be one too many
        for node in self.registry.stuck(now):
            self._do(Warn(f"{self.registry.title(node)} does not answer; its process is killed"))
            self._do(Kill(node.id))
        if self.registry.stop_awaiting_absent(now) and not self.registry.ready(Role.DRAFTER):
            self._do(Warn(NOBODY_DRAFTS))
        for session in self.sessions:
            self._step(session, s.Tick(), now)
        for drafter in filter(None, map(self.registry.find, floods_in(self._open))):
            self._cut_off(drafter, f"sends more than {MOST_DRAFTS} drafts at once", now)
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_INTERVAL_S
            for text in self._open.values():
                text.flow.eased()
            self._beat(round(now * 1e6))

    def _beat(self, stamp_us: int) -> None:
        """Send every node a heartbeat that lists its open texts, so that it closes others."""
        for role in Role:
            for node in self.registry.ready(role):
                beat = Heartbeat(marks_for(self._open, node), 0, "", stamp_us=stamp_us)
                self._do(Send(node.id, encode(beat)))

    # -- texts come and go ------------------------------------------------------------------------

    def _begin(self, timed: TimedSession, now: float) -> None:
        """Open a text on the nodes that are there."""
        session = timed.machine.session
        timed.started = now
        self._open[session] = SessionNodes(timed, is_bound=self._keeps_bits)
        if timed.machine.is_watched:
            self._watched.add(session)
        drafters = [one for one in self.registry.ready(Role.DRAFTER) if num_free(self._open, one)]
        layers = next((one.layers for one in drafters if one.layers), ())
        self._step(session, s.Started(layers, self.registry.num_ids), now)
        for role in (Role.TARGET, Role.DRAFTER):
            self._offer_to_all(session, role, now)
        absent = self.registry.of(Role.DRAFTER)
        if absent is not None and not self.registry.ready(Role.DRAFTER):
            self._step(session, s.NodeLost(absent.id, Role.DRAFTER), now)

    def _on_left(self, event: TextLeft) -> None:
        """End a text that its reader has left, if it has not ended yet."""
        text = self._open.get(event.session)
        waiting = (one for one in self._waiting if one.machine.session == event.session)
        timed = text.timed if text is not None else next(waiting, None)
        if timed is None:
            return
        try:
            self._close(timed, "stop" if event.is_complete else "cancelled")
            result = timed.result(FinishReason.STOP) if event.is_complete else None
        except MISHAPS as error:
            self._break_off(timed, error)
        else:
            self._end(timed, result or ClosedError("the text was cancelled"))

    def _end(self, timed: TimedSession, last: Result | SlipstreamError) -> None:
        session = timed.machine.session
        self._watched.discard(session)
        if self._open.pop(session, None) is None:
            self._waiting.remove(timed)
        self._do(End(session, last))

    def _close(self, timed: TimedSession, reason: str) -> None:
        """Tell a text's nodes to forget it."""
        for action in timed.machine.close(reason):
            self._perform(timed, action, 0.0)

    def _break_off(self, timed: TimedSession, error: Exception) -> None:
        """End a text whose state machine has raised an error; the other texts go on."""
        self.mishap = error
        self._close(timed, BROKEN_OFF)
        if timed.machine.session in self._open or timed in self._waiting:
            self._end(timed, timed.broken_off(error))

    # -- doing what the machines say --------------------------------------------------------------

    def _step(self, session: int, event: s.Event, now: float) -> None:
        """Give an event to an open text's state machine and do the actions it returns."""
        if (text := self._open.get(session)) is None:
            return
        timed = text.timed
        try:
            for action in timed.machine.handle(event, now):
                self._perform(timed, action, now)
        except MISHAPS as error:
            self._break_off(timed, error)

    def _step_each(self, node: Node, event: s.Event, now: float) -> None:
        for session in sessions_of(self._open, node):
            self._step(session, event, now)

    def _perform(self, timed: TimedSession, action: s.Action, now: float) -> None:
        session = timed.machine.session
        match action:
            case s.Send(node_id, message):
                self._do(Send(node_id, encode(message)))
            case s.Emit():
                timed.emitted.append((now, len(action.tokens)))
                self._do(Deliver(session, action))
            case s.EmitPrompt() | s.EmitRead():
                self._do(Deliver(session, action))
            case s.Finish(reason):
                self._end(timed, timed.result(reason))
            case s.Fail(detail):
                self._end(timed, TextError(detail))

    def _do(self, action: Action) -> None:
        self._actions.append(action)
