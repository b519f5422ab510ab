"""The drafts of a text at the target (pure).

It knows which drafts there are and which are the likeliest, and learns how often each kind is
right.

Theory of operation
-------------------
Drafts come from drafters, or are copied from earlier text right when a pass starts (`lookup.py`).
All are nodes of one tree. How often drafts are right is learnt for each kind of draft: for a
model's by the score, for a copy by how many tokens before it are the same.

Under coupled verification a pass takes the likeliest nodes of the tree. They form a *subtree* with
the root, since a node is never likelier than its parent. The rows of the likeliest path come first,
so that its tokens lie where committed tokens belong, and nothing moves in the cache if they are
accepted. Then the target's own choices are followed down the subtree, to the first choice that was
not drafted: that one is the token that the pass adds by itself.

Under the classical rules, and in reproducible mode, where every row must see its cache in one
order, a pass takes a chain, which is a subtree of one path. Under the classical rules the scores of
drafts are not used: there nothing may depend on the tokens that are to be judged (docs/adr/0003).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from node.economics import FIRST_OF_HEADS, FIRST_OF_MODEL, Kind, kind_of_score
from proto.messages import (
    COPIES,
    HEADS_SOURCE,
    MODEL_SOURCE,
    OWN_SOURCES,
    Ack,
    Draft,
    Hit,
    Open,
    Rule,
)
from proto.tree import Graft, Node, SpeculationTree
from target_node.accepting import Judged, Siblings
from target_node.known import Known
from target_node.lookup import LookupSource

# -- received --------------------------------------------------------------------------------------

# Which of its numbered Draft messages have arrived from each source.

MAX_GAPS = 64


@dataclass(slots=True)
class _Source:
    """The numbers that have arrived of the newest incarnation of one source."""

    incarnation: int
    number: int = 0  # every draft up to this number has arrived
    ahead: list[tuple[int, int]] = field(
        default_factory=list
    )  # ranges of numbers beyond a gap, by their start

    def add(self, first: int, last: int) -> None:
        """Note that the drafts of the numbers first..last have arrived."""
        self.ahead.append((first, last))
        self.ahead.sort()
        while self.ahead and self.ahead[0][0] <= self.number + 1:
            self.number = max(self.number, self.ahead.pop(0)[1])
        del self.ahead[MAX_GAPS:]


class Received:
    """Counts the Draft messages that have arrived of each source (at most MAX_SOURCES)."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._model_us = 0  # model time of the drafts since the last call of `take_model_us`

    def add(self, draft: Draft) -> bool:
        """Count a draft's arrival; True if it is the first of its incarnation.

        A draft of an earlier incarnation is as usable as any; only its numbers are ignored.
        """
        self._model_us += draft.model_us
        source = self._sources.get(draft.source)
        is_first = source is None or draft.incarnation > source.incarnation
        if source is None or is_first:
            source = self._sources[draft.source] = _Source(draft.incarnation)
        if draft.incarnation == source.incarnation:
            source.add(draft.first_number, draft.number)
        return is_first

    def take_model_us(self) -> int:
        """Return the model time (microseconds) of all drafts since the last call."""
        model_us, self._model_us = self._model_us, 0
        return model_us

    def acks(self) -> tuple[Ack, ...]:
        """Return for each source the highest number up to which all drafts have arrived."""
        return tuple(
            Ack(number, source.incarnation, source.number)
            for number, source in self._sources.items()
        )

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        for source in self._sources.values():
            assert len(source.ahead) <= MAX_GAPS
            assert all(first > source.number + 1 for first, _ in source.ahead)


# -- likeliest -------------------------------------------------------------------------------------

# Which drafts a text will most probably reach.

Chances = Mapping[int, float]
"""The chance that the text reaches a node, by path hash; likeliest first, parents first."""


def likeliest(tree: SpeculationTree, limit: int, chance: Callable[[Node], float]) -> Chances:
    """Return the `limit` nodes that the text will most probably reach, with their chances.

    chance  returns the chance that a node is right, given that its parent is
    """
    nodes = tree.nodes
    found: dict[int, float] = {}
    open_: list[tuple[float, int, int]] = []  # (minus chance, order of discovery, path hash)
    children, above, number = tree.children(tree.root), 1.0, 0
    while len(found) < limit:
        for key in children:
            heappush(open_, (-above * chance(nodes[key]), number, key))
            number += 1
        if not open_:
            break
        minus, _, key = heappop(open_)
        found[key] = above = -minus
        children = nodes[key].children
    return found


def likeliest_chain(tree: SpeculationTree, limit: int, chance: Callable[[Node], float]) -> Chances:
    """Return the nodes of the best chain, at most `limit`, with the chances to reach them."""
    found: dict[int, float] = {}
    above = 1.0
    for node in tree.best_chain(limit):
        above *= chance(node)
        found[node.key] = above
    return found


# -- drafts ----------------------------------------------------------------------------------------

MAX_NODES = 512  # more than drafters' trees have, because copies are added


class Drafts:
    """The drafts of a text that the target has, for one life of the text.

    tokens    the text as it is here, which may be longer than in its Open

    received  which Draft messages have arrived
    attempt   drafts of another attempt are stale; coupled texts have only one
    """

    def __init__(self, opened: Open, tokens: Sequence[int], known: Known) -> None:
        self._known = known
        self._is_coupled = opened.rule is Rule.COUPLED
        self.tree: SpeculationTree = SpeculationTree(
            opened.key, tokens, max_nodes=MAX_NODES, first_child_wins=not self._is_coupled
        )
        self.received = Received()
        self.attempt = opened.attempt
        self._is_tree = self._is_coupled and opened.policy.subtree and known.fixed_rows is None
        self._lookup = LookupSource(
            known.acceptance, opened, tokens, known.earlier, is_tree=self._is_tree
        )
        # By drafter: the root under which it has no more drafts to send, and that of its last ones.
        self._done_at: dict[int, int] = {}
        self._spoke_at: dict[int, int] = {}
        self._stale_reported = 0  # <= tree.num_stale

    # -- questions --------------------------------------------------------------------------------

    def is_judgeable(self, draft: Draft) -> bool:
        """True if the drafts of a message may be judged under the text's rule."""
        if self._is_coupled:
            return True
        return draft.attempt == self.attempt and len(draft.proposals) == len(draft.tokens)

    def are_all(self, wanted: int) -> bool:
        """True if no more drafts will come for this root, or copies are as good as `wanted`.

        Of several drafters, all must be done that have sent any for this root: another one may have
        died, or rest.
        """
        root = self.tree.root
        speaking = [source for source, at in self._spoke_at.items() if at == root]
        done = [source for source, at in self._done_at.items() if at == root]
        return (bool(done) and set(speaking) <= set(done)) or self._lookup.is_worth_starting(wanted)

    @property
    def are_there(self) -> bool:
        """True if the root has any children."""
        return bool(self.tree.children(self.tree.root))

    def num_in_chain(self, most: int) -> int:
        """Return how many drafts a pass could verify in one path, at most `most`."""
        return len(self.tree.best_chain(most))

    def at_hand(self, most: int) -> Chances:
        """Return the drafts that a pass of at most `most` drafts would verify now."""
        find = likeliest if self._is_tree else likeliest_chain
        return find(self.tree, most, self._chance)

    def fate(self, token: int, num_there: int, *, is_accepted: bool) -> Hit:
        """Return whether the first token of a pass had been drafted, and if not, why.

        num_there  number of drafts of this token when the pass began
        """
        if is_accepted:
            return Hit.HIT
        nodes = self.tree.nodes
        children = [nodes[key].token for key in self.tree.children(self.tree.root)]
        if token in children:
            return Hit.WIDTH if children.index(token) < num_there else Hit.TIMING
        return Hit.CONTENT if num_there else Hit.TIMING

    def along(self, tokens: Sequence[int]) -> tuple[Siblings, ...]:
        """Return the drafts at each position along the path of `tokens`, which follow the root."""
        found: list[Siblings] = []
        nodes, keys = self.tree.nodes, self.tree.children(self.tree.root)
        for token in tokens:
            children = tuple([nodes[key] for key in keys])
            found.append(Siblings(token, children))
            for node in children:
                if node.token == token:
                    keys = node.children
                    break
            else:
                break
        return tuple(found)

    def _chance(self, node: Node) -> float:
        """Return the chance that a draft is right, given that those before it are."""
        return self._known.acceptance.chance(self._kind_of(node, self.copies))

    @property
    def copies(self) -> Mapping[int, Kind]:
        """Return the kinds of the live copies (drafts copied from text), by path hash.

        The next pass begins a new mapping.
        """
        return self._lookup.kinds

    def _kind_of(self, node: Node, copies: Mapping[int, Kind]) -> Kind:
        """Return the kind of a draft, under which its acceptance is counted."""
        source = node.source
        if source in COPIES:
            return copies[node.key]
        if source not in OWN_SOURCES:
            source = MODEL_SOURCE  # all drafters count as one
        return kind_of_score(node.score, source) if self._is_coupled else (source, 0)

    # -- facts ------------------------------------------------------------------------------------

    def heard(self, draft: Draft) -> None:
        """Add the drafts of a message that may be judged to the tree."""
        self.tree.attach(Graft.of(draft))
        if draft.source in OWN_SOURCES:
            return
        if draft.parent_hash == self.tree.root:
            self._spoke_at[draft.source] = draft.parent_hash
        if draft.done:
            self._done_at[draft.source] = draft.parent_hash

    def add_copies(self, most: int) -> None:
        """Add copies of earlier text to the tree, for a pass of at most `most` drafts."""
        self._lookup.grow(self.tree, most)

    def were_there(self, judged: Judged) -> bool:
        """True if any of the drafts on which a pass has a result came from a drafter."""
        if not self._is_coupled:
            return bool(judged.verified)
        return any(
            node.source not in OWN_SOURCES for along in judged.along for node in along.drafts
        )

    def learn(self, judged: Judged) -> None:
        """Count for each draft whether it was right.

        Under coupled verification that is known also of drafts that were not verified.
        """
        add, copies = self._known.acceptance.add, judged.copies
        if not self._is_coupled:
            for index, node in enumerate(judged.verified[: len(judged.accepted) + 1]):
                add(self._kind_of(node, copies), right=index < len(judged.accepted))
            return
        for siblings in judged.along:
            token = siblings.token
            for node in siblings.drafts:
                add(self._kind_of(node, copies), right=node.token == token)
            first = next((one for one in siblings.drafts if one.source not in OWN_SOURCES), None)
            if first is not None:
                add(FIRST_OF_MODEL, right=first.token == token)
            first = next((one for one in siblings.drafts if one.source == HEADS_SOURCE), None)
            if first is not None:
                add(FIRST_OF_HEADS, right=first.token == token)

    def advance(self, tokens: Sequence[int], *, is_new_attempt: bool) -> tuple[list[int], int]:
        """Commit tokens; returns their path hashes and how many drafts died."""
        path, num_dead = self.tree.advance(tokens)
        self._lookup.extend(tokens)
        if is_new_attempt:
            # Drafts on the committed path may have been judged already; none is judged twice.
            num_dead += self.tree.clear()
            self.attempt += 1
        return path, num_dead

    def end(self) -> None:
        """Note that the text has ended, or is closed."""
        self._lookup.end()

    def take_num_stale(self) -> int:
        """Return how many drafts were stale (too late, or of no use) since the last call."""
        number = self.tree.num_stale - self._stale_reported
        self._stale_reported = self.tree.num_stale
        return number

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self.tree.check()
        assert self._stale_reported <= self.tree.num_stale
        self.received.check()
        self._lookup.check(self.tree)
        self._known.acceptance.check()


# -- a pass ----------------------------------------------------------------------------------------

# The order of the drafts in a pass.


def laid_out(tree: SpeculationTree, chosen: Iterable[int]) -> tuple[list[Node], tuple[int, ...]]:
    """Return the nodes of a subtree in the order of their rows, and the row that each follows.

    chosen  path hashes, likeliest first, parents first

    Row 0 is that of the root; the first node's is row 1.
    """
    children: dict[int, list[Node]] = {}
    for key in chosen:
        node = tree.nodes[key]
        children.setdefault(node.parent, []).append(node)
    nodes: list[Node] = []
    parents: list[int] = []
    pending = [(node, 0) for node in reversed(children.get(tree.root, ()))]
    while pending:
        node, parent = pending.pop()
        nodes.append(node)
        parents.append(parent)
        if (below := children.get(node.key)) is not None:
            row = len(nodes)
            pending += [(child, row) for child in reversed(below)]
    return nodes, tuple(parents)
