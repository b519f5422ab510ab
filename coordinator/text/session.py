"""Owns the committed tokens of one text from prompt to end (pure).

Theory of operation
-------------------
The list of committed tokens is the only state that matters. Everything a node holds is derived from
it and can be made again, so there is one repair for everything - a first start, a restarted node, a
lost message, a contradiction, a pass that never ends: `Open(committed tokens)` with a new
incarnation (a number that grows with every Open, so that an older Open is ignored, and a node's
complaint about one, too).

    Started                 open the text on the nodes that are there
    VerdictArrived          append what is new; find the end of the text           -> Emit, Finish
    DraftArrived            of a watched text: note when the drafter computed
    FaultArrived(gap)       a node's copy of the text differs from ours            -> Open
    FaultArrived(failed)    the target cannot go on with this text                 -> Fail
    NodeJoined / NodeLost   open it there / go on without it (drafter) or wait (target)
    NodeJoined (a head)     the target must send hidden states of other layers     -> Open
    Progressed              the target works: however long a pass takes, it is waited for
    Overran                 its pass may never end: it is no longer waited for
    Tick                    no verdict has come for too long, and no pass is under way -> Open

Coupled verification makes the target a function of prefix and seed, so any verdict is right,
whichever process computed it and whenever. Its base may be any committed position; where its tokens
overlap the committed ones they must be equal. Under the classical rules (rejection sampling)
verdicts of two target processes on one base are two samples, and taking the one that comes first
would bias the text. So only verdicts of the present target process count. That process never
samples twice for one position: after a new Open it repeats what it has sent.
"""

from dataclasses import dataclass, replace

from coordinator.text.metrics import PassFigures, SessionCounts
from coordinator.text.rest import Rest
from coordinator.text.session_events import (
    Action,
    DraftArrived,
    Emit,
    EmitPrompt,
    EmitRead,
    Event,
    Fail,
    FaultArrived,
    Finish,
    NodeId,
    NodeJoined,
    NodeLost,
    Overran,
    Progressed,
    PromptScored,
    RoundTripMeasured,
    Send,
    Started,
    Tick,
    VerdictArrived,
)
from coordinator.text.watching import Watch
from proto.errors import printable
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    ANY_ID,
    ATTEMPT_BITS,
    BROKEN_OFF,
    OFF,
    Close,
    Fault,
    FaultCode,
    Limits,
    Logprobs,
    Lookup,
    Open,
    Policy,
    PromptLogprobs,
    Role,
    Rule,
    SamplingSpec,
    SessionMark,
    Verdict,
)
from proto.terms import Terms
from proto.tree import CommittedText, Diverged

# -- prompt logprobs -------------------------------------------------------------------------------

# The logprobs of a prompt, assembled from the pieces that the target's prefill sends.


class PromptScores:
    """Collects the logprobs of a prompt's tokens from the second on, row by row."""

    def __init__(self, num_prompt: int) -> None:
        self._num_wanted = num_prompt - 1
        self._pieces: list[Logprobs] = []  # in the order of positions and without a gap
        self._num_rows = 0  # rows of all pieces; <= _num_wanted

    @property
    def is_complete(self) -> bool:
        """True if the row of every position has come."""
        return self._num_rows == self._num_wanted

    def add(self, message: PromptLogprobs) -> bool:
        """Add the rows that follow those we have; return True if there were any."""
        num_known = 1 + self._num_rows - message.start
        end = max(0, self._num_wanted + 1 - message.start)
        piece = message.logprobs.part(max(0, num_known), end)
        if num_known < 0 or not piece or (self._pieces and piece.width != self._pieces[0].width):
            return False
        self._pieces.append(piece)
        self._num_rows += len(piece)
        return True

    def all(self) -> Logprobs:
        """Return the rows that have come, in the order of positions."""
        return Logprobs(
            tuple(i for piece in self._pieces for i in piece.ids),
            tuple(value for piece in self._pieces for value in piece.values),
            tuple(rank for piece in self._pieces for rank in piece.ranks),
        )


# -- session ---------------------------------------------------------------------------------------

# How long a text waits for its target's next message while no pass is under way there: ten passes,
# because a target may wait for drafts, but within these limits.
WORK_LIMIT_S_MIN, WORK_LIMIT_S_MAX = 2.0, 10.0
# An Open counts as lost if, after a time limit, the node still sends messages of an older
# incarnation. The limit is ANSWER_TRIPS round trips and some more, at most ANSWER_LIMIT_S, which is
# also the limit where no round trip is known.
ANSWER_LIMIT_S = 2 * HEARTBEAT_INTERVAL_S
ANSWER_TRIPS, ANSWER_MORE_S = 1.5, 0.03
NUM_QUICK_REOPENS, MOST_DOUBLINGS = 3, 10  # after the quick ones each reopening waits twice as long
QUICK_S = 1.0  # a drafter gets so many quick ones in this time
WORK_LIMIT_PASSES = 10.0
# A text fails only after both limits: where most messages are lost, twenty Opens are soon sent.
MAX_REOPENS_WITHOUT_PROGRESS, GIVE_UP_S = 20, 30.0


@dataclass(frozen=True, slots=True)
class _Told:
    """The latest Open that was sent to a node that is there."""

    role: Role
    incarnation: int
    at: float


class Session:
    """The state machine of one text: its committed tokens, and what each node was told of them."""

    def __init__(
        self,
        session: int,
        key: bytes,
        prompt: tuple[int, ...],
        *,
        sampling: SamplingSpec,
        policy: Policy,
        limits: Limits,
        rule: Rule = Rule.COUPLED,
        lookup: Lookup | None = None,
        is_watched: bool = False,
        written: tuple[int, ...] = (),
    ) -> None:
        """Begin with the prompt, and with tokens of the answer that were `written` elsewhere."""
        assert prompt
        assert len(prompt) + len(written) < limits.max_len
        self.session = session
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.policy = policy
        self.limits = limits
        self.lookup = lookup
        # With greedy decoding one token is right at each position: every rule is a comparison.
        self.rule = Rule.COUPLED if sampling.is_greedy else rule
        self.text = CommittedText(key, prompt + written)
        self.counts = SessionCounts()
        self._watch = Watch(len(self.text)) if is_watched else None
        self._rest = Rest()  # of its drafters
        # None: no prompt logprobs are wanted.
        self._prompt_scores = PromptScores(len(prompt)) if sampling.scores_prompt else None
        self.drafter_lost_at: int | None = None  # generated tokens when the drafter was lost
        self.ended = False
        self._layers: tuple[int, ...] = ()  # layers of the target whose hidden states it sends
        self._has_begun = False  # a target has been told the text
        self._incarnation = 0  # of the latest Open to any node; only grows
        self._lives: dict[int, NodeId] = {}  # which node each incarnation was told to
        self._num_ids = ANY_ID  # number of the target's logits
        self._attempt = 0  # the latest attempt that is known; always 0 for coupled texts
        self._target_since = 0  # incarnation of the first Open to the target that is there
        self._told: dict[NodeId, _Told] = {}  # by node that is there; at most one target
        self._round_trips: dict[NodeId, float] = {}  # seconds, by node; only those that are known
        self._reopens = 0  # repeated Opens to the target since the text last grew
        self._stuck_since = 0.0  # when the first of these was sent
        # By drafter: since when its quick reopenings are counted, and how many there were.
        self._quick: dict[NodeId, tuple[float, int]] = {}
        self.num_read = 0  # tokens of the text that the target that is there has read, at most
        self._overrun = ""  # words about a pass of the target that takes too long; "": none does
        self._owed_since = 0.0  # since when we have waited for a sign of the target's work
        self._passed_at = 0.0  # when the last verdict came, or the text was opened
        self._forward_s = 0.0  # duration of the target's latest pass
        self._pass_s = 0.0  # running mean of the time between verdicts

    @property
    def num_generated(self) -> int:
        """Return the number of committed tokens after the prompt."""
        return len(self.text) - self.num_prompt

    @property
    def num_prompt_read(self) -> int:
        """Return how many tokens of the prompt the target has read."""
        return self.num_prompt if self.num_generated else min(self.num_read, self.num_prompt)

    @property
    def is_watched(self) -> bool:
        """True if the reader wants to know what both devices do (`Emit.spans`)."""
        return self._watch is not None

    def mark_for(self, node: NodeId) -> SessionMark:
        """Return a mark for a heartbeat: the text's length, hash and the node's incarnation.

        For a drafter that rests it is the text as that drafter should know it.
        """
        told = self._told.get(node)
        incarnation = 0 if told is None else told.incarnation
        known = len(self.text), self.text.root
        if told is not None and told.role is Role.DRAFTER and self._rest.known is not None:
            known = self._rest.known
        return SessionMark(self.session, incarnation, *known)

    @property
    def holds_back(self) -> bool:
        """True if the text's drafters rest, and are not told the next verdict as it comes."""
        return self._rest.known is not None

    def node_of(self, incarnation: int) -> NodeId | None:
        """Return the node to which the Open with this incarnation was sent; None: there was none.

        A message with another incarnation than one of its sender's is nobody's.
        """
        return self._lives.get(incarnation)

    @property
    def terms(self) -> Terms:
        """Return what messages about this text may say."""
        return Terms(
            self._num_ids,
            self.limits,
            self.num_prompt,
            self.policy,
            self.rule,
            self.sampling,
            newest=self._incarnation,
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Update the state by one event; return the actions to do (`now` in seconds)."""
        if self.ended:
            return []
        match event:
            case Started(layers, num_ids):
                self._owed_since = now
                self._num_ids = num_ids
                if self._watch is not None:
                    self._watch.begin(now)
                self._layers = layers if self.policy.has_drafter else ()
                return self._emit_prompt()
            case VerdictArrived(verdict):
                return self._on_verdict(verdict, now)
            case DraftArrived(draft):
                if self._watch is not None:
                    self._watch.drafted(draft, now)
                return []
            case PromptScored(message):
                return self._on_prompt_scored(message, now)
            case FaultArrived(node, fault):
                return self._on_fault(node, fault, now)
            case NodeJoined(node, role, layers):
                if role is Role.TARGET:
                    self._target_since, self.num_read = self._incarnation + 1, 0
                return [*self._ask_for_features(layers, now), *self._open(node, role, now)]
            case NodeLost(node, role):
                self._told.pop(node, None)
                self._quick.pop(node, None)
                self._round_trips.pop(node, None)
                if role is Role.DRAFTER and self.policy.has_drafter and not self._any(role):
                    self.drafter_lost_at = self.num_generated
                return []
            case Progressed(num_read):
                return self._on_progress(num_read, now)
            case Overran(words):
                self._overrun = words
                return []
            case RoundTripMeasured(node, seconds):
                self._round_trips[node] = seconds
                return []
            case Tick():
                return self._on_tick(now)
        raise AssertionError(f"unknown event {event}")

    def close(self, reason: str) -> list[Action]:
        """End the text, whatever its state; return a Close for each node that was told of it."""
        self.ended = True
        return [Send(node, Close(self.session, reason)) for node in self._told]

    def _any(self, role: Role) -> NodeId | None:
        """Return a node of this role that is there and was told the text; None if there is none."""
        return next((node for node, told in self._told.items() if told.role is role), None)

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, node: NodeId, role: Role, now: float) -> list[Action]:
        """Return actions that send a node the whole text with a new incarnation: the repair."""
        if role is Role.DRAFTER and not self.policy.has_drafter:
            return []
        self._incarnation += 1
        self._lives[self._incarnation] = node
        self._told[node] = _Told(role, self._incarnation, now)
        if role is Role.DRAFTER:
            self._rest.end()
        if role is Role.TARGET:
            self._owed_since = self._passed_at = now
            if self.rule is not Rule.COUPLED and self._has_begun:
                self._attempt = self._incarnation << ATTEMPT_BITS
            self._has_begun = True
        return [Send(node, self.opening(role))]

    def _ask_for_features(self, layers: tuple[int, ...], now: float) -> list[Action]:
        """Reopen the text on the target if a drafter reads other hidden states; return actions.

        Nothing was wrong with the target, so this does not count as a repair.
        """
        if not layers or layers == self._layers or not self.policy.has_drafter:
            return []
        self._layers = layers
        target = self._any(Role.TARGET)
        return [] if target is None else self._open(target, Role.TARGET, now)

    def opening(self, role: Role) -> Open:
        """Return the Open message with the text as it is now, for a node of this role.

        If this message is small enough at the start, all later ones are: only `tokens` grows, and
        it stays below max_len.
        """
        sampling = self.sampling
        if self._prompt_scores is not None and self._prompt_scores.is_complete:
            sampling = replace(sampling, num_prompt_logprobs=OFF)
        return Open(
            session=self.session,
            incarnation=self._incarnation,
            key=self.text.key,
            tokens=tuple(self.text.tokens),
            num_prompt=self.num_prompt,
            sampling=sampling,
            policy=self.policy,
            limits=self.limits,
            rule=self.rule,
            attempt=self._attempt,
            lookup=self.lookup if role is Role.TARGET else None,
            layers=self._layers if role is Role.TARGET else (),
            num_ids=self._num_ids,
        )

    def _reopen(self, node: NodeId, now: float) -> list[Action]:
        self.counts.num_reopened += 1
        if (role := self._told[node].role) is Role.TARGET:
            if not self._reopens:
                self._stuck_since = now
            self._reopens += 1
            is_long = now - self._stuck_since >= GIVE_UP_S
            if is_long and self._reopens > MAX_REOPENS_WITHOUT_PROGRESS:
                return self._end(Fail(self._why_given_up))
        return self._open(node, role, now)

    @property
    def _why_given_up(self) -> str:
        line = f"the target did not continue the text after {self.num_generated} tokens, "
        line += f"although it was told the text {self._reopens} times"
        if not self.num_generated and self.num_read:
            line += f"; of the prompt it has read {self.num_read:,} of {self.num_prompt:,} tokens"
        return f"{line}; {self._overrun}" if self._overrun else line

    def _on_fault(self, node: NodeId, fault: Fault, now: float) -> list[Action]:
        told = self._told.get(node)
        if fault.code is FaultCode.FAILED and told is not None and told.role is Role.TARGET:
            is_present = fault.incarnation == told.incarnation
            return self._end(Fail(printable(fault.detail))) if is_present else []
        if fault.code is not FaultCode.GAP:
            return []
        return self._repair(node, fault.incarnation, now)

    def _repair(self, node: NodeId | None, incarnation: int, now: float) -> list[Action]:
        """Reopen the text on a node in trouble, unless a newer Open is under way; return actions.

        If an Open with a newer incarnation was sent, it has answered the trouble already, unless so
        much time has passed that it must have been lost. A target that loses track at once after
        each Open is not told more often than that either: reopening slows down other texts. (A life
        is the time between two Opens.)
        """
        if node is None or node not in self._told:
            return []
        told = self._told[node]
        is_present = incarnation == told.incarnation and self._may_be_quick(node, told.role, now)
        if not is_present and now - told.at < self._answer_limit_s(node):
            return []
        return self._reopen(node, now)

    def _may_be_quick(self, node: NodeId, role: Role, now: float) -> bool:
        """True if a node that asks for the text gets it at once, however soon after the last Open.

        A drafter that asks again and again would otherwise make the coordinator and itself busy
        with the whole text; a target's openings are counted until the text grows.
        """
        if role is Role.TARGET:
            return self._reopens < NUM_QUICK_REOPENS
        since, number = self._quick.get(node, (now, 0))
        if now - since >= QUICK_S:
            since, number = now, 0
        self._quick[node] = since, number + 1
        return number < NUM_QUICK_REOPENS

    def _answer_limit_s(self, node: NodeId) -> float:
        """Return for how many seconds after an Open older messages may still come."""
        trip_s = self._round_trips.get(node)
        if trip_s is None:
            return ANSWER_LIMIT_S
        # A node reads the Open after the forward that it is in, and may start one more before that.
        limit_s = ANSWER_TRIPS * trip_s + 2 * self._forward_s + ANSWER_MORE_S
        if self._told[node].role is Role.TARGET:
            # After many Opens without success, the node may need more time than its link.
            limit_s *= 2 ** min(MOST_DOUBLINGS, max(0, self._reopens - NUM_QUICK_REOPENS))
        return min(ANSWER_LIMIT_S, limit_s)

    def _on_progress(self, num_read: int, now: float) -> list[Action]:
        """Wait on for a target that works; more of the text read means that no Open was in vain."""
        self._owed_since, self._overrun = now, ""
        if num_read <= self.num_read:
            return []
        self.num_read, self._reopens = num_read, 0
        return [EmitRead(num_read, self.num_prompt)] if num_read < self.num_prompt else []

    def _on_tick(self, now: float) -> list[Action]:
        limit = min(WORK_LIMIT_S_MAX, max(WORK_LIMIT_S_MIN, WORK_LIMIT_PASSES * self._pass_s))
        target = self._any(Role.TARGET)
        if target is None or now - self._owed_since <= limit:
            return []
        return self._reopen(target, now)

    # -- the text ---------------------------------------------------------------------------------

    def _on_verdict(self, verdict: Verdict, now: float) -> list[Action]:
        assert verdict.session == self.session
        if self.rule is not Rule.COUPLED and verdict.incarnation < self._target_since:
            return []
        try:
            news = self.text.continuation(verdict.base_len, verdict.base_hash, verdict.tokens)
        except Diverged:
            self.counts.num_diverged += 1
            news = None
        if news is None or (news and self._lacks_logprobs(verdict)):
            # A message before this verdict was lost, or the verdict contradicts the committed text.
            return self._repair(self._any(Role.TARGET), verdict.incarnation, now)
        tokens, reason = self.limits.trim(len(self.text), news)
        if not tokens:
            return []
        self.text.extend(tokens)
        self._reopens = 0
        self._attempt = max(self._attempt, verdict.attempt)
        self._forward_s = (verdict.model_us + verdict.host_us) / 1e6
        self._pass_s += 0.1 * (now - self._passed_at - self._pass_s)
        self._owed_since = self._passed_at = now
        self._overrun = ""
        num_known = len(verdict.tokens) - len(news)
        num_accepted = max(0, min(verdict.num_accepted - num_known, len(tokens)))
        self.counts.count(PassFigures.of(verdict, len(tokens), num_accepted, num_known))
        logprobs = verdict.logprobs and verdict.logprobs.part(num_known, num_known + len(tokens))
        sources = verdict.sources[num_known : num_known + num_accepted]
        emit = Emit(tokens, num_accepted, verdict.num_drafted, verdict.rejected, logprobs, sources)
        if self._watch is not None:
            spans = self._watch.passed(verdict, self.text, len(tokens), num_accepted, now)
            emit = replace(emit, spans=spans)
        if reason is not None:
            return [emit, *self._end(Finish(reason))]
        return [emit, *self._tell_drafters(verdict)]

    def _tell_drafters(self, verdict: Verdict) -> list[Action]:
        """Return what the text's drafters are told now that their rest ends; [] if it does not.

        Heads are told every verdict, because they get the features of every token.
        """
        told = None if self._layers else self._rest.after(verdict, self.text)
        if told is None:
            return []
        drafters = [node for node, one in self._told.items() if one.role is Role.DRAFTER]
        return [Send(node, told) for node in drafters]

    def _lacks_logprobs(self, verdict: Verdict) -> bool:
        """True if logprobs are missing that should have come by now."""
        if self._prompt_scores is not None and not self._prompt_scores.is_complete:
            return True
        return self.sampling.num_logprobs != OFF and verdict.logprobs is None

    def _on_prompt_scored(self, message: PromptLogprobs, now: float) -> list[Action]:
        if self._prompt_scores is None or not self._prompt_scores.add(message):
            return []
        self._owed_since = now
        return self._emit_prompt()

    def _emit_prompt(self) -> list[Action]:
        if self._prompt_scores is None or not self._prompt_scores.is_complete:
            return []
        return [EmitPrompt(self._prompt_scores.all())]

    def _end(self, last: Finish | Fail) -> list[Action]:
        reason = last.reason.value if isinstance(last, Finish) else BROKEN_OFF
        return [last, *self.close(reason)]
