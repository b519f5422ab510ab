"""One text at the drafter (pure): no clock, no socket, no model, and no other text.

Theory of operation
-------------------
A `Drafting` holds a copy of the speculation tree and runs ahead of the last verdict that it knows.
`scheduling.py` decides when the drafter computes, and for which texts. The dispatcher
(`node/dispatcher.py`) hands over messages, and the schedule calls the rest:

    tips              the nodes that could be expanded next, if there are any
    chunk, read       prefill the prompt, or tokens that the cache lacks, first         -> Part
    expand            feed such nodes, and the committed tokens that the cache lacks    -> Part
    proposed          the tokens that the model has chosen become children: drafts
    send              the drafts that are not held back                       -> Send(Draft)
    idle              nothing to expand, and no answer: send again after a time -> WaitUntil
    Arrived(Verdict)  move the root along the committed tokens; other nodes die -> MoveRows

A `Drafting` is made with the Open that begins a life of the text. A verdict of an earlier life is
taken if it continues this text (`SpeculationTree.news`).

It drafts on without an answer, up to `window` tokens ahead of its root (the last committed token);
there, and below a token that ends the text, it stops until the next verdict. If the newest verdict
states a `least_chance`, the models take turns: it stops at as many drafts in a row as a pass
verifies, or where a node is less likely than `least_chance`, says that it is done, and pauses while
the target computes, because that uses this core too. While verdicts have the cause RESTING, the
drafter rests: it drafts and sends nothing. The target takes its first draft after a rest as the
sign that it has caught up. `frontier.py` chooses the next nodes, and so whether a tree or a chain
grows.

Several queued verdicts are handled before tips are asked for, so only the last root is expanded.
Draft steps of a chain whose drafts would not be sent yet are requested in one Compute, which ends
when a message arrives: the decisions between them would take a third of a small model's step.

Every source numbers its drafts, and every verdict states the highest number up to which all have
arrived. Drafts that two verdicts in a row do not acknowledge are taken for lost, and all live nodes
are sent again as one message, which stands for every number so far. The same is done if no verdict
answers (`sending.py`), and after the first verdict of a new life of the target, which has lost its
tree.

A row whose logits are not finite spoils all other rows of its forward. A text has one of these
states:

    SOUND      a draft's row is bad -> STOPPED; the root's row is bad -> REREADING
    STOPPED    the root moves -> SOUND
    REREADING  the root moves -> DOUBTED
    DOUBTED    as SOUND, but the root's row is bad -> GIVEN_UP; a forward is finite -> SOUND
    GIVEN_UP   for the rest of this life

Tips are offered in SOUND and in DOUBTED. The reason for a bad row of the root may be in the cache.
So the text is read anew, and nothing is copied to it from another lane before a forward is finite.
A forward that finds no memory counts as a bad row of the root.

Under the classical rules every draft is sampled, and carries the distribution from which it was
sampled. A verdict that begins a new attempt (see `target_node/verifying.py`) removes all drafts,
also those on its path: they may have been judged already.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from drafter_node.compute import Children, Part
from drafter_node.feeding import Change, HeadReading, Reading
from drafter_node.frontier import Frontier, Pace, Tip
from drafter_node.known import Known
from drafter_node.sending import Numbers, Reminder, Said, all_of, some_of
from drafter_node.tail import TextEnd
from engine.layout.slots import Feed
from node.events import Arrived, MoveRows, Send, SharedAction, TextEvent, WaitUntil, Wipe, gap
from node.lanes import Lane
from proto.messages import MAX_NODES_PER_DRAFT, Cause, Draft, Features, Open, Rule, Verdict
from proto.policies import drafts_ahead
from proto.tree import Diverged, Follows, Node, SpeculationTree

MAX_NODES = MAX_NODES_PER_DRAFT  # most live nodes of the drafter's tree; the target's has more


class State(Enum):
    """How a text has been affected by rows that are not finite; the table is above."""

    SOUND = auto()
    STOPPED = auto()
    REREADING = auto()
    DOUBTED = auto()
    GIVEN_UP = auto()


ONCE_MOVED: Mapping[State, State] = {
    State.STOPPED: State.SOUND,
    State.REREADING: State.DOUBTED,
}


@dataclass(frozen=True, slots=True)
class _Running:
    """The nodes that the running forward expands, and how many steps may follow it.

    expands    path hashes of the nodes whose children it chooses; empty if it only prefills
    num_ahead  number of further steps that may follow it at once
    """

    expands: tuple[int, ...] = ()
    num_ahead: int = 0


class Drafting:
    """The state machine that drafts one text, for one life: from `opened` to the next Open.

    rests   True: plain decoding is faster by the newest verdict, so this text is not drafted
    served  number of the last forward that computed for this text, as the schedule counts them
    """

    def __init__(self, opened: Open, lane: Lane, known: Known) -> None:
        self.opened = opened
        self.lane = lane
        self.rests = False
        self.served = 0
        self._known = known
        self.tree = SpeculationTree(
            opened.key,
            opened.tokens,
            max_nodes=MAX_NODES,
            first_child_wins=opened.rule is not Rule.COUPLED,
        )
        lane.begin(self.tree.text)
        self.slots = lane.slots
        self.frontier = Frontier(opened, self.tree, known.max_len, known.depth)
        make = HeadReading if known.is_head else Reading
        self._reading: Reading = make(self.slots, self.tree.text)
        self.end = TextEnd(self.tree, self.slots, known.source)
        self._pace = Pace(self.slots.num_tree_slots)
        self._state = State.SOUND
        self._running = _Running()
        self._forwards = 0  # number of forwards in this life
        self._unsent: list[int] = []  # live nodes not yet in any Draft message, parents first
        self._has_drafted = False  # a Draft message with nodes was sent in this life
        self._numbers = Numbers(known.source, opened.incarnation)
        self._said_done = 0  # root for which the target was told that no more drafts will come
        # Root and known end (bytes) at the last call of `go_on`.
        self._certain: tuple[int, bytes] = self.tree.root, b""
        self._num_steps, self._model_us = 0, 0  # since the last Draft message
        self._attempt = opened.attempt  # that of the newest verdict
        # With how many drafts in a row the target starts a pass, by the newest verdict.
        self._num_awaited = opened.policy.launch_min
        self._least = 0.0  # the newest verdict's `least_chance`; 0: this side drafts on
        self._reminder = Reminder(known.answers)

    def begin(self) -> Sequence[SharedAction]:
        """Return no actions: there is nothing to send before there is a draft."""
        return ()

    def handle(self, event: TextEvent, now: float) -> Sequence[SharedAction]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Arrived(Verdict() as message):
                return self._on_verdict(message, now)
            case Arrived(Features() as message):
                self._reading.heard(message)
        return ()

    # -- the text ---------------------------------------------------------------------------------

    def _on_verdict(self, message: Verdict, now: float) -> Sequence[SharedAction]:
        opened = self.opened
        self._reminder.answered(now)
        self._pace.heard()
        try:
            news = self.tree.news(message.base_len, message.base_hash, message.tokens)
        except Diverged:
            news = None
        if news is None:
            return (gap(opened.session, opened.incarnation, len(self.tree.text)),)
        path, _ = self.tree.advance(news)
        if path:
            self._state = ONCE_MOVED.get(self._state, self._state)
        self.rests = message.cause is Cause.RESTING
        self._num_awaited = message.num_awaited
        self._least = message.least_chance
        is_new_attempt = message.attempt != self._attempt
        if is_new_attempt:
            self._attempt = message.attempt
            self.tree.clear()
            self.frontier.forget()
        else:
            self.frontier.moved()
        move = self.slots.advance(path, self._fed)
        if is_new_attempt:
            # The last token may be cached already; it is fed again to choose new children of it.
            self.slots.truncate(min(self.slots.prefix_len, len(self.tree.text) - 1))
            self._forget_steps()
        match self._reading.moved():
            case Change.ROOT if opened.rule is Rule.COUPLED:
                self.frontier.ask_again()
            case Change.ALL:
                self.tree.clear()
                self.frontier.forget()
                self._forget_steps()
        self._unsent = [key for key in self._unsent if key in self.tree.nodes]
        moves = () if move is None else (MoveRows((move,)),)
        is_lost = self._numbers.heard(message)
        if is_lost and not self.rests:
            self._numbers.trust()
            return (*moves, *self._send_all(now, done=False))
        self._numbers.suspect()
        return (*moves, *self.send(now))

    def go_on(
        self, tail: Sequence[int], said: bytes, follows: Follows, *, may_be_longer: bool = False
    ) -> None:
        """Note how the text goes on behind the committed tokens (`tail.py`).

        tail     the tokens of the end, as they are now
        said     the end in bytes
        follows  as for `SpeculationTree.prune`
        may_be_longer  True: longer tokens begin like the last one of the tail
        """
        self.end.prune(tail, said, follows)
        self.frontier.moved()
        self.frontier.knows(self.end.grow(tail, said, may_be_longer=may_be_longer))
        self.slots.advance((), self._fed)
        self._unsent = [key for key in self._unsent if key in self.tree.nodes]
        if (self.tree.root, said) != self._certain:
            self._certain = self.tree.root, said
            self._said_done = 0

    def _forget_steps(self) -> None:
        """Forget the steps that may follow the running forward: the cache was cut below them."""
        self._running = replace(self._running, num_ahead=0)

    @property
    def _fed(self) -> Container[int]:
        """Return keys of live nodes, and of steps that may follow the running forward."""
        nodes, running = self.tree.nodes, self._running
        if not running.num_ahead or running.expands[0] not in (self.tree.root, *nodes):
            return nodes
        return {*nodes, *(~index for index in range(running.num_ahead))}

    # -- drafting ---------------------------------------------------------------------------------

    @property
    def tips(self) -> Sequence[Tip]:
        """Return the nodes to expand next, the likeliest first; empty if none can be expanded."""
        if self._state not in (State.SOUND, State.DOUBTED):
            return ()
        found = self.frontier.tips()
        if not self._reading.is_ready:
            return found[:1] if self.chunk else ()
        if self._least:
            found = self._of_a_turn(found)
        num_nodes, policy = len(self.tree.nodes), self.opened.policy
        num_new = (self.tree.max_nodes - num_nodes) // policy.branches
        num_free = self.slots.num_free
        if self._known.is_translated:
            num_free -= len(self.end.unfed_above([tip.key for tip in found])) + 1
        return found[: max(0, min(num_new, num_free, self._pace.num_nodes(policy.width)))]

    def _of_a_turn(self, tips: Sequence[Tip]) -> list[Tip]:
        """Return those of these tips that the target waits for; [] ends the turn."""
        if len(self._first_chain()) == self._num_awaited_now():
            return []
        return [tip for tip in tips if tip.chance >= self._least]

    @property
    def num_read(self) -> int:
        """Return how many tokens of the text are in the cache, or will be after this forward."""
        return self.lane.slots.prefix_len

    @property
    def may_copy(self) -> bool:
        """True if tokens that are cached in another lane may be copied to this text's lane."""
        return self._state is State.SOUND

    @property
    def chunk(self) -> Sequence[int]:
        """Return the tokens to prefill next; empty if `expand` can feed all that are missing."""
        return self._reading.chunk(self._known.chunk)

    def read(self) -> Part:
        """Return the Part that prefills the next chunk; the last chunk also expands the root."""
        feed = self._reading.feed_chunk(self.chunk)
        is_last = self.slots.prefix_len == len(self.tree.text) and not self.frontier.has_tail
        return self._begin(feed, (self.tree.root,) if is_last else ())

    def expand(self, tips: Sequence[Tip], *, is_alone: bool = False) -> Part:
        """Return the Part that feeds missing committed tokens and these nodes to get children.

        is_alone  True: no other text waits for the drafter, so steps whose drafts would not be sent
                  yet may follow at once
        """
        keys = tuple(tip.key for tip in tips)
        nodes = [self.tree.nodes[key] for key in keys if key != self.tree.root]
        if self._known.is_translated:
            keys = self.end.asked_with(keys)
            nodes = [*self.end.unfed_above(keys), *nodes]
        feed = self._reading.feed(self.tree.rows_of(nodes))
        if not is_alone or len(keys) > 1 or not self._may_chain:
            return self._begin(feed, keys)
        return self._begin(feed, keys, self._feed_ahead(keys[0]))

    @property
    def _may_chain(self) -> bool:
        """True if steps below the likeliest child may follow a step at once.

        In a tree another node may be likelier. At home that is worth less than the turns of the
        loop between the steps; the tree grows at the sides of the chain.
        """
        is_tree = self.opened.policy.branches > 1
        return not is_tree or (self._known.is_at_home and self.opened.rule is Rule.COUPLED)

    def _feed_ahead(self, key: int) -> tuple[Feed, ...]:
        """Return feeds for the steps below this node that may follow at once, in a chain.

        They end with the step whose draft is sent, so that no draft is held up that the target
        could use before. They have slots in the cache by the names -1, -2 ... until their tokens
        are known.
        """
        root = self.tree.root
        position = len(self.tree.text) - 1 if key == root else self.tree.nodes[key].position
        num_new = (self.tree.max_nodes - len(self.tree.nodes)) // self.opened.policy.branches - 1
        room = (self.frontier.end - position - 2, self.slots.num_free, num_new)
        num_ahead = max(0, min(self._num_held_back(), *room))
        feeds, parent = [], None if key == root else key
        for index in range(num_ahead):
            feeds.append(self.slots.feed((), ((~index, parent, 0, position + 1 + index),)))
            parent = ~index
        return tuple(feeds)

    def _num_held_back(self) -> int:
        """Return how many more drafts in a row, after the existing ones, would not be sent yet.

        At home they all are: the target does nothing until the chain ends.
        """
        if self.opened.sampling.has_processors:
            return 0
        if self._known.is_at_home and self.opened.rule is Rule.COUPLED:
            return self.opened.policy.window
        if self._sends_at_once:
            return 0
        num_there, wanted = len(self._first_chain()), self._num_awaited_now()
        if num_there < wanted:
            return wanted - num_there - 1
        return self.opened.policy.group - len(self._unsent) - 1

    def _begin(self, feed: Feed, parents: tuple[int, ...], ahead: tuple[Feed, ...] = ()) -> Part:
        self._running = _Running(parents, len(ahead))
        self._forwards += 1
        opened = self.opened
        drafted: tuple[tuple[int, ...], ...] = ()
        if opened.sampling.has_processors or self._known.is_translated:
            drafted = tuple(map(self._path_to, parents))
        return Part(
            opened,
            self._forwards,
            self.tree.text.tokens,
            feed,
            len(parents),
            None if opened.rule is Rule.COUPLED else opened.incarnation,
            drafted,
            ahead,
            self.frontier.least_below(parents[0], self._least) if ahead else 0.0,
            self._reading.dtype,
        )

    def _path_to(self, key: int) -> tuple[int, ...]:
        """Return the tokens from the root to a node, the node's included; (): it is the root."""
        if key == self.tree.root:
            return ()
        return tuple(self.tree.path_to(self.tree.nodes[key].position + 1, key) or ())

    def proposed(
        self, children: Sequence[Children], model_us: int, now: float
    ) -> Sequence[SharedAction]:
        """Attach the children that the running forward proposed as drafts; return actions.

        children  for each expanded node, and then for each step that followed at once
        model_us  microseconds that the forward and these steps took
        """
        running, self._running = self._running, _Running()
        expanded = running.expands
        followed = children[len(expanded) :]
        self._num_steps += 1 + len(followed)
        if expanded:
            self._pace.stepped()
        self._forwards += len(followed)
        self._model_us += model_us
        first = [self._attach(*pair) for pair in zip(expanded, children, strict=False)]
        if running.num_ahead:
            self._follow(first[0], followed, running.num_ahead)
        if all(one.is_finite for one in children):
            if children:
                self._state = State.SOUND
            return ()
        said = () if self.rests else self._send_all(now, done=True)
        at = dict(zip(expanded, children, strict=False)).get(self.tree.root)
        return (*said, self._stop(is_at_root=at is not None and not at.is_finite))

    def failed(self, now: float) -> Sequence[SharedAction]:
        """Handle a forward that was not made for lack of memory; return actions.

        The tokens that it was to feed are not cached, so the text is read anew as after a bad row
        of the root.
        """
        running, self._running = self._running, _Running()
        self._follow(None, (), running.num_ahead)
        said = () if self.rests else self._send_all(now, done=True)
        return (*said, self._stop(is_at_root=True))

    def _stop(self, *, is_at_root: bool) -> Wipe:
        """Draft no more below this root, since a row was not finite; returns a wipe of the cache.

        is_at_root  True: the row of the root is bad, which may be because of the cache. So the text
                    is read anew; if that does not help, this life of the text has no more drafts.
                    False: a draft's row is bad, which has no consequences beyond this root
        """
        if not is_at_root:
            self._state = State.STOPPED
        elif self._state is State.DOUBTED:
            self._state = State.GIVEN_UP
        else:
            self._state = State.REREADING
        self.tree.clear()
        self.frontier.forget()
        self._unsent = []
        length = 0 if is_at_root else self.slots.prefix_len
        self.slots.truncate(length)
        return Wipe(self.lane.slots.lane, length)

    def _follow(self, key: int | None, followed: Sequence[Children], num_ahead: int) -> None:
        """Attach the results of the steps that followed at once, each to the child that it fed.

        key        the child that the first of them has fed; None: there is none
        num_ahead  number of steps that could follow; those that were not made give back their slots
        """
        for index in range(num_ahead):
            chosen = followed[index] if index < len(followed) else None
            if chosen is None or key is None:
                self.slots.rename(~index, None)
                key = None
            else:
                self.slots.rename(~index, key)
                key = self._attach(key, chosen)

    def _attach(self, parent: int, chosen: Children) -> int | None:
        """Attach children to a node; returns the first, None if it is not a new one."""
        if parent != self.tree.root and parent not in self.tree.nodes:
            return None
        chosen = self.end.fitting(parent, chosen)
        new = self.tree.grow(
            parent, chosen.tokens, chosen.scores, self._known.source, chosen.proposals
        )
        self._unsent += new
        self.frontier.expanded(parent)
        self.frontier.grew(parent, new)
        is_first = bool(new) and self.tree.nodes[new[0]].token == chosen.tokens[0]
        return new[0] if is_first else None

    def idle(self, now: float) -> Sequence[SharedAction]:
        """Send what should be sent or sent again if there is no node to expand; returns actions."""
        sent = self.send(now)  # new drafts are unsent if the last forward has ended just now
        return (*sent, *(self._finish_root(now) or self._remind(now)))

    def _finish_root(self, now: float) -> Sequence[SharedAction]:
        """Return a message that says no more drafts come, once for each root, if it is needed."""
        if self._said_done == self.tree.root:
            return ()
        is_enough = len(self._first_chain()) == self._num_awaited_now()
        # A target with other tokens counts other drafts, and may wait for more.
        if is_enough and not self._known.is_translated and not self._unsent:
            return ()
        return self._send_all(now, done=True)

    def _remind(self, now: float) -> Sequence[SharedAction]:
        """Return all drafts as a message if the answer is overdue, else until when to wait."""
        due_at = self._reminder.due_at()
        if due_at is None or self._numbers.are_acked:
            return ()
        if now < due_at:
            return (WaitUntil(due_at),)
        self._reminder.reminded(now)
        return self._send_all(now, done=self._said_done == self.tree.root)

    def _num_awaited_now(self) -> int:
        """Return with how many drafts in a row the target starts a pass."""
        return min(self._num_awaited, self.opened.limits.max_drafts(len(self.tree.text)))

    def _first_chain(self) -> list[Node]:
        """Return the best chain below the root, of at most as many nodes as the target wants."""
        return self.tree.best_chain(self._num_awaited_now())

    # -- sending ----------------------------------------------------------------------------------

    @property
    def target_waits(self) -> bool:
        """True if the target waits for these drafts, and no more may follow before its verdict."""
        is_ahead = drafts_ahead(self.opened.policy, takes_turns=self._least > 0)
        return not is_ahead and len(self._first_chain()) == self._num_awaited_now()

    def send(self, now: float) -> Sequence[SharedAction]:
        """Return a message with the new drafts, unless they are held back until there are more."""
        if not self._unsent or self._holds_back():
            return ()
        return (
            self._draft(now, some_of(self.tree, self._unsent), self._numbers.last + 1, done=False),
        )

    @property
    def _sends_at_once(self) -> bool:
        """True if every draft is sent as soon as it is made.

        The first draft of a life is: the target waits only for a drafter that it hears. Under the
        classical rules all are: the end of drafting, which sends the drafts that were held back,
        depends on what was drafted, and so would the choice of the drafts that are judged
        (docs/adr/0003). So are all of a drafter whose target counts other tokens than these. And
        all where costs decide how many are awaited, unless the models take turns: often no wait
        pays, and a pass that begins at once takes the drafts that are there (docs/LOG.md). And all
        at home, where no message is on its way.
        """
        is_judged = self.opened.rule is not Rule.COUPLED
        is_priced = self.opened.policy.prices_awaited and not self._least
        is_near = self._known.is_at_home
        return (
            not self._has_drafted or is_judged or is_priced or is_near or self._known.is_translated
        )

    def _holds_back(self) -> bool:
        """True if unsent drafts are kept: the target cannot use them yet, or decodes alone."""
        if self.rests or self._sends_at_once:
            return self.rests
        chain = self._first_chain()
        if any(node.key in self._unsent for node in chain):
            return len(chain) < self._num_awaited_now()
        return len(self._unsent) < self.opened.policy.group

    def _send_all(self, now: float, *, done: bool) -> Sequence[SharedAction]:
        """Return a message with every live node, which replaces all that were sent before."""
        if done:
            self._said_done = self.tree.root
        return (self._draft(now, all_of(self.tree), 1, done=done),)

    def _draft(self, now: float, said: Said, first_number: int, *, done: bool) -> Send:
        """Make a Draft message of these nodes; returns the action that sends it."""
        self._reminder.said(now)
        self._numbers.last += 1
        self._has_drafted |= bool(said.nodes)
        self._unsent = []
        num_steps, self._num_steps = self._num_steps, 0
        model_us, self._model_us = self._model_us, 0
        return Send(
            Draft(
                session=self.opened.session,
                incarnation=self.opened.incarnation,
                source=self._known.source,
                first_number=first_number,
                number=self._numbers.last,
                parent_hash=said.parent,
                parent_len=said.length,
                tokens=tuple([node.token for node in said.nodes]),
                parents=said.parents,
                scores=tuple([node.score for node in said.nodes]),
                done=done,
                model_us=model_us,
                num_steps=num_steps,
                attempt=self._attempt,
                proposals=tuple([n.proposal for n in said.nodes if n.proposal is not None]),
            )
        )

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.tree.check()
        self._numbers.check()
        self.frontier.check()
        self._reading.check()
        assert all(key in self.tree.nodes for key in self._unsent)
