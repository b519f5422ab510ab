"""One text at the target (pure): no clock, no socket, no model, and no other text.

Theory of operation
-------------------
The target holds its own copy of the speculation tree, so it starts a pass without asking anybody.
When that is, and with which others, is decided by `scheduling.py`; here is what a text has to say:

    Arrived(Draft)   its nodes join the tree, or wait for their parent, or are stale
    Arrived(Close)   what may be copied of it is complete
    chunk            the prompt, or what is missing of a text, to be prefilled next
    ready            why a pass should start now, or until when drafts are waited for -> Ready
    add_copies       drafts of the text's own join the others, right before a pass
    launch           the text's part of a pass                              -> Part
    computed         judge, advance                                  -> MoveRows
    afterwards       report, learn                                   -> Send(Verdict)
    Confirmed        forget what need not be said again                     -> Send(Fault)

It is made with the Open that begins one life of the text, and with the machine of the life before:
what that one has beyond the coordinator's text was missed, and is said again. What is not of the
present life never comes this far (`node/follower.py`).

A pass feeds what the cache lacks of the text, the last token at least, and a subtree below it (see
`drafts.py`). The target's own choices lead down it, to the first that was not drafted: that path
is the verdict. So verification is equality, and the text is the target's whatever was drafted.
What is judged is a value (`Judged`), and each step that follows needs those before it: the text and
the cache advance, that is reported, and at last how often drafts are right is learnt.

Where logits are not finite a row chooses nothing, and the path ends there. If that is the last
committed token's row, the text is read anew, or it ends. So it does where a pass finds no memory.

Under the classical rules the engine judges the drafts of a pass by the ratio of two distributions.
There the text is the target's only if no draft is judged twice and none is preferred for what it
is (docs/adr/0003): after a rejection a new *attempt* begins, for which the drafter drafts anew, and
a node has one child, the first.

The reasons to start: the launch rule is met (READY: enough drafts under the root, or all that are
to come, or `lookup.py` has some as good); a deadline of measured costs has passed (LATE); nobody
is expected (ALONE; QUIET: it has let two deadlines pass, until it is heard again); to wait costs
more than it brings (CHEAP, see `economics.py`), or to draft at all does (RESTING, `resting.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout.slots import Feed, Move
from node.follower import Arrived, Confirmed, Lane, MoveRows, Send, SharedAction, TextEvent, Wipe
from proto.messages import (
    Cause,
    Close,
    Draft,
    Fault,
    FaultCode,
    Hit,
    Open,
    Rule,
    Verdict,
)
from proto.tree import CommittedText, SpeculationTree
from target_node.compute import Judge, Outcome, Part
from target_node.drafts import Chances, Drafts, Judged, chosen_of, judge_of, laid_out, rest_of
from target_node.resting import Course
from target_node.sending import (
    Reports,
    missed_of,
    repeated,
    tell_features,
    tell_prompt,
)
from target_node.statistics import Known
from target_node.waiting import Ready, Waiting

# -- failures --------------------------------------------------------------------------------------

# What a text does whose pass found no memory, or whose logits are not finite where its next token
# is to be chosen.
#
# That can be the fault of others: of a text that was in its lane before, or of rows that were
# copied. So the text is read anew once, in a lane that is all zeros, and nothing is copied. If the
# same happens again, its own tokens are at fault: the text ends, and the others go on. A pass that
# was of this text alone and found no memory is its own fault at once.


class Failures:
    """What has happened to one life of a text.

    has_ended  the text cannot go on
    said       what the coordinator is told of it, until it closes the text
    """

    def __init__(self, opened: Open) -> None:
        self._opened = opened
        self._read_anew_at: int | None = None  # its length
        self.has_ended = False
        self.said: Sequence[Send] = ()

    @property
    def is_reading_anew(self) -> bool:
        """Whether its lane may have nothing that was computed for others."""
        return self._read_anew_at is not None

    def met(self, length: int, why: str, *, is_cause: bool) -> Sequence[Send]:
        """No token follows so many, and `why`. Returns what to say.

        is_cause  it is known to be this text's own fault
        """
        if self._read_anew_at != length and not is_cause:
            self._read_anew_at = length
            return ()
        self.has_ended = True
        session, incarnation = self._opened.session, self._opened.incarnation
        fault = Fault(session, incarnation, FaultCode.FAILED, why)
        self.said = (Send(fault),)
        return self.said


def line(position: int) -> str:
    """What people are told."""
    return (
        f"the target's logits are not finite at token position {position} (from 0, prompt "
        "included): float16 overflows in some models, use bfloat16 or float32; else leave this "
        "token out, or get the checkpoint again"
    )


# -- verifying -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Running:
    """The part of this text in the pass that is running.

    nodes    the drafts in it, by row; None while prefilling
    parents  the rows that they follow; the root's is row 0
    num_first  drafts of the first token that were there
    wait_s   how long it could have run before it did
    start    position of the first row
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
    """What has changed when the text went on.

    base_len, base_hash  where it went on from
    num_dead             drafts that died
    move                 rows of the cache that follow; None: all lie where they belong
    """

    base_len: int
    base_hash: int
    num_dead: int
    move: Move | None


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """A verdict that has not been told yet.

    ended  when the pass was
    """

    judged: Judged
    moved: _Moved
    running: _Running
    model_us: int
    ended: float


class Verifying:
    """One life of a text at the target, from `opened` on.

    earlier  the machine of its life before

    course   what is known of texts like this one; None: its drafter never rests
    served   when it was last computed for, by the schedule's count
    reports  what may have to be said again, over all lives of the text
    """

    def __init__(
        self, opened: Open, lane: Lane, known: Known, earlier: "Verifying | None", now: float
    ) -> None:
        self.opened = opened
        self.lane = lane
        self.course: Course | None = None
        self.served = 0
        self._went_along = False  # in its last pass, because others had a reason to start
        self._known = known
        self._num_texts = 1  # that share the passes, when one was last thought of
        self._rested = False  # when a pass was last thought of
        self.reports: Reports = Reports() if earlier is None else earlier.reports
        before = CommittedText(opened.key) if earlier is None else earlier.tree.text
        self._missed = missed_of(opened, before)
        tokens = opened.tokens + self._missed
        self.finished = opened.limits.trim(len(opened.tokens), self._missed)[1] is not None
        self.drafts = Drafts(opened, tokens, known)
        self.tree: SpeculationTree = self.drafts.tree
        # Only a prompt that is read has logprobs.
        is_new = opened.sampling.scores_prompt or (known.fixed_rows and earlier is None)
        lane.begin(self.tree.text, keep=not is_new)
        self.slots = lane.slots
        self.ready_at = now  # since when the target has been able to start a pass
        self._said_at = now  # when the newest verdict was sent, or said again
        self._running: _Running | None = None
        self._unsaid: _Unsaid | None = None
        self._number = 0  # of the last pass
        self._is_hit = False  # it had drafts, and all were accepted
        self._wanted: int | None = None  # drafts that the next one starts with; None: not decided
        self._waiting = Waiting(opened, known.costs, known.acceptance)
        self._failures = Failures(opened)

    def begin(self) -> Sequence[SharedAction]:
        """Say again what the coordinator has missed."""
        if not self._missed:
            return ()
        return (self._repeat(len(self.opened.tokens), self.ready_at),)

    def handle(self, event: TextEvent, now: float) -> Sequence[SharedAction]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
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
            # Nothing worth waiting for will come before the drafter has heard of this attempt.
            self.tree.num_stale += len(message.tokens)
            return self._tell_again(message, now)
        if self.course is not None:
            self.course.heard()
        self._waiting.heard(message, now, first_of_life=first_of_life)
        self.drafts.heard(message)
        return self._tell_again(message, now)

    def _tell_again(self, message: Draft, now: float) -> Sequence[SharedAction]:
        """What a drafter cannot have heard, or the coordinator that should have passed it on.

        A drafter that says all it has again, behind the place where the text is, has waited in vain
        for our verdict. If there has been time for it to hear the newest one, that was lost.
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
        """What was said of the text behind `base_len`, once more, with its logprobs.

        If they were asked for, they are here for all tokens that the coordinator may lack.
        """
        self._said_at = now
        base_len = max(base_len, min(self.reports.start, len(self.tree.text) - 1))
        acks, attempt = self.drafts.received.acks(), self.drafts.attempt
        opened, text = self.opened, self.tree.text
        verdict = repeated(opened, text, base_len, self.reports, attempt=attempt, acks=acks)
        return Send(verdict)

    # -- when to start ----------------------------------------------------------------------------

    def follow(self, course: Course | None, num_texts: int) -> None:
        """What is known of texts like this one is kept there; so many share the passes."""
        self.course, self._num_texts = course, num_texts
        if self._rested and not self.rests:
            self._waiting.woke()
        self._rested = self.rests

    @property
    def rests(self) -> bool:
        """Whether the drafter is to rest."""
        return self.course is not None and self.course.rests

    @property
    def chunk(self) -> Sequence[int]:
        """The committed tokens to prefill next; empty if a pass can take what is missing.

        In reproducible mode the prompt but for its last token is prefilled in passes of its own,
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
    def may_copy(self) -> bool:
        """Whether its lane may have what another has computed."""
        if self._failures.is_reading_anew:
            return False
        return self._known.fixed_rows is None and not self.opened.sampling.scores_prompt

    @property
    def num_missing(self) -> int:
        """Committed tokens that the cache lacks."""
        return len(self.tree.text) - self.slots.prefix_len

    @property
    def is_catching_up(self) -> bool:
        """Whether the next pass can only feed what is missing (reproducible mode)."""
        return self._known.fixed_rows is not None and self.num_missing > 1

    def price_wait(self) -> None:
        """Decide with how many drafts under the root a pass starts, once after each verdict."""
        most = self._num_drafts_max()
        if self._wanted is None and not self.is_catching_up and self._why_alone(most) is None:
            self._wanted = self._waiting.num_wanted(most, is_hit=self._is_hit)

    def ready(self, now: float) -> Ready:
        """What there is to say of a pass with this text."""
        most = self._num_drafts_max()
        wanted = min(self._wanted or 0, most)
        deadline = self.ready_at + self._waiting.limit_s(wanted)
        cause = self._cause(most, wanted, is_late=now >= deadline)
        num_awaited = self.drafts.num_right(wanted) if cause is None else 0.0
        missing, may_join = self.num_missing, not self._went_along
        return Ready(cause, deadline, self.ready_at, missing, num_awaited, may_join)

    def _cause(self, most: int, wanted: int, *, is_late: bool) -> Cause | None:
        """The launch rule, for a pass that verifies at most so many drafts. None: wait."""
        if self.is_catching_up:
            return Cause.ALONE
        if (cause := self._why_alone(most)) is not None:
            return cause
        if self.drafts.are_enough(wanted):
            is_cheap = wanted == 0 < self.opened.policy.launch_min and not self.drafts.are_there
            return Cause.CHEAP if is_cheap else Cause.READY
        return self._waiting.reason(wanted, self._num_texts, is_late=is_late)

    @property
    def num_at_hand(self) -> float:
        """Tokens that the drafts that are here are expected to bring."""
        return self.drafts.num_right(self.drafts.num_in_chain(self._num_drafts_max()))

    def waits(self) -> None:
        """There was no reason to start."""
        self._waiting.began()

    def _num_drafts_max(self) -> int:
        """Most drafts worth verifying now: a pass feeds the missing committed tokens as well."""
        slots, opened, length = self.slots, self.opened, len(self.tree.text)
        num_rows = min(slots.num_tree_slots, self._known.fixed_rows or slots.num_tree_slots)
        num_free = num_rows - (length - slots.prefix_len)
        k = opened.policy.num_speculative_tokens
        return min(k, num_free, opened.limits.max_drafts(length))

    def _why_alone(self, most: int) -> Cause | None:
        """Why no drafter is expected, if a pass verifies at most so many drafts. None: one is."""
        if self.rests:
            return Cause.RESTING
        return Cause.ALONE if most == 0 or not self.opened.policy.has_drafter else None

    # -- a pass -----------------------------------------------------------------------------------

    def read(self, now: float) -> Part:
        """Prefill the next chunk."""
        tokens = self.tree.text.tokens
        feed = self.slots.feed_prefix(self.chunk)
        is_last = self.slots.prefix_len == len(tokens)
        return self._part(feed, () if is_last else None, self._why_alone(0) or Cause.ALONE, now)

    def add_copies(self) -> None:
        """A pass begins: drafts of our own join those at hand."""
        if not self.is_catching_up:
            self.drafts.add_copies(self._num_drafts_max())

    def at_hand(self) -> Chances:
        """The drafts that a pass could verify now."""
        return {} if self.is_catching_up else self.drafts.at_hand(self._num_drafts_max())

    def launch(self, drafts: Sequence[int], cause: Cause | None, now: float) -> Part:
        """Verify some of what is at hand, likeliest first.

        cause  why the pass starts; None: others have a reason, and this text goes along
        """
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
        self._running = _Running(nodes, parents, num_first, cause, now, wait_s, start)
        num_asked = 0 if nodes is None else 1 + len(nodes)
        return Part(
            self.opened,
            self._number,
            self.tree.text.tokens,
            feed,
            num_asked,
            tuple(p + 1 for p in feed.positions[len(feed.positions) - num_asked :]),
            judge,
            self._scored_by(feed),
            parents,
            self.opened.layers,
        )

    def _scored_by(self, feed: Feed) -> tuple[int, ...]:
        """The tokens that follow the rows of a prefill, if logprobs of the prompt are wanted."""
        opened = self.opened
        if feed.masks is not None or not opened.sampling.scores_prompt:
            return ()
        start = feed.positions[0] + 1
        return opened.tokens[start : min(opened.num_prompt, start + len(feed.tokens))]

    # -- the verdict ------------------------------------------------------------------------------

    def computed(self, outcome: Outcome, model_us: int, now: float) -> Sequence[SharedAction]:
        """What the pass that is running has said; it took so long. The text goes on."""
        running, self._running = self._running, None
        assert running is not None
        if outcome.failure:
            return self._on_failure(outcome.failure, now, is_cause=outcome.is_cause)
        if outcome.bad_at is not None:
            return self._on_failure(line(outcome.bad_at), now, is_cause=False)
        if running.nodes is None:
            return self._on_read(running, outcome, now)
        judged = self._judge(running, running.nodes, outcome)
        moved = self._advance(judged, now)
        if self.drafts.were_there(judged):
            self._waiting.had_drafts()
        self._unsaid = _Unsaid(judged, moved, running, model_us, now)
        return () if moved.move is None else (MoveRows((moved.move,)),)

    def afterwards(self) -> Sequence[SharedAction]:
        """Tell of the pass that has ended last, which nobody waits for as the device does."""
        unsaid, self._unsaid = self._unsaid, None
        if unsaid is None:
            return ()
        said = self._report(unsaid)
        self.drafts.learn(unsaid.judged)
        return said

    def _on_failure(self, why: str, now: float, *, is_cause: bool) -> Sequence[SharedAction]:
        """Nothing follows the text by what its lane holds: read it anew, or end it."""
        self.ready_at = now
        self.slots.truncate(0)
        said = self._failures.met(len(self.tree.text), why, is_cause=is_cause)
        self.finished = self._failures.has_ended
        return (*said, Wipe(self.lane.slots.lane, 0))

    def _on_read(self, running: _Running, outcome: Outcome, now: float) -> Sequence[SharedAction]:
        """A chunk was prefilled."""
        self.ready_at = now
        return (
            *tell_prompt(self.opened, self.slots.prefix_len, outcome.logprobs),
            *tell_features(self.opened, self.tree.text, running.start, outcome.features),
        )

    def _judge(self, running: _Running, keys: Sequence[int], outcome: Outcome) -> Judged:
        """What the pass says about its drafts `keys`. A question: nothing changes."""
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
        """The text goes on: the root moves, and what does not hang on it is dead."""
        outcome, base_len, base_hash = judged.outcome, len(self.tree.text), self.tree.root
        self.finished = judged.finish is not None
        is_new_attempt = self.opened.rule is not Rule.COUPLED and judged.has_rejected
        path, num_dead = self.drafts.advance(judged.tokens, is_new_attempt=is_new_attempt)
        if self.finished:
            self.drafts.end()
        move = self.slots.advance(path, self.tree.nodes)
        is_last_cached = self.slots.prefix_len == len(self.tree.text)
        if is_new_attempt or (is_last_cached and (outcome.was_repeated or not self.finished)):
            # The last token is always fed again, also if it is the draft that was rejected. If its
            # own row is not finite, its slot holds zeros, which no later text may take for read.
            self.slots.truncate(len(self.tree.text) - 1)
        self._is_hit, self._wanted = 0 < len(judged.verified) == len(judged.accepted), None
        self.ready_at = now
        self._said_at = now  # or a launch later
        if not self.drafts.are_there:
            self._waiting.told(self.tree.root, now)
        return _Moved(base_len, base_hash, num_dead, move)

    def _report(self, unsaid: _Unsaid) -> Sequence[SharedAction]:
        """Tell everybody. The next pass may be running: nothing here is to be read from it."""
        judged, moved, running = unsaid.judged, unsaid.moved, unsaid.running
        outcome = judged.outcome
        sources = tuple(node.source for node in judged.accepted[: judged.num_accepted])
        verdict = Verdict(
            session=self.opened.session,
            incarnation=self.opened.incarnation,
            base_len=moved.base_len,
            base_hash=moved.base_hash,
            tokens=judged.tokens,
            acks=self.drafts.received.acks(),
            cause=running.cause,
            num_drafted=len(judged.verified),
            num_accepted=judged.num_accepted,
            num_rolled_back=moved.num_dead,
            num_stale=self.drafts.take_num_stale(),
            wait_us=round(running.wait_s * 1e6),
            model_us=unsaid.model_us,
            host_us=max(0, round((unsaid.ended - running.started) * 1e6) - unsaid.model_us),
            drafter_us=self.drafts.received.take_model_us(),
            rejected=tuple(node.token for node in judged.rejected),
            attempt=self.drafts.attempt,
            logprobs=outcome.logprobs and outcome.logprobs.part(0, len(judged.tokens)),
            sources=sources if any(sources) else (),
            hit=judged.hit,
            plain_us=round(self._plain_s * 1e6),
        )
        self.reports.add(moved.base_len, verdict.logprobs)
        # A head can do nothing with a verdict without them.
        features = tell_features(self.opened, self.tree.text, running.start, outcome.features)
        return (*features, Send(verdict))

    @property
    def _plain_s(self) -> float:
        """What a pass of the texts that share it takes without drafts."""
        return self._known.costs.passes(self._num_texts).of(self._num_texts)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.drafts.check()
