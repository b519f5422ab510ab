"""What the target does next (pure): no clock, no socket, no model.

Theory of operation
-------------------
The target holds its own copy of the speculation tree, so it starts a pass without asking anybody:

    Arrived(Draft)   its nodes join the tree, or wait for their parent, or are stale
    Tick             start a pass if there is a reason to (below)      -> Compute | WaitUntil
    Computed         walk the target's own choices down the tree       -> Send(Verdict), MoveRows
    Arrived(Open)    start from the coordinator's text, keeping the cached prefix -> Allocate
                     what ours has beyond it was missed, and is said again        -> Send(Verdict)
    Confirmed        forget what need not be said again                           -> Send(Fault)

What is not of the present life of its text never comes this far (`node/follower.py`).

A pass feeds what the cache lacks of the text, the last token at least, and the best chain below it.
Row by row the target's own choice is compared with the draft; the accepted run and the target's
next token are the verdict. So verification is equality, and the text is the target's whatever was
drafted.

Under the classical rules the engine judges the drafts of a pass by the ratio of two distributions.
There the text is the target's only if no draft is judged twice and none is preferred for what it
is (docs/adr/0003): after a rejection a new *attempt* begins, for which the drafter drafts anew, and
a node has one child, the first.

A pass starts when the launch rule is met (enough drafts under the root, or the drafter has no
more, or what `lookup.py` has found is as good); at a deadline made of measured costs (LATE); or at
once, when no drafter is expected (ALONE, QUIET), when to wait costs more than it brings (CHEAP, see
`worth.py`) or to draft at all (RESTING, see `resting.py`). A drafter that let two deadlines pass is
not waited for until it is heard again: a dead one costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.slots import Feed, SlotMap
from node.acceptance import Acceptance
from node.costs import Costs
from node.events import Allocate, Arrived, Confirmed, MoveRows, Send, Tick, WaitUntil, gap
from node.price import num_worth
from proto.messages import (
    NGRAM_SOURCE,
    Cause,
    Draft,
    Open,
    Rule,
    Verdict,
)
from proto.tree import Graft, SpeculationTree
from target_node.accepting import judge_of, judged, num_equal
from target_node.events import Action, Compute, Computed, Event, Judge
from target_node.lookup import LookupSource
from target_node.reading import next_chunk, scored_by, tell_prompt
from target_node.received import Received
from target_node.reports import Reports, missed_of, repeated
from target_node.resting import Resting, kind_of
from target_node.waiting import Waiting

MAX_NODES = 128


@dataclass(frozen=True, slots=True)
class _Pass:
    """The pass that is running.

    nodes     the drafted path in it; None while prefilling
    at_hand   that path and what lies beyond it; empty in a prefill
    num_rows  0 in a prefill, also in one that ends in a token of its own
    """

    ticket: int
    nodes: tuple[int, ...] | None
    at_hand: tuple[int, ...]
    num_rows: int
    cause: Cause
    started: float


class Verifying:
    """The target's side of one session.

    fixed_rows  reproducible mode: every decoding pass has at most so many rows (the engine pads
                them to exactly as many), the prompt is prefilled alone, and no other session's
                cache is reused
    costs       of this node, over all texts
    """

    def __init__(
        self, *, num_slots: int, fixed_rows: int | None = None, costs: Costs | None = None
    ) -> None:
        self.fixed_rows = fixed_rows
        self._costs = costs or Costs()
        self._acceptance = Acceptance()
        self._resting = Resting()
        self.slots: SlotMap[int] = SlotMap(num_slots)
        self.opened: Open | None = None  # None: no session
        self.finished = False  # the text has come to its end
        self.tree = SpeculationTree(bytes(16), (), max_nodes=0)
        self._text_id: tuple[int, bytes] | None = None  # session and key of the text in the tree
        self._running: _Pass | None = None
        self._ticket = 0  # only grows, over all sessions
        self._received = Received()
        self._waiting: Waiting | None = None  # of the present life
        self._reports = Reports()
        self._lookup = LookupSource(self._acceptance)
        self._attempt = 0  # drafts of another one are stale; coupled texts have only this one
        self._done_root = 0  # root under which the drafter has nothing more
        self._ready_at = 0.0  # since when the target has been able to start a pass
        self._stale_reported = 0  # <= tree.num_stale

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        match event:
            case Tick():
                return self._tick(now)
            case Computed():
                return self._on_computed(event, now)
            case Arrived(Draft() as message):
                self._on_draft(message, now)
                return []
            case Arrived(Open() as message):
                return self._on_open(message, now)
            case Confirmed(length):
                return self._on_confirmed(length)
            case Arrived():
                return []
        raise AssertionError(f"unknown event {event}")

    # -- messages ---------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> list[Action]:
        same_session = self._text_id == (message.session, message.key)
        self._text_id = (message.session, message.key)
        self._reports = self._reports if same_session else Reports()
        missed = missed_of(message, self.tree.text) if same_session else ()
        tokens = message.tokens + missed
        # The last token is always fed again.
        kept = min(self.tree.text.common_len(tokens), len(tokens) - 1)
        # Only a prompt that is read has logprobs.
        is_new = message.sampling.scores_prompt or (self.fixed_rows and not same_session)
        self.slots.truncate(0 if is_new else kept)
        self.opened = message
        self.finished = message.limits.trim(len(message.tokens), missed)[1] is not None
        self.tree = SpeculationTree(
            message.key,
            tokens,
            max_nodes=MAX_NODES,
            first_child_wins=message.rule is not Rule.COUPLED,
        )
        self._attempt = message.attempt
        self._running = None
        self._received = Received()
        self._waiting = Waiting(message, self._costs, self._acceptance)
        self._resting.opened(kind_of(message), message.policy.rest_after)
        self._lookup.open(message, tokens)
        self._done_root = self._stale_reported = 0
        self._ready_at = now
        actions: list[Action] = [Allocate(message.limits.max_len)]
        if missed:
            actions.append(Send(repeated(message, self.tree.text, missed, self._reports)))
        return actions

    def close(self) -> None:
        """The cache stays as it is; the result of a running pass is worth nothing now."""
        self.opened = None
        self._running = None

    def _on_draft(self, message: Draft, now: float) -> None:
        assert self._waiting is not None
        first_of_life = self._received.add(message)
        if not self._is_judgeable(message):
            # Nothing worth waiting for will come before the drafter has heard of this attempt.
            self.tree.num_stale += len(message.tokens)
            return
        self._resting.heard()
        self._waiting.heard(message, now, first_of_life=first_of_life)
        self.tree.attach(Graft.of(message))
        if message.done:
            self._done_root = message.parent_hash

    def _is_judgeable(self, draft: Draft) -> bool:
        """Whether the drafts may be judged under the rule of the text."""
        if self.opened is None or self.opened.rule is Rule.COUPLED:
            return True
        return draft.attempt == self._attempt and len(draft.proposals) == len(draft.tokens)

    def _on_confirmed(self, length: int) -> list[Action]:
        assert self.opened is not None
        self._reports.forget(length)
        # The coordinator is behind while a verdict is on its way; if none can follow it, it was
        # lost.
        if not self.finished or length == len(self.tree.text):
            return []
        return [gap(self.opened.session, self.opened.incarnation, len(self.tree.text))]

    # -- starting a pass --------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Action]:
        opened, waiting = self.opened, self._waiting
        if opened is None or waiting is None or self._running is not None or self.finished:
            return []
        text = self.tree.text.tokens
        alone = self._why_alone(0) or Cause.ALONE
        if chunk := next_chunk(self.slots, text, opened, is_alone=bool(self.fixed_rows)):
            feed = self.slots.feed_prefix(chunk)
            num_asked = int(self.slots.prefix_len == len(text))
            return [self._launch(feed, () if num_asked else None, alone, now)]
        missing = text[self.slots.prefix_len :]
        if self.fixed_rows and len(missing) > 1:
            feed = self.slots.feed(missing[: min(self.fixed_rows, len(missing) - 1)])
            return [self._launch(feed, None, alone, now)]
        if (cause := self._reason_to_start(waiting, now)) is None:
            waiting.began()
            return [WaitUntil(self._ready_at + waiting.limit_s)]
        waiting.started(cause, now - self._ready_at)
        return [self._start_pass(missing, cause, now)]

    def _num_drafts_max(self) -> int:
        """Most drafts worth verifying now: a pass feeds the missing committed tokens as well."""
        assert self.opened is not None
        text_len = len(self.tree.text)
        num_rows = min(self.slots.num_tree_slots, self.fixed_rows or self.slots.num_tree_slots)
        num_free = num_rows - (text_len - self.slots.prefix_len)
        k = self.opened.policy.num_speculative_tokens
        return min(k, num_free, self.opened.limits.max_drafts(text_len))

    def _why_alone(self, most: int) -> Cause | None:
        """Why no drafter is expected, if a pass verifies at most so many drafts. None: one is."""
        assert self.opened is not None
        if self._resting.now:
            return Cause.RESTING
        return Cause.ALONE if most == 0 or not self.opened.policy.has_drafter else None

    def _reason_to_start(self, waiting: Waiting, now: float) -> Cause | None:
        """The launch rule. None: wait."""
        assert self.opened is not None
        most = self._num_drafts_max()
        if (cause := self._why_alone(most)) is not None:
            return cause
        wanted = min(self.opened.policy.launch_min, most)
        is_met = len(self.tree.best_chain(wanted)) == wanted
        if is_met or self._done_root == self.tree.root:
            return Cause.READY
        if self._lookup.is_worth_starting(wanted):
            return Cause.READY
        return waiting.reason(wanted, is_late=now >= self._ready_at + waiting.limit_s)

    def _start_pass(self, missing: Sequence[int], cause: Cause, now: float) -> Action:
        assert self.opened is not None
        most = self._num_drafts_max()
        self._lookup.grow(self.tree, most)
        chain = at_hand = self.tree.best_chain(most)
        if self.opened.policy.rest_after:
            chances = [self._acceptance.chance(self._lookup.kind_of(node)) for node in at_hand]
            chain = at_hand[: num_worth(chances, len(missing), self._costs)]
        if chain and cause is Cause.ALONE:
            cause = Cause.READY
        parents = [None, *(node.key for node in chain)]
        pairs = zip(chain, parents, strict=False)
        nodes = [(node.key, parent, node.token, node.position) for node, parent in pairs]
        feed = self.slots.feed(missing, nodes)
        keys, judge = tuple(node.key for node in at_hand), judge_of(self.opened, chain)
        return self._launch(feed, keys[: len(chain)], cause, now, judge, keys)

    def _launch(
        self,
        feed: Feed,
        nodes: tuple[int, ...] | None,
        cause: Cause,
        now: float,
        judge: Judge | None = None,
        at_hand: tuple[int, ...] = (),
    ) -> Action:
        assert self.opened is not None
        self._ticket += 1
        num_rows = 0 if feed.masks is None else len(feed.tokens)
        self._running = _Pass(self._ticket, nodes, at_hand, num_rows, cause, now)
        num_asked = 0 if nodes is None else 1 + len(nodes)
        positions = tuple(p + 1 for p in feed.positions[len(feed.positions) - num_asked :])
        sampling, scored = self.opened.sampling, scored_by(feed, self.opened)
        return Compute(self._ticket, feed, num_asked, positions, sampling, judge, scored)

    # -- the verdict ------------------------------------------------------------------------------

    def _on_computed(self, event: Computed, now: float) -> list[Action]:
        running = self._running
        if running is None or event.ticket != running.ticket:
            return []
        self._running = None
        if running.nodes is None:
            self._ready_at = now
            return tell_prompt(self.opened, self.slots.prefix_len, event.logprobs)
        accepted = event.num_accepted
        if accepted is None:
            chain = [self.tree.nodes[key] for key in running.nodes]
            accepted = num_equal(chain, event.tokens)
        return self._commit(running, accepted, event.tokens[: accepted + 1], event, now)

    def _commit(
        self, running: _Pass, accepted: int, tokens: tuple[int, ...], event: Computed, now: float
    ) -> list[Action]:
        assert self.opened is not None
        assert self._waiting is not None
        base_len, base_hash = len(self.tree.text), self.tree.root
        chain = [self.tree.nodes[key] for key in running.nodes or ()]
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
        wait_s, pass_s = running.started - self._ready_at, now - running.started
        self._measure(running, len(tokens), pass_s, wait_s + pass_s)
        self._waiting.told(self.tree.root, now)
        self._ready_at = now
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
            model_us=event.model_us,
            host_us=max(0, round(pass_s * 1e6) - event.model_us),
            drafter_us=self._received.take_model_us(),
            rejected=tuple(node.token for node in chain[accepted:]),
            attempt=self._attempt,
            logprobs=event.logprobs and event.logprobs.part(0, len(tokens)),
            sources=sources if any(sources) else (),
        )
        self._reports.add(base_len, verdict.logprobs)
        return [Send(verdict)] if move is None else [Send(verdict), MoveRows(move)]

    def _learn(self, running: _Pass, accepted: int, tokens: Sequence[int]) -> None:
        """What became of the drafts that were at hand."""
        assert self.opened is not None
        at_hand = [self.tree.nodes[key] for key in running.at_hand]
        num_verified = len(running.nodes or ())
        chain, num_right = judged(self.opened, at_hand, num_verified, accepted, tokens)
        for index, node in enumerate(chain[: num_right + 1]):
            self._acceptance.add(self._lookup.kind_of(node), right=index < num_right)
        if self._waiting is not None and any(node.source != NGRAM_SOURCE for node in chain):
            self._waiting.had_drafts()

    def _measure(self, running: _Pass, num_tokens: int, pass_s: float, round_s: float) -> None:
        """What a pass has cost; a prefill, however long, says nothing of the next pass."""
        if not running.num_rows:
            return
        rested = self._resting.now
        self._costs.passed(running.num_rows, num_tokens, pass_s, round_s)
        self._resting.passed(num_tokens, round_s)
        if rested and not self._resting.now and self._waiting is not None:
            self._waiting.woke()

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.tree.check()
        self.slots.check()
        assert self._stale_reported <= self.tree.num_stale
        self._received.check()
        self._lookup.check(self.tree)
        self._acceptance.check()
