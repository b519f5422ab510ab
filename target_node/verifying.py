"""One text at the target (pure): no clock, no socket, no model, and no other text.

Theory of operation
-------------------
The target holds its own copy of the speculation tree, so it starts a pass without asking anybody.
When that is, and with which others, is decided by `scheduling.py`; here is what a text has to say:

    Arrived(Draft)   its nodes join the tree, or wait for their parent, or are stale
    chunk            the prompt, or what is missing of a text, to be prefilled next
    reason           why a pass should start now, or None: wait until `deadline`
    launch           the text's part of a pass                              -> Part
    computed         walk the target's own choices down the tree     -> Send(Verdict), MoveRows
    Confirmed        forget what need not be said again                     -> Send(Fault)

It is made with the Open that begins one life of the text, and with the machine of the life before:
what that one has beyond the coordinator's text was missed, and is said again. What is not of the
present life never comes this far (`node/follower.py`).

A pass feeds what the cache lacks of the text, the last token at least, and the best chain below it.
Row by row the target's own choice is compared with the draft; the accepted run and the target's
next token are the verdict. So verification is equality, and the text is the target's whatever was
drafted.

Under the classical rules the engine judges the drafts of a pass by the ratio of two distributions.
There the text is the target's only if no draft is judged twice and none is preferred for what it
is (docs/adr/0003): after a rejection a new *attempt* begins, for which the drafter drafts anew, and
a node has one child, the first.

The reasons to start: the launch rule is met (READY: enough drafts under the root, or all that are
to come, or `lookup.py` has some as good); a deadline of measured costs has passed (LATE); nobody
is expected (ALONE; QUIET: it has let two deadlines pass, until it is heard again); to wait costs
more than it brings (CHEAP, see `node/price.py`), or to draft at all does (RESTING, `resting.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.slots import Feed
from node.acceptance import FIRST_OF_MODEL
from node.events import Arrived, Confirmed, MoveRows, Send, SharedAction, gap
from node.lanes import Lane
from node.price import num_expected
from proto.messages import NGRAM_SOURCE, Cause, Draft, Open, Rule, Verdict
from proto.tree import CommittedText, Graft, Node, SpeculationTree
from target_node.accepting import judge_of, judged, num_equal
from target_node.events import Event, Judge, Outcome, Part
from target_node.known import Known
from target_node.lookup import LookupSource
from target_node.reading import next_chunk, scored_by, tell_prompt
from target_node.received import Received
from target_node.reports import Reports, missed_of, repeated
from target_node.resting import Course
from target_node.waiting import Waiting

MAX_NODES = 128


@dataclass(frozen=True, slots=True)
class _Pass:
    """The pass that is running.

    nodes    the drafted path in it; None while prefilling
    at_hand  that path and what lies beyond it; empty in a prefill
    """

    nodes: tuple[int, ...] | None
    at_hand: tuple[int, ...]
    cause: Cause
    started: float


class Verifying:
    """One life of a text at the target, from `opened` on.

    earlier  the machine of its life before

    course   what is known of texts like this one; None: its drafter never rests
    served   when it was last computed for, by the schedule's count
    went_along  it was in its last pass because others had a reason to start
    reports  what may have to be said again, over all lives of the text
    """

    def __init__(
        self, opened: Open, lane: Lane, known: Known, earlier: "Verifying | None", now: float
    ) -> None:
        self.opened = opened
        self.lane = lane
        self.course: Course | None = None
        self.served = 0
        self.went_along = False
        self._known = known
        self._num_texts = 1  # that share the passes, when one was last thought of
        self._rested = False  # when a pass was last thought of
        self.reports: Reports = Reports() if earlier is None else earlier.reports
        before = CommittedText(opened.key) if earlier is None else earlier.tree.text
        self._missed = missed_of(opened, before)
        tokens = opened.tokens + self._missed
        self.finished = opened.limits.trim(len(opened.tokens), self._missed)[1] is not None
        self.tree: SpeculationTree = SpeculationTree(
            opened.key,
            tokens,
            max_nodes=MAX_NODES,
            first_child_wins=opened.rule is not Rule.COUPLED,
        )
        # Only a prompt that is read has logprobs.
        is_new = opened.sampling.scores_prompt or (known.fixed_rows and earlier is None)
        lane.begin(self.tree.text, keep=not is_new)
        self.slots = lane.slots
        self.ready_at = now  # since when the target has been able to start a pass
        self._running: _Pass | None = None
        self._number = 0  # of the last pass
        self._received = Received()
        self._waiting = Waiting(opened, known.costs, known.acceptance)
        self._lookup = LookupSource(known.acceptance)
        self._lookup.open(opened, tokens)
        self._attempt = opened.attempt  # drafts of another are stale; coupled texts have only this
        self._done_root = 0  # root under which the drafter has nothing more
        self._stale_reported = 0  # <= tree.num_stale

    def begin(self) -> Sequence[SharedAction]:
        """Say again what the coordinator has missed."""
        if not self._missed:
            return ()
        return (Send(repeated(self.opened, self.tree.text, self._missed, self.reports)),)

    def handle(self, event: Event, now: float) -> Sequence[SharedAction]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        match event:
            case Arrived(Draft() as message):
                self._on_draft(message, now)
            case Confirmed(length):
                return self._on_confirmed(length)
        return ()

    def _on_draft(self, message: Draft, now: float) -> None:
        first_of_life = self._received.add(message)
        if not self._is_judgeable(message):
            # Nothing worth waiting for will come before the drafter has heard of this attempt.
            self.tree.num_stale += len(message.tokens)
            return
        if self.course is not None:
            self.course.heard()
        self._waiting.heard(message, now, first_of_life=first_of_life)
        self.tree.attach(Graft.of(message))
        if message.done:
            self._done_root = message.parent_hash

    def _is_judgeable(self, draft: Draft) -> bool:
        """Whether the drafts may be judged under the rule of the text."""
        if self.opened.rule is Rule.COUPLED:
            return True
        return draft.attempt == self._attempt and len(draft.proposals) == len(draft.tokens)

    def _on_confirmed(self, length: int) -> Sequence[SharedAction]:
        self.reports.forget(length)
        # The coordinator is behind while a verdict is on its way; if none can follow it, it was
        # lost.
        if not self.finished or length == len(self.tree.text):
            return ()
        return (gap(self.opened.session, self.opened.incarnation, len(self.tree.text)),)

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
        """What is to be prefilled next; empty if a pass can take what is missing."""
        is_alone = bool(self._known.fixed_rows)
        return next_chunk(self.slots, self.tree.text.tokens, self.opened, is_alone=is_alone)

    @property
    def may_copy(self) -> bool:
        """Whether its lane may have what another has computed."""
        return self._known.fixed_rows is None and not self.opened.sampling.scores_prompt

    @property
    def num_missing(self) -> int:
        """Committed tokens that the cache lacks."""
        return len(self.tree.text) - self.slots.prefix_len

    @property
    def is_catching_up(self) -> bool:
        """Whether the next pass can only feed what is missing (reproducible mode)."""
        return self._known.fixed_rows is not None and self.num_missing > 1

    def reason(self, now: float) -> Cause | None:
        """The launch rule. None: wait until `deadline`."""
        if self.is_catching_up:
            return Cause.ALONE
        most = self._num_drafts_max()
        if (cause := self._why_alone(most)) is not None:
            return cause
        wanted = min(self.opened.policy.launch_min, most)
        is_met = len(self.tree.best_chain(wanted)) == wanted
        if is_met or self._done_root == self.tree.root:
            return Cause.READY
        if self._lookup.is_worth_starting(wanted):
            return Cause.READY
        return self._waiting.reason(wanted, self._num_texts, is_late=now >= self.deadline)

    @property
    def deadline(self) -> float:
        """Until when drafts are waited for."""
        return self.ready_at + self._waiting.limit_s

    @property
    def num_awaited(self) -> float:
        """Tokens that the drafts that are waited for are expected to bring."""
        return self._num_right(min(self.opened.policy.launch_min, self._num_drafts_max()))

    @property
    def num_at_hand(self) -> float:
        """Tokens that the drafts that are here are expected to bring."""
        return self._num_right(len(self.tree.best_chain(self._num_drafts_max())))

    def _num_right(self, num_drafts: int) -> float:
        return num_expected([self._known.acceptance.chance(FIRST_OF_MODEL)] * num_drafts) - 1.0

    def waits(self) -> None:
        """There was no reason to start."""
        self._waiting.began()

    def _num_drafts_max(self) -> int:
        """Most drafts worth verifying now: a pass feeds the missing committed tokens as well."""
        num_rows = self._known.fixed_rows or self.slots.num_tree_slots
        num_free = min(self.slots.num_tree_slots, num_rows) - self.num_missing
        k = self.opened.policy.num_speculative_tokens
        return min(k, num_free, self.opened.limits.max_drafts(len(self.tree.text)))

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

    def at_hand(self) -> Sequence[Node]:
        """The drafts that a pass could verify now, those of our own included."""
        if self.is_catching_up:
            return ()
        most = self._num_drafts_max()
        self._lookup.grow(self.tree, most)
        return self.tree.best_chain(most)

    def chances(self, nodes: Sequence[Node]) -> Sequence[float]:
        """That each is right, given that those before it are."""
        return [self._known.acceptance.chance(self._lookup.kind_of(node)) for node in nodes]

    def launch(
        self, at_hand: Sequence[Node], num_drafts: int, cause: Cause | None, now: float
    ) -> Part:
        """Verify the first so many of what is at hand.

        cause  why the pass starts; None: others have a reason, and this text goes along
        """
        missing = self.tree.text.tokens[self.slots.prefix_len :]
        if cause is None:
            self._waiting.went_along()
            cause = Cause.CHEAP
        else:
            self._waiting.started(cause, self.ready_at)
        if self.is_catching_up:
            assert self._known.fixed_rows is not None
            feed = self.slots.feed(missing[: min(self._known.fixed_rows, len(missing) - 1)])
            return self._part(feed, None, cause, now)
        chain = at_hand[:num_drafts]
        if chain and cause is Cause.ALONE:
            cause = Cause.READY
        parents = [None, *(node.key for node in chain)]
        pairs = zip(chain, parents, strict=False)
        nodes = [(node.key, parent, node.token, node.position) for node, parent in pairs]
        feed = self.slots.feed(missing, nodes)
        keys, judge = tuple(node.key for node in at_hand), judge_of(self.opened, chain)
        return self._part(feed, keys[: len(chain)], cause, now, judge, keys)

    def _part(
        self,
        feed: Feed,
        nodes: tuple[int, ...] | None,
        cause: Cause,
        now: float,
        judge: Judge | None = None,
        at_hand: tuple[int, ...] = (),
    ) -> Part:
        self._number += 1
        self._running = _Pass(nodes, at_hand, cause, now)
        num_asked = 0 if nodes is None else 1 + len(nodes)
        return Part(
            self.opened,
            self._number,
            self.tree.text.tokens,
            feed,
            num_asked,
            tuple(p + 1 for p in feed.positions[len(feed.positions) - num_asked :]),
            judge,
            scored_by(feed, self.opened),
        )

    # -- the verdict ------------------------------------------------------------------------------

    def computed(self, outcome: Outcome, model_us: int, now: float) -> Sequence[SharedAction]:
        """What the pass that is running has said; it took so long."""
        running, self._running = self._running, None
        assert running is not None
        if running.nodes is None:
            self.ready_at = now
            return tell_prompt(self.opened, self.slots.prefix_len, outcome.logprobs)
        accepted = outcome.num_accepted
        if accepted is None:
            chain = [self.tree.nodes[key] for key in running.nodes]
            accepted = num_equal(chain, outcome.tokens)
        return self._commit(running, accepted, outcome, model_us, now)

    def _commit(
        self, running: _Pass, accepted: int, outcome: Outcome, model_us: int, now: float
    ) -> Sequence[SharedAction]:
        base_len, base_hash = len(self.tree.text), self.tree.root
        chain = [self.tree.nodes[key] for key in running.nodes or ()]
        tokens = outcome.tokens[: accepted + 1]
        self._learn(running, accepted, tokens)
        tokens, reason = self.opened.limits.trim(base_len, tokens)
        self.finished = reason is not None
        path, num_dead = self.tree.advance(tokens)
        self._lookup.extend(tokens)
        is_new_attempt = self.opened.rule is not Rule.COUPLED and accepted < len(chain)
        if is_new_attempt:
            # What was judged and is still there, on a path that came back, is not judged again.
            num_dead += self.tree.clear()
            self._attempt += 1
        move = self.slots.advance(path, self.tree.nodes)
        if is_new_attempt:
            # The last token is always fed again, also if it is the draft that was rejected.
            self.slots.truncate(min(self.slots.prefix_len, len(self.tree.text) - 1))
        wait_s, pass_s = running.started - self.ready_at, now - running.started
        self._waiting.told(self.tree.root, now)
        self.ready_at = now
        num_stale = self.tree.num_stale - self._stale_reported
        self._stale_reported = self.tree.num_stale
        num_accepted = min(accepted, len(tokens))
        sources = tuple(node.source for node in chain[:num_accepted])
        verdict = Verdict(
            session=self.opened.session,
            incarnation=self.opened.incarnation,
            base_len=base_len,
            base_hash=base_hash,
            tokens=tokens,
            acks=self._received.acks(),
            cause=running.cause,
            num_drafted=len(chain),
            num_accepted=num_accepted,
            num_rolled_back=num_dead,
            num_stale=num_stale,
            wait_us=round(wait_s * 1e6),
            model_us=model_us,
            host_us=max(0, round(pass_s * 1e6) - model_us),
            drafter_us=self._received.take_model_us(),
            rejected=tuple(node.token for node in chain[accepted:]),
            attempt=self._attempt,
            logprobs=outcome.logprobs and outcome.logprobs.part(0, len(tokens)),
            sources=sources if any(sources) else (),
        )
        self.reports.add(base_len, verdict.logprobs)
        return (Send(verdict),) if move is None else (Send(verdict), MoveRows((move,)))

    def _learn(self, running: _Pass, accepted: int, tokens: Sequence[int]) -> None:
        """What became of the drafts that were at hand."""
        at_hand = [self.tree.nodes[key] for key in running.at_hand]
        num_verified = len(running.nodes or ())
        chain, num_right = judged(self.opened, at_hand, num_verified, accepted, tokens)
        for index, node in enumerate(chain[: num_right + 1]):
            self._known.acceptance.add(self._lookup.kind_of(node), right=index < num_right)
        if any(node.source != NGRAM_SOURCE for node in chain):
            self._waiting.had_drafts()

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.tree.check()
        assert self._stale_reported <= self.tree.num_stale
        self._received.check()
        self._lookup.check(self.tree)
        self._known.acceptance.check()
