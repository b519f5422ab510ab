"""One text at the target (pure): no clock, no socket, no model, and no other text.

Theory of operation
-------------------
The target has its own copy of the speculation tree, so it starts a pass without asking the drafter.
`deciding.py` decides when, and with which other texts; `scheduling.py` does it. For each text the
dispatcher (`node/dispatcher.py`) handles events, and the schedule asks for the rest:

    Arrived(Draft)   add its nodes to the tree, keep them as orphans, or count them as stale;
                     say the last verdict again to a drafter that has not heard it -> Send(Verdict)
    Arrived(Close)   complete what other texts may copy from this one
    chunk            the prompt, or tokens that the cache lacks, to be prefilled next
    view             what decides whether a pass starts now            -> TextView
    gather           add drafts copied from earlier text; all that a pass could verify
    take_part        make the text's part of a pass                         -> Part
    computed         judge the drafts, advance text and cache        -> ComputedPart
    report           say what came of the pass                       -> Send(Verdict)
    learn            learn acceptance rates from it
    Confirmed        forget what need not be sent again, or say it again -> Send(Verdict or Fault)

A `Verifying` is made with the Open that begins a life of the text, and with the machine of the life
before: tokens which that one has beyond the coordinator's text were missed, and are sent again.
Drafts of an earlier life are as usable as any (`drafts_at_hand.py`).

A pass feeds the committed tokens that the cache lacks, at least the last one, and a subtree of
drafts below it (`drafts_at_hand.py`). The target's own choices go along a path of it, to the first
choice that was not drafted: these tokens are the verdict. So a draft is accepted if it equals the
target's choice, and the text is the target's whatever was drafted. The judgement is a value
(`Judged`). Then, in this order, text and cache advance, a verdict is sent, and the acceptance rates
are updated.

A row whose logits are not finite chooses no token, and the path ends there. If it is the row of the
last committed token, the text is read anew, or ends. The same holds if a pass finds no memory.

Under the classical rules the engine judges the drafts of a pass by the ratio of two distributions.
There the text has the target's distribution only if no draft is judged twice and none is preferred
because of its token (docs/adr/0003): after a rejection a new *attempt* begins, for which the
drafter drafts anew, and a node has only one child, the first.

The reasons to start a pass are in `deciding.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout.slots import Feed, Move
from node.economics import FIRST_OF_MODEL
from node.events import Arrived, Confirmed, Send, SharedAction, TextEvent, Wipe
from node.lanes import Lane
from node.placing import Place
from proto.messages import (
    Cause,
    Close,
    Draft,
    Hit,
    Open,
    Rule,
    Verdict,
)
from proto.policies import drafts_ahead
from proto.tree import CommittedText, SpeculationTree
from target_node.accepting import Judged, chosen_of, judge_of, rest_of
from target_node.compute import Judge, Outcome, Part
from target_node.deciding import Awaited, Cores, LastPass, TextView, awaited
from target_node.drafts_at_hand import Chances, Drafts, laid_out
from target_node.failed_passes import Failures, not_finite_at
from target_node.known import Known
from target_node.resting import Course
from target_node.sending import (
    Reports,
    missed_of,
    repeated,
    scored_by,
    tell_features,
    tell_prompt,
)
from target_node.waiting import Waiting


@dataclass(frozen=True, slots=True)
class _LaunchedPart:
    """The part of this text in a pass that was launched.

    nodes      path hashes of the drafts in it, by row; None while prefilling
    parents    the row that each of them follows; the root's is row 0
    num_first  number of drafts of the first token when the pass began
    wait_s     seconds before it in which it could have started
    start      position of the first row
    """

    nodes: tuple[int, ...] | None
    parents: tuple[int, ...]
    num_first: int
    cause: Cause
    started: float
    wait_s: float
    start: int


@dataclass(frozen=True, slots=True)
class _Moved:
    """What has changed when the text advanced.

    base_len, base_hash  length and hash of the text before
    num_dead             number of drafts that died
    move                 the move of cache rows that follows; None: they lie where they belong
    """

    base_len: int
    base_hash: int
    num_dead: int
    move: Move | None


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """The part of this text in a pass that was computed: what its verdict will say.

    ended  when the pass ended (seconds)
    """

    judged: Judged
    moved: _Moved
    launched: _LaunchedPart
    model_us: int
    ended: float


class Verifying:
    """The state machine that verifies one text, for one life: from `opened` to the next Open.

    earlier  the machine of its life before

    course   measurements of texts like this one; None: the drafter never rests for it
    place    where its last pass ran
    served   its last turn: the schedule numbers the parts of all passes, so the least is due first
    reports  logprobs that may have to be sent again, over all lives of the text
    """

    def __init__(
        self, opened: Open, lane: Lane, known: Known, earlier: "Verifying | None", now: float
    ) -> None:
        self.opened = opened
        self.lane = lane
        self.course: Course | None = None
        self.place = Place.APART
        self.served = 0
        self._took_turns = False  # the drafter drafted nothing during the last pass
        self._went_along = False  # it joined its last pass, for which other texts had a reason
        self._known = known
        self._num_texts = 1  # texts that share the passes, at the last `follow`
        self._rested = False  # whether the drafter was to rest, at the last `follow`
        self.reports: Reports = Reports() if earlier is None else earlier.reports
        before = CommittedText(opened.key) if earlier is None else earlier.tree.text
        self._missed = missed_of(opened, before)
        tokens = opened.tokens + self._missed
        self.finished = opened.limits.trim(len(opened.tokens), self._missed)[1] is not None
        self.drafts = Drafts(opened, tokens, known)
        self.tree: SpeculationTree = self.drafts.tree
        # Logprobs of a prompt are only computed if the prompt is read.
        is_new = opened.sampling.scores_prompt or (known.fixed_rows and earlier is None)
        lane.begin(self.tree.text, keep=not is_new, layers=opened.layers)
        self.slots = lane.slots
        self.ready_at = now  # since when the target has been able to start a pass
        self._said_at = now  # when the newest verdict was sent, or sent again
        self._running: _LaunchedPart | None = None
        self._number = 0  # number of the last pass
        self._all_accepted = False  # the last pass had drafts, and all were accepted
        self._waiting = Waiting(known.costs)
        self._awaited = Awaited()  # as the newest verdict says
        self._failures = Failures(opened)
        self._price_wait()

    def begin(self) -> Sequence[SharedAction]:
        """Return a verdict with the tokens that the coordinator has missed, if any."""
        if not self._missed:
            return ()
        return (self._repeat(len(self.opened.tokens), self.ready_at),)

    def handle(self, event: TextEvent, now: float) -> Sequence[SharedAction]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Arrived(Draft() as message):
                return self._on_draft(message, now)
            case Arrived(Close()):
                self.drafts.end()
            case Confirmed(length):
                return self._on_confirmed(length, now)
        return ()

    def _on_draft(self, message: Draft, now: float) -> Sequence[SharedAction]:
        first_of_life = self.drafts.received.add(message)
        if not self.drafts.is_judgeable(message):
            # No usable draft will come before the drafter has heard of this attempt.
            self.tree.num_stale += len(message.tokens)
            return self._tell_again(message, now)
        if self.course is not None:
            self.course.heard()
        self._waiting.heard(
            message, now, first_of_life=first_of_life, in_turns=self._awaited.takes_turns
        )
        self.drafts.heard(message)
        return self._tell_again(message, now)

    def _tell_again(self, message: Draft, now: float) -> Sequence[SharedAction]:
        """Return a repeated verdict if the drafter cannot have received the last one, or ().

        A drafter that sends all its drafts again, below an older root, has waited in vain for our
        verdict. If there has been time for it to receive the newest one, that was lost.
        """
        is_said_again = message.first_number < message.number
        is_behind = message.parent_len < len(self.tree.text)
        if not (is_said_again and is_behind and self._waiting.is_unheard(self._said_at, now)):
            return ()
        if not self.tree.text.is_prefix(message.parent_len, message.parent_hash):
            return ()
        return (self._repeat(message.parent_len, now),)

    def _on_confirmed(self, length: int, now: float) -> Sequence[SharedAction]:
        self.reports.forget(length)
        if self._failures.has_ended:
            return self._failures.said
        # The coordinator is behind while a verdict is on its way; if none can follow it, it was
        # lost.
        if not self.finished or length == len(self.tree.text):
            return ()
        return (self._repeat(length, now),)

    def _repeat(self, base_len: int, now: float) -> Send:
        """Note and return a repeated verdict from `base_len` on, or from where kept logprobs begin.

        The later one counts; logprobs asked for are kept for all that the coordinator may lack.
        """
        self._said_at = now
        base_len = max(base_len, min(self.reports.start, len(self.tree.text) - 1))
        acks, attempt = self.drafts.received.acks(), self.drafts.attempt
        opened, text = self.opened, self.tree.text
        verdict = repeated(
            *(opened, text, base_len, self.reports),
            rests=self.rests,
            attempt=attempt,
            num_awaited=self._awaited.num,
            least_chance=self._awaited.least_chance,
            acks=acks,
        )
        return Send(verdict)

    # -- when to start ----------------------------------------------------------------------------

    def follow(self, course: Course | None, num_texts: int) -> None:
        """Set the measurements of texts like this one, and how many texts share the passes."""
        self.course, self._num_texts = course, num_texts
        if self._rested and not self.rests:
            self._waiting.woke()
        self._rested = self.rests

    @property
    def is_trial(self) -> bool:
        """True if resting or drafting is only being tried."""
        return self.course is not None and self.course.is_trial

    @property
    def rests(self) -> bool:
        """True if the drafter should draft nothing now: it rests, or resting is being tried."""
        return self.course is not None and self.course.rests

    @property
    def chunk(self) -> Sequence[int]:
        """Return the committed tokens to prefill next; empty: a pass can feed all missing ones.

        In reproducible mode the prompt without its last token is prefilled in passes of its own,
        and nothing after it is prefilled at all.
        """
        text, limit = self.tree.text.tokens, self._known.chunk
        start, end = self.slots.prefix_len, self.opened.num_prompt - 1
        is_alone = bool(self._known.fixed_rows)
        if self.opened.sampling.scores_prompt:
            limit = min(limit, self._known.scored_chunk)
        if (is_alone or self.opened.sampling.scores_prompt) and start < end:
            return text[start : min(end, start + limit)]
        return () if is_alone else self.slots.next_chunk(text, len(text), limit)

    @property
    def num_read(self) -> int:
        """Return how many tokens of the text are in the cache, without those of a running pass."""
        running = self._running
        return self.slots.prefix_len if running is None else running.start

    @property
    def may_copy(self) -> bool:
        """True if tokens that are cached in another lane may be copied to this text's lane."""
        if self._failures.is_reading_anew:
            return False
        return self._known.fixed_rows is None and not self.opened.sampling.scores_prompt

    @property
    def num_missing(self) -> int:
        """Return the number of committed tokens that the cache lacks."""
        return len(self.tree.text) - self.slots.prefix_len

    @property
    def is_catching_up(self) -> bool:
        """True if the next pass can only feed missing committed tokens (reproducible mode)."""
        return self._known.fixed_rows is not None and self.num_missing > 1

    def _price_wait(self) -> None:
        """Decide for which drafts the next pass waits, before the verdict says it."""
        num_in_vain = self._waiting.num_in_vain
        last = LastPass(self._took_turns, self._all_accepted, num_in_vain, self._num_texts)
        self._awaited = awaited(
            self.opened.policy,
            0 if self.finished else self._num_awaited_max(),
            last,
            rests=self.rests,
            p=self._known.acceptance.chance(FIRST_OF_MODEL),
            prices=self._known.costs.at(self.place),
        )

    @property
    def view(self) -> TextView:
        """Return what decides about this text, as it is now."""
        most, drafts, waiting = self._num_drafts_max(), self.drafts, self._waiting
        num_awaited, num_in_row = min(self._awaited.num, most), drafts.num_in_chain(most)
        return TextView(
            session=self.opened.session,
            policy=self.opened.policy,
            rule=self.opened.rule,
            rests=self.rests,
            is_trial=self.is_trial,
            is_catching_up=self.is_catching_up,
            most=most,
            num_awaited=num_awaited,
            num_in_row=num_in_row,
            are_there=drafts.are_there,
            are_all=num_in_row < num_awaited and drafts.are_all(num_awaited),
            ready_at=self.ready_at,
            num_missing=self.num_missing,
            went_along=self._went_along,
            has_begun=waiting.has_begun,
            is_quiet=waiting.is_quiet,
            num_in_vain=waiting.num_in_vain,
            takes_turns=self._awaited.takes_turns,
        )

    def begin_wait(self) -> None:
        """Note that there was no reason to start a pass."""
        self._waiting.began()

    def leave_out(self, now: float) -> None:
        """Note that a pass without this text begins."""
        self._waiting.left_out(now)

    def _num_drafts_max(self) -> int:
        """Return the most drafts worth verifying now; a pass also feeds missing text tokens."""
        return min(self._num_awaited_max(), self._num_rows_max - self.num_missing)

    @property
    def _num_rows_max(self) -> int:
        """Return the most rows of this text in a pass."""
        return min(self.slots.num_tree_slots, self._known.fixed_rows or self.slots.num_tree_slots)

    def _num_awaited_max(self) -> int:
        """Return the most drafts worth awaiting, for a pass that feeds one token of the text."""
        limits, k = self.opened.limits, self.opened.policy.num_speculative_tokens
        return min(k, self._num_rows_max - 1, limits.max_drafts(len(self.tree.text)))

    # -- a pass -----------------------------------------------------------------------------------

    def read(self, now: float) -> Part:
        """Return the Part that prefills the next chunk."""
        tokens = self.tree.text.tokens
        feed = self.slots.feed_prefix(self.chunk)
        is_last = self.slots.prefix_len == len(tokens)
        return self._part(
            feed, () if is_last else None, Cause.RESTING if self.rests else Cause.ALONE, now
        )

    def gather(self) -> Chances:
        """Add copies of earlier text to the drafts; return those that a pass could verify now.

        {}: the text is catching up.
        """
        if self.is_catching_up:
            return {}
        most = self._num_drafts_max()
        self.drafts.add_copies(most)
        return self.drafts.at_hand(most)

    @property
    def was_try(self) -> bool:
        """True if the last pass has waited in vain for a drafter that is silent."""
        return self._waiting.was_try

    def take_part(
        self, drafts: Sequence[int], cause: Cause | None, now: float, cores: Cores | None
    ) -> Part:
        """Begin a pass; return the Part that verifies these drafts (path hashes, likeliest first).

        cause  why the pass starts; None: other texts have a reason, and this one joins
        cores  where it runs; None: there is no choice
        """
        # Under a policy with fixed numbers of drafts the drafter drafts on.
        has_price = self.opened.policy.prices_awaited
        self._took_turns = cores is not None and cores.takes_turns and has_price
        missing = self.tree.text.tokens[self.slots.prefix_len :]
        self._went_along = cause is None
        if cause is None:
            self._waiting.went_along(now)
            cause = Cause.CHEAP
        else:
            self._waiting.started(cause, self.ready_at, now)
        if self.is_catching_up:
            assert self._known.fixed_rows is not None
            feed = self.slots.feed(missing[: min(self._known.fixed_rows, len(missing) - 1)])
            return self._part(feed, None, cause, now)
        nodes, parents = laid_out(self.tree, drafts)
        if nodes and cause is Cause.ALONE:
            cause = Cause.READY
        feed = self.slots.feed(missing, self.tree.rows_of(nodes))
        keys, judge = tuple(node.key for node in nodes), judge_of(self.opened, nodes)
        return self._part(feed, keys, cause, now, judge, parents)

    def serve(self, turn: int, place: Place) -> None:
        """Note the turn and the place of the pass that was launched with this text."""
        self.served, self.place = turn, place

    def wipe(self) -> Wipe:
        """Forget what is cached, which holds no numbers; return what clears it."""
        self.slots.truncate(0)
        return Wipe(self.slots.lane, 0)

    def _part(
        self,
        feed: Feed,
        nodes: tuple[int, ...] | None,
        cause: Cause,
        now: float,
        judge: Judge | None = None,
        parents: tuple[int, ...] = (),
    ) -> Part:
        self._number += 1
        num_first = len(self.tree.children(self.tree.root))
        wait_s, start = now - self.ready_at, feed.positions[0]
        self._running = _LaunchedPart(nodes, parents, num_first, cause, now, wait_s, start)
        num_asked = 0 if nodes is None else 1 + len(nodes)
        return Part(
            self.opened,
            self._number,
            self.tree.text.tokens,
            feed,
            num_asked,
            tuple(p + 1 for p in feed.positions[len(feed.positions) - num_asked :]),
            judge,
            scored_by(self.opened, feed),
            parents,
            self.opened.layers,
        )

    # -- the verdict ------------------------------------------------------------------------------

    def computed(
        self, outcome: Outcome, model_us: int, now: float
    ) -> tuple[Sequence[SharedAction], ComputedPart | None]:
        """Judge the drafts by the pass's outcome, advance text and cache.

        Returns the actions that follow at once, and what is left to be moved, told and learnt
        (`ComputedPart`, `report`, `learn`); None: nothing.
        """
        running, self._running = self._running, None
        assert running is not None
        if outcome.failure:
            return self._on_failure(outcome.failure, now, is_cause=outcome.is_cause), None
        if outcome.bad_at is not None:
            return self._on_failure(not_finite_at(outcome.bad_at), now, is_cause=False), None
        if running.nodes is None:
            return self._on_read(running, outcome, now), None
        judged = self._judge(running, running.nodes, outcome)
        if self.drafts.were_there(judged):
            self._waiting.had_drafts()
        moved = self._advance(judged, now)
        part = ComputedPart(judged, moved, running, model_us, now)
        return (), part

    @property
    def drafter_waits(self) -> bool:
        """True if the drafter waits for the next verdict: before it, no drafts can come."""
        policy = self.opened.policy
        is_ahead = drafts_ahead(policy, takes_turns=self._took_turns)
        return policy.has_drafter and not (is_ahead or self.rests or self._waiting.is_quiet)

    def learn(self, part: ComputedPart) -> None:
        """Learn acceptance rates from a pass."""
        self.drafts.learn(part.judged)

    def _on_failure(self, why: str, now: float, *, is_cause: bool) -> Sequence[SharedAction]:
        """Drop this text's cache, to read it anew, or end the text; return actions."""
        self.ready_at = now
        wiped = self.wipe()
        said = self._failures.met(len(self.tree.text), why, is_cause=is_cause)
        self.finished = self._failures.has_ended
        return (*said, wiped)

    def _on_read(
        self, running: _LaunchedPart, outcome: Outcome, now: float
    ) -> Sequence[SharedAction]:
        """Handle the outcome of a prefill; returns messages with its logprobs and features."""
        self.ready_at = now
        return (
            *tell_prompt(self.opened, self.slots.prefix_len, outcome.logprobs),
            *tell_features(self.opened, self.tree.text, running.start, outcome.features),
        )

    def _judge(self, running: _LaunchedPart, keys: Sequence[int], outcome: Outcome) -> Judged:
        """Return which drafts `keys` the target accepts, and what follows; changes nothing."""
        nodes = self.tree.nodes
        verified = tuple([nodes[key] for key in keys])
        drafted = [node.token for node in verified]
        rows, chosen = chosen_of(drafted, running.parents, outcome)
        accepted = tuple(verified[row - 1] for row in rows[1:])
        hit = Hit.NOBODY
        if running.cause not in (Cause.ALONE, Cause.RESTING):
            hit = self.drafts.fate(chosen[0], running.num_first, is_accepted=bool(accepted))
        tokens, finish = self.opened.limits.trim(len(self.tree.text), chosen)
        return Judged(
            verified,
            accepted,
            rejected=tuple(rest_of(verified, running.parents, rows[-1])),
            tokens=tokens,
            finish=finish,
            hit=hit,
            along=self.drafts.along(chosen),
            copies=self.drafts.copies,
            outcome=outcome,
        )

    def _advance(self, judged: Judged, now: float) -> _Moved:
        """Commit the judged tokens and move the root; drafts not below it die; return changes."""
        outcome, base_len, base_hash = judged.outcome, len(self.tree.text), self.tree.root
        self.finished = judged.finish is not None
        is_new_attempt = self.opened.rule is not Rule.COUPLED and judged.has_rejected
        path, num_dead = self.drafts.advance(judged.tokens, is_new_attempt=is_new_attempt)
        if self.finished:
            self.drafts.end()
        move = self.slots.advance(path, self.tree.nodes)
        is_last_cached = self.slots.prefix_len == len(self.tree.text)
        if is_new_attempt or (is_last_cached and (outcome.is_unusual or not self.finished)):
            # The last token is always fed again, also if it is the draft that was rejected. If its
            # row is not finite, its slot holds zeros, which no later text may use as cached.
            self.slots.truncate(len(self.tree.text) - 1)
        self._all_accepted = 0 < len(judged.verified) == len(judged.accepted)
        self.ready_at = now
        self._said_at = now  # beside a device in fact after the next launch
        if not self.drafts.are_there:
            self._waiting.told(self.tree.root, now)
        self._price_wait()
        return _Moved(base_len, base_hash, num_dead, move)

    def report(self, part: ComputedPart) -> Sequence[SharedAction]:
        """Return the messages about a pass, and reset its counts; the next pass may be launched."""
        judged, moved, launched = part.judged, part.moved, part.launched
        plain_s = self._known.plain_s(self._num_texts)
        verdict = Verdict(
            session=self.opened.session,
            incarnation=self.opened.incarnation,
            base_len=moved.base_len,
            base_hash=moved.base_hash,
            tokens=judged.tokens,
            acks=self.drafts.received.acks(),
            cause=launched.cause,
            num_drafted=len(judged.verified),
            num_accepted=judged.num_accepted,
            num_rolled_back=moved.num_dead,
            num_stale=self.drafts.take_num_stale(),
            wait_us=round(launched.wait_s * 1e6),
            model_us=part.model_us,
            host_us=max(0, round((part.ended - launched.started) * 1e6) - part.model_us),
            drafter_us=self.drafts.received.take_model_us(),
            rejected=tuple(node.token for node in judged.rejected),
            attempt=self.drafts.attempt,
            logprobs=judged.logprobs,
            sources=judged.sources,
            hit=judged.hit,
            plain_us=round(plain_s * 1e6),
            num_awaited=self._awaited.num,
            least_chance=self._awaited.least_chance,
        )
        self.reports.add(moved.base_len, verdict.logprobs)
        # Features first: without them a head cannot use the verdict.
        told = tell_features(self.opened, self.tree.text, launched.start, judged.outcome.features)
        return (*told, Send(verdict))

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.drafts.check()
