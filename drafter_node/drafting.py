"""One text at the drafter (pure): no clock, no socket, no model, and no other text.

Theory of operation
-------------------
The drafter holds a copy of the speculation tree and runs ahead of the last verdict that it knows.
When it computes, and for which texts, `scheduling.py` decides; here is what a text has to say:

    tip               the node to expand next, if there is one
    chunk, read       the prompt, or what is missing of a text, to be prefilled first   -> Part
    expand            feed the tip and what its path lacks                              -> Part
    proposed          the model's choice becomes a child: a draft            -> Send(Draft)
    idle              nothing to expand, and no answer: say it again, in time -> WaitUntil
    Arrived(Verdict)  move the root along the committed tokens; all else dies -> MoveRows

It is made with the Open that begins one life of the text. What is not of the present life never
comes this far (`node/follower.py`).

It never waits for an answer. It stops at `window` tokens ahead of its root, where a verdict is the
credit to go on, and below a token that ends the text. While verdicts say so it rests (RESTING).

Several queued verdicts are handled before the next tip is asked for, so only the last is expanded.

Every source numbers its drafts and every verdict echoes the highest number that came without a gap.
What two verdicts in a row lack is taken for lost, and all that is alive is sent again as one
message, which stands for every number so far; so is what no verdict answers (`reminding.py`). A
target that was opened anew has lost its tree: the first verdict of a new life is answered likewise.

Under the classical rules every draft is sampled and carries the distribution that it was sampled
from. A verdict that begins a new attempt (see `target_node/verifying.py`) ends all drafts, also
those on a path that came back: they may have been judged.
"""

from collections.abc import Sequence
from math import exp

from drafter_node.events import Children, Event, Part
from drafter_node.known import Known
from drafter_node.reminding import Reminder
from engine.slots import Feed
from node.events import Arrived, MoveRows, Send, SharedAction, WaitUntil, gap
from node.lanes import Lane
from proto.messages import Cause, Draft, Open, Rule, Verdict
from proto.tree import Diverged, Graft, Node, SpeculationTree

PREFILL_CHUNK = 256


class Drafting:
    """One life of a text at the drafter, from `opened` on.

    rests   the target is faster alone, by the newest verdict
    served  when it was last computed for, by the schedule's count
    """

    may_copy = True  # its lane may have what another has computed

    def __init__(self, opened: Open, lane: Lane, known: Known) -> None:
        self.opened = opened
        self.lane = lane
        self.rests = False
        self.served = 0
        self._known = known
        self.tree = SpeculationTree(
            opened.key,
            opened.tokens,
            max_nodes=lane.slots.num_tree_slots,
            first_child_wins=opened.rule is not Rule.COUPLED,
        )
        lane.begin(self.tree.text)
        self.slots = lane.slots
        self._expanding: int | None = None  # the node that the running forward expands
        self._forwards = 0  # made in this life
        self._unsent: list[int] = []  # live nodes not yet in any draft, parents first
        self._number = 0  # of the last draft sent in this life
        self._acked = 0  # <= _number; every draft up to it has arrived
        self._suspect = 0  # <= _number; lost, if the next verdict does not acknowledge it
        self._target_life = 0  # newest incarnation of the target in a verdict; 0: none heard yet
        self._said_done = 0  # root under which the target knows that nothing more will come
        self._model_us = 0  # spent since the last draft
        self._attempt = opened.attempt  # of the newest verdict
        self._reminder = Reminder(known.answers)

    def begin(self) -> Sequence[SharedAction]:
        """Nothing is said before there is a draft."""
        return ()

    def handle(self, event: Event, now: float) -> Sequence[SharedAction]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        match event:
            case Arrived(Verdict() as message):
                return self._on_verdict(message, now)
        return ()

    # -- the text ---------------------------------------------------------------------------------

    def _on_verdict(self, message: Verdict, now: float) -> Sequence[SharedAction]:
        opened = self.opened
        self._reminder.answered(now)
        try:
            news = self.tree.news(message.base_len, message.base_hash, message.tokens)
        except Diverged:
            news = None
        if news is None:
            return (gap(opened.session, opened.incarnation, len(self.tree.text)),)
        path, _ = self.tree.advance(news)
        self.rests = message.cause is Cause.RESTING
        is_new_attempt = message.attempt != self._attempt
        if is_new_attempt:
            self._attempt = message.attempt
            self.tree.clear()
        move = self.slots.advance(path, self.tree.nodes)
        if is_new_attempt:
            # The last token may have been fed already, but nothing below it is left to go on from.
            self.slots.truncate(min(self.slots.prefix_len, len(self.tree.text) - 1))
        self._unsent = [key for key in self._unsent if key in self.tree.nodes]
        moves = () if move is None else (MoveRows((move,)),)
        if self._is_something_lost(message, opened.incarnation):
            self._suspect = 0
            return (*moves, *self._send_all(now, done=False))
        self._suspect = self._number
        return (*moves, *self._send_unsent(now))

    def _is_something_lost(self, message: Verdict, life: int) -> bool:
        """Whether the target has not got, or has no more, what we sent in this life of ours."""
        if message.incarnation < self._target_life:
            return False
        reopened = 0 < self._target_life < message.incarnation
        self._target_life = message.incarnation
        if reopened:
            self._acked = 0
        for ack in message.acks:
            if (ack.source, ack.incarnation) == (self._known.source, life):
                self._acked = max(self._acked, min(ack.number, self._number))
        return self._acked < (self._number if reopened else self._suspect)

    # -- drafting ---------------------------------------------------------------------------------

    @property
    def tip(self) -> int | None:
        """The node to expand next, or None if there is nothing more to offer under this root."""
        limits, text = self.opened.limits, self.tree.text
        chain = self.tree.best_chain(self.opened.policy.window)
        room = min(self.opened.policy.window, limits.max_drafts(len(text)))
        if len(chain) >= room or len(text) + len(chain) >= self._known.max_len:
            return None
        if len(self.tree.nodes) >= self.tree.max_nodes:
            return None
        if sum(node.score for node in chain) < self.opened.policy.min_score:
            return None
        last = chain[-1].token if chain else text.tokens[-1]
        generated = bool(chain) or len(text) > self.opened.num_prompt
        if generated and last in limits.stop_ids:
            return None
        return chain[-1].key if chain else self.tree.root

    def chance_of(self, tip: int) -> float:
        """The estimated chance that the text comes to `tip`, and needs what follows it."""
        score, key = 0.0, tip
        while key != self.tree.root:
            score += self.tree.nodes[key].score
            key = self.tree.nodes[key].parent
        return exp(score)

    @property
    def chunk(self) -> Sequence[int]:
        """What is to be prefilled next; empty if a forward can take what is missing."""
        text = self.tree.text.tokens
        return self.slots.next_chunk(text, len(text), PREFILL_CHUNK)

    def read(self, tip: int) -> Part:
        """Prefill the next chunk; the last one expands the root."""
        feed = self.slots.feed_prefix(self.chunk)
        is_last = self.slots.prefix_len == len(self.tree.text) and tip == self.tree.root
        return self._part(feed, tip if is_last else None)

    def expand(self, tip: int) -> Part:
        """Feed what the cache lacks of the path to `tip`, and choose what follows it."""
        missing = self.tree.text.tokens[self.slots.prefix_len :]
        return self._part(self.slots.feed(missing, self._unfed(tip)), tip)

    def _part(self, feed: Feed, parent: int | None) -> Part:
        self._expanding = parent
        self._forwards += 1
        opened = self.opened
        drafted: tuple[int, ...] = ()
        if opened.sampling.has_processors and parent is not None:
            drafted = self._path_to(parent)
        return Part(
            opened,
            self._forwards,
            self.tree.text.tokens,
            feed,
            None if parent is None else feed.positions[-1] + 1,
            None if opened.rule is Rule.COUPLED else opened.incarnation,
            drafted,
        )

    def _path_to(self, tip: int) -> tuple[int, ...]:
        """The tokens from the root to `tip`."""
        if tip == self.tree.root:
            return ()
        return tuple(self.tree.path_to(self.tree.nodes[tip].position + 1, tip) or ())

    def _unfed(self, tip: int) -> list[tuple[int, int | None, int, int]]:
        """The nodes from the root to `tip` that the cache lacks, as `SlotMap.feed` takes them."""
        nodes: list[tuple[int, int | None, int, int]] = []
        key = tip
        while key != self.tree.root and key not in self.slots:
            node = self.tree.nodes[key]
            parent = None if node.parent == self.tree.root else node.parent
            nodes.append((key, parent, node.token, node.position))
            key = node.parent
        return nodes[::-1]

    def proposed(self, children: Children, model_us: int, now: float) -> Sequence[SharedAction]:
        """What the forward that was running has chosen; it took so long."""
        self._model_us += model_us
        parent, self._expanding = self._expanding, None
        if parent is None or (parent != self.tree.root and parent not in self.tree.nodes):
            return ()
        is_root = parent == self.tree.root
        length = len(self.tree.text) if is_root else self.tree.nodes[parent].position + 1
        before = set(self.tree.children(parent))
        tokens = children.tokens
        drafts = (tokens, (-1,) * len(tokens), children.scores, children.proposals)
        self.tree.attach(Graft(self._known.source, parent, length, *drafts))
        self._unsent += [key for key in self.tree.children(parent) if key not in before]
        return self._send_unsent(now)

    def idle(self, now: float) -> Sequence[SharedAction]:
        """There is nothing to expand."""
        return self._finish_root(now) or self._remind(now)

    def _finish_root(self, now: float) -> Sequence[SharedAction]:
        """Say once per root that nothing more will come, if the target may be waiting for more."""
        if self._said_done == self.tree.root:
            return ()
        if self._is_launch_met() and not self._unsent:
            return ()
        return self._send_all(now, done=True)

    def _remind(self, now: float) -> Sequence[SharedAction]:
        """Say again what should have been answered by now, or wait until it should."""
        due_at = self._reminder.due_at()
        if due_at is None or self._acked == self._number:
            return ()
        if now < due_at:
            return (WaitUntil(due_at),)
        self._reminder.reminded(now)
        return self._send_all(now, done=self._said_done == self.tree.root)

    def _is_launch_met(self) -> bool:
        """Whether the target can start a pass with the drafts that are there."""
        return len(self._first_chain()) == self._num_wanted()

    def _num_wanted(self) -> int:
        """With how many drafts the target starts a pass."""
        policy, limits = self.opened.policy, self.opened.limits
        return min(policy.launch_min, limits.max_drafts(len(self.tree.text)))

    def _first_chain(self) -> list[Node]:
        """Those of them that are there."""
        return self.tree.best_chain(self._num_wanted())

    # -- sending ----------------------------------------------------------------------------------

    def _send_unsent(self, now: float) -> Sequence[SharedAction]:
        """Send new drafts, unless they had better wait for more."""
        if not self._unsent or self._holds_back():
            return ()
        nodes = [self.tree.nodes[key] for key in self._unsent]
        first = nodes[0]
        number = self._number + 1
        return (self._draft(now, first.parent, first.position, nodes, number, done=False),)

    def _holds_back(self) -> bool:
        """Whether the target can do nothing with the unsent drafts yet.

        The first draft of a life goes at once: the target waits only for a drafter that it hears.
        Under the classical rules all do: the end of drafting, which sends what was held back,
        depends on what was drafted, and then so would which drafts are judged (docs/adr/0003).
        """
        if self._number == 0 or self.opened.rule is not Rule.COUPLED:
            return False
        chain = self._first_chain()
        if any(node.key in self._unsent for node in chain):
            return len(chain) < self._num_wanted()
        return len(self._unsent) < self.opened.policy.group

    def _send_all(self, now: float, *, done: bool) -> Sequence[SharedAction]:
        """One message of every live node, in place of all that was sent before."""
        if done:
            self._said_done = self.tree.root
        nodes = list(self.tree.below(self.tree.root))
        return (self._draft(now, self.tree.root, len(self.tree.text), nodes, 1, done=done),)

    def _draft(
        self,
        now: float,
        parent: int,
        length: int,
        nodes: Sequence[Node],
        first_number: int,
        *,
        done: bool,
    ) -> Send:
        self._reminder.said(now)
        self._number += 1
        self._unsent = []
        where = {node.key: index for index, node in enumerate(nodes)}
        assert all(node.parent in where or node.parent == parent for node in nodes)
        model_us, self._model_us = self._model_us, 0
        return Send(
            Draft(
                session=self.opened.session,
                incarnation=self.opened.incarnation,
                source=self._known.source,
                first_number=first_number,
                number=self._number,
                parent_hash=parent,
                parent_len=length,
                tokens=tuple(node.token for node in nodes),
                parents=tuple(where.get(node.parent, -1) for node in nodes),
                scores=tuple(node.score for node in nodes),
                done=done,
                model_us=model_us,
                attempt=self._attempt,
                proposals=tuple(node.proposal for node in nodes if node.proposal is not None),
            )
        )

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.tree.check()
        assert self._acked <= self._number
        assert self._suspect <= self._number
        assert all(key in self.tree.nodes for key in self._unsent)
        assert len(self.tree.nodes) <= self.slots.num_tree_slots
