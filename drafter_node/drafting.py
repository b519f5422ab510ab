"""What the drafter does next (pure): no clock, no socket, no model.

Theory of operation
-------------------
The drafter holds a copy of the speculation tree and runs ahead of the last verdict that it knows:

    Tick              pick the node to expand; feed it and what its path lacks    -> Compute
                      nothing to expand, and no answer: say it again, in time     -> WaitUntil
    Proposed          the model's choice becomes a child: a draft                 -> Send(Draft)
    Arrived(Verdict)  move the root along the committed tokens; all else dies     -> MoveRows
    Arrived(Open)     start from the coordinator's text, keeping the cached prefix -> Allocate

What is not of the present life of its text never comes this far (`node/follower.py`).

It never waits for an answer. It stops at `window` tokens ahead of its root, where a verdict is the
credit to go on, and below a token that ends the text. While verdicts say so it rests (RESTING).

Several queued verdicts are handled before the next Tick, so only the last one is expanded. A result
is named by the ticket of its Compute; a ticket of an earlier life means nothing any more.

Every source numbers its drafts and every verdict echoes the highest number that came without a gap.
What two verdicts in a row lack is taken for lost, and all that is alive is sent again as one
message, which stands for every number so far; so is what no verdict answers (`reminding.py`). A
target that was opened anew has lost its tree: the first verdict of a new life is answered likewise.

Under the classical rules every draft is sampled and carries the distribution that it was sampled
from. A verdict that begins a new attempt (see `target_node/verifying.py`) ends all drafts, also
those on a path that came back: they may have been judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_node.events import Action, Compute, Event, Proposed
from drafter_node.reminding import Reminder
from engine.slots import SlotMap
from node.events import Allocate, Arrived, Confirmed, MoveRows, Send, Tick, WaitUntil, gap
from proto.messages import (
    Cause,
    Draft,
    Open,
    Rule,
    Verdict,
)
from proto.tree import Diverged, Graft, Node, SpeculationTree

PREFILL_CHUNK = 256


@dataclass(slots=True)
class _InFlight:
    """The forward that is running. `parent` is the node that it expands; None while prefilling."""

    ticket: int
    parent: int | None


class Drafting:
    """One draft source and its session.

    source    number of this source in drafts and acks
    max_len   most tokens of a text that the model can read
    """

    def __init__(self, *, max_len: int, num_slots: int, source: int = 0) -> None:
        self.max_len = max_len
        self.source = source
        self.slots: SlotMap[int] = SlotMap(num_slots)
        self.opened: Open | None = None  # None: no session
        self.tree = SpeculationTree(bytes(16), (), max_nodes=0)
        self._in_flight: _InFlight | None = None
        self._ticket = 0  # only grows, over all sessions
        self._unsent: list[int] = []  # live nodes not yet in any draft, parents first
        self._number = 0  # of the last draft sent in this life
        self._acked = 0  # <= _number; every draft up to it has arrived
        self._suspect = 0  # <= _number; lost, if the next verdict does not acknowledge it
        self._target_life = 0  # newest incarnation of the target in a verdict; 0: none heard yet
        self._said_done = 0  # root under which the target knows that nothing more will come
        self._model_us = 0  # spent since the last draft
        self._attempt = 0  # of the newest verdict
        self._rests = False  # by the newest verdict
        self._reminder = Reminder()

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that an event asks for, at `now` (seconds of a monotonic clock)."""
        actions = self._decide(event, now)
        if any(isinstance(action, Send) for action in actions) and self._acked < self._number:
            self._reminder.said(now)
        return actions

    def _decide(self, event: Event, now: float) -> list[Action]:
        match event:
            case Tick():
                return self._tick(now)
            case Proposed():
                return self._on_proposed(event)
            case Arrived(Open() as message):
                return self._on_open(message)
            case Arrived(Verdict() as message):
                return self._on_verdict(message, now)
            case Arrived() | Confirmed():
                return []
        raise AssertionError(f"unknown event {event}")

    # -- the text ---------------------------------------------------------------------------------

    def _on_open(self, message: Open) -> list[Action]:
        # The last token is always fed again.
        common_len = self.tree.text.common_len(message.tokens)
        self.slots.truncate(min(common_len, len(message.tokens) - 1))
        self.opened = message
        self.tree = SpeculationTree(
            message.key,
            message.tokens,
            max_nodes=self.slots.num_tree_slots,
            first_child_wins=message.rule is not Rule.COUPLED,
        )
        self._attempt = message.attempt
        self._rests = False
        self._in_flight = None
        self._unsent = []
        self._number = self._acked = self._suspect = 0
        self._target_life = self._said_done = 0
        self._reminder.opened()
        return [Allocate(min(message.limits.max_len, self.max_len))]

    def close(self) -> None:
        """The cache stays as it is; the result of a running forward is worth nothing now."""
        self.opened = None
        self._in_flight = None

    def _on_verdict(self, message: Verdict, now: float) -> list[Action]:
        opened = self.opened
        assert opened is not None
        self._reminder.answered(now)
        try:
            news = self.tree.news(message.base_len, message.base_hash, message.tokens)
        except Diverged:
            news = None
        if news is None:
            return [gap(opened.session, opened.incarnation, len(self.tree.text))]
        path, _ = self.tree.advance(news)
        self._rests = message.cause is Cause.RESTING
        is_new_attempt = message.attempt != self._attempt
        if is_new_attempt:
            self._attempt = message.attempt
            self.tree.clear()
        move = self.slots.advance(path, self.tree.nodes)
        if is_new_attempt:
            # The last token may have been fed already, but nothing below it is left to go on from.
            self.slots.truncate(min(self.slots.prefix_len, len(self.tree.text) - 1))
        self._unsent = [key for key in self._unsent if key in self.tree.nodes]
        actions: list[Action] = [] if move is None else [MoveRows(move)]
        if self._is_something_lost(message, opened.incarnation):
            actions += self._send_all(done=False)
            self._suspect = 0
        else:
            self._suspect = self._number
            actions += self._send_unsent()
        return actions

    def _is_something_lost(self, message: Verdict, life: int) -> bool:
        """Whether the target has not got, or has no more, what we sent in this life of ours."""
        if message.incarnation < self._target_life:
            return False
        reopened = 0 < self._target_life < message.incarnation
        self._target_life = message.incarnation
        if reopened:
            self._acked = 0
        for ack in message.acks:
            if (ack.source, ack.incarnation) == (self.source, life):
                self._acked = max(self._acked, min(ack.number, self._number))
        return self._acked < (self._number if reopened else self._suspect)

    # -- drafting ---------------------------------------------------------------------------------

    def _tip(self) -> int | None:
        """The node to expand next, or None if there is nothing more to offer under this root."""
        assert self.opened is not None
        limits, text = self.opened.limits, self.tree.text
        chain = self.tree.best_chain(self.opened.policy.window)
        room = min(self.opened.policy.window, limits.max_drafts(len(text)))
        if len(chain) >= room or len(text) + len(chain) >= self.max_len:
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

    def _tick(self, now: float) -> list[Action]:
        if self.opened is None or self._in_flight is not None or self._rests:
            return []
        tip = self._tip()
        if tip is None:
            return self._finish_root() or self._remind(now)
        self._ticket += 1
        text = self.tree.text.tokens
        if chunk := self.slots.next_chunk(text, len(text), PREFILL_CHUNK):
            feed = self.slots.feed_prefix(chunk)
            parent = tip if self.slots.prefix_len == len(text) and tip == self.tree.root else None
        else:
            feed = self.slots.feed(text[self.slots.prefix_len :], self._unfed(tip))
            parent = tip
        self._in_flight = _InFlight(self._ticket, parent)
        position = None if parent is None else feed.positions[-1] + 1
        life = None if self.opened.rule is Rule.COUPLED else self.opened.incarnation
        sampling = self.opened.sampling
        drafted = self._path_to(tip) if sampling.has_processors else ()
        return [Compute(self._ticket, feed, position, sampling, life, drafted)]

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

    def _on_proposed(self, event: Proposed) -> list[Action]:
        self._model_us += event.model_us
        if self._in_flight is None or event.ticket != self._in_flight.ticket:
            return []
        parent = self._in_flight.parent
        self._in_flight = None
        if parent is None or (parent != self.tree.root and parent not in self.tree.nodes):
            return []
        is_root = parent == self.tree.root
        length = len(self.tree.text) if is_root else self.tree.nodes[parent].position + 1
        before = set(self.tree.children(parent))
        drafts = (event.tokens, (-1,) * len(event.tokens), event.scores, event.proposals)
        self.tree.attach(Graft(self.source, parent, length, *drafts))
        self._unsent += [key for key in self.tree.children(parent) if key not in before]
        return self._send_unsent()

    def _finish_root(self) -> list[Action]:
        """Say once per root that nothing more will come, if the target may be waiting for more."""
        if self._said_done == self.tree.root:
            return []
        if self._is_launch_met() and not self._unsent:
            return []
        return self._send_all(done=True)

    def _remind(self, now: float) -> list[Action]:
        """Say again what should have been answered by now, or wait until it should."""
        due_at = self._reminder.due_at()
        if due_at is None or self._acked == self._number:
            return []
        if now < due_at:
            return [WaitUntil(due_at)]
        self._reminder.reminded(now)
        return self._send_all(done=self._said_done == self.tree.root)

    def _is_launch_met(self) -> bool:
        """Whether the target can start a pass with the drafts that are there."""
        return len(self._first_chain()) == self._num_wanted()

    def _num_wanted(self) -> int:
        """With how many drafts the target starts a pass."""
        assert self.opened is not None
        policy, limits = self.opened.policy, self.opened.limits
        return min(policy.launch_min, limits.max_drafts(len(self.tree.text)))

    def _first_chain(self) -> list[Node]:
        """Those of them that are there."""
        return self.tree.best_chain(self._num_wanted())

    # -- sending ----------------------------------------------------------------------------------

    def _send_unsent(self) -> list[Action]:
        """Send new drafts, unless they had better wait for more."""
        if not self._unsent or self._holds_back():
            return []
        nodes = [self.tree.nodes[key] for key in self._unsent]
        first = nodes[0]
        return [self._draft(first.parent, first.position, nodes, self._number + 1, done=False)]

    def _holds_back(self) -> bool:
        """Whether the target can do nothing with the unsent drafts yet.

        The first draft of a life goes at once: the target waits only for a drafter that it hears.
        Under the classical rules all do: the end of drafting, which sends what was held back,
        depends on what was drafted, and then so would which drafts are judged (docs/adr/0003).
        """
        assert self.opened is not None
        if self._number == 0 or self.opened.rule is not Rule.COUPLED:
            return False
        chain = self._first_chain()
        if any(node.key in self._unsent for node in chain):
            return len(chain) < self._num_wanted()
        return len(self._unsent) < self.opened.policy.group

    def _send_all(self, *, done: bool) -> list[Action]:
        """One message of every live node, in place of all that was sent before."""
        if done:
            self._said_done = self.tree.root
        nodes = list(self.tree.below(self.tree.root))
        return [self._draft(self.tree.root, len(self.tree.text), nodes, 1, done=done)]

    def _draft(
        self, parent: int, length: int, nodes: Sequence[Node], first_number: int, *, done: bool
    ) -> Send:
        assert self.opened is not None
        self._number += 1
        self._unsent = []
        where = {node.key: index for index, node in enumerate(nodes)}
        assert all(node.parent in where or node.parent == parent for node in nodes)
        model_us, self._model_us = self._model_us, 0
        return Send(
            Draft(
                session=self.opened.session,
                incarnation=self.opened.incarnation,
                source=self.source,
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
        self.slots.check()
        assert self._acked <= self._number
        assert self._suspect <= self._number
        assert all(key in self.tree.nodes for key in self._unsent)
        if self.opened is not None:
            assert len(self.tree.nodes) <= self.slots.num_tree_slots
