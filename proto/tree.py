"""The content-addressed speculation tree, and the committed text that it grows on (pure).

Theory of operation
-------------------
A *path hash* names a whole text: `h([]) = 0`, `h(path + [token]) = blake2b(h(path), token)`, 8
bytes, with a key of the session. A node of the tree (a drafted token) is named by the hash of the
path that ends with it, so a draft means the same whenever it arrives and whoever made it. Lengths
are compared along with hashes.

    committed text  t0 t1 ... tn-1        named by path_hashes[0..n]; the last one names the root
    tree            nodes beyond the root; every node's parent is the root or another node

What happens to a drafted node depends on where its parent is:

    parent                          the node
    ------------------------------  ---------------------------------------------------------------
    the root or a live node         is attached; if the parent has a child with that token, the
                                    child stays as it is
    a committed position            is committed itself (same token), or stale (another token)
    a text longer than the root's   waits in a small buffer: its parent may still be on its way
    anything else                   stale

Advancing along committed tokens moves the root. The nodes below the new root survive; all others
die (they are removed).
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from math import exp

from proto.messages import Draft, Proposal

# Returns what of some bytes is left behind a token; None: the token contradicts them.
Follows = Callable[[bytes, int], bytes | None]
EMPTY_HASH = 0
MAX_ORPHANS = 64  # as many tokens as a drafter may be ahead: one late draft must not lose the rest


_STEP = struct.Struct("<QI")  # what is hashed: the parent's hash, and a token
_HASH = struct.Struct("<Q")


def path_hash(parent: int, token: int, key: bytes) -> int:
    """Return the hash of the path that is the path with hash `parent`, followed by `token`."""
    state = _keyed(key).copy()
    state.update(_STEP.pack(parent, token))
    hash_: int = _HASH.unpack(state.digest())[0]
    return hash_


@lru_cache(maxsize=256)
def _keyed(key: bytes) -> "blake2b":
    """Return a hash object that has read its key; cached, because that takes half of the time."""
    return blake2b(digest_size=8, key=key)


# For checks alone: they ask for the same nodes after every event.
_hashed_before = lru_cache(maxsize=1 << 16)(path_hash)


class Diverged(Exception):
    """Two verdicts contradict each other about a committed token."""


class CommittedText:
    """The committed tokens of a text, and the path hash of each of its prefixes."""

    def __init__(self, key: bytes, tokens: Sequence[int] = ()) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.path_hashes = [EMPTY_HASH]  # always one longer than tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def root(self) -> int:
        """Return the path hash of the whole text."""
        return self.path_hashes[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens and their path hashes."""
        hash_ = self.root
        for token in tokens:
            hash_ = path_hash(hash_, token, self.key)
            self.path_hashes.append(hash_)
        self.tokens += tokens

    def is_prefix(self, length: int, hash_: int) -> bool:
        """True if the text's first `length` tokens have the path hash `hash_`."""
        return length <= len(self) and self.path_hashes[length] == hash_

    def common_len(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest common prefix of this text and `tokens`."""
        limit = min(len(self), len(tokens))
        return next((i for i in range(limit) if self.tokens[i] != tokens[i]), limit)

    def continuation(
        self, base_len: int, base_hash: int, tokens: Sequence[int]
    ) -> Sequence[int] | None:
        """Return those of `tokens`, which follow the given base, that this text does not have yet.

        None: this text has no such base. Raises Diverged if the tokens contradict the text.
        """
        if not self.is_prefix(base_len, base_hash):
            return None
        overlap = min(len(self) - base_len, len(tokens))
        if tuple(self.tokens[base_len : base_len + overlap]) != tuple(tokens[:overlap]):
            raise Diverged(f"verdicts differ between positions {base_len} and {base_len + overlap}")
        return tokens[overlap:]


@dataclass(slots=True)
class Node:
    """A drafted token: a node of the speculation tree.

    key       path hash of the path that ends with this token
    parent    path hash of its parent: the root's or a live node's
    position  number of tokens before it on its path
    score     natural log of the estimated chance of the token given its path
    source    who drafted it (see MODEL_SOURCE in `proto.messages`)
    proposal  the distribution it was sampled from, for the classical rules
    children  path hashes of its children, in order of arrival, no two with the same token
    """

    key: int
    parent: int
    token: int
    position: int
    score: float
    source: int
    proposal: Proposal | None = None
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Graft:
    """Drafted tokens to attach below the path (parent_hash, parent_len); see `messages.Draft`."""

    source: int
    parent_hash: int
    parent_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    proposals: tuple[Proposal, ...] = ()  # one per node, or none at all

    @staticmethod
    def of(draft: Draft) -> "Graft":
        """Return the nodes of a Draft message as a graft."""
        return Graft(
            draft.source,
            draft.parent_hash,
            draft.parent_len,
            draft.tokens,
            draft.parents,
            draft.scores,
            draft.proposals,
        )


class SpeculationTree:
    """The committed text and the live nodes (drafted tokens) beyond it.

    first_child_wins  True: a node keeps its first child and gets no other. Under the classical
                      rules, to prefer one of two drafts because of its token would bias the text
    """

    def __init__(
        self,
        key: bytes,
        committed: Sequence[int],
        *,
        max_nodes: int,
        first_child_wins: bool = False,
    ) -> None:
        self.first_child_wins = first_child_wins
        self.text = CommittedText(key, committed)
        self.max_nodes = max_nodes
        self.nodes: dict[int, Node] = {}
        self._root_children: list[int] = []
        self._orphans: deque[Graft] = deque()  # at most MAX_ORPHANS; their parents are unknown yet
        self.num_stale = 0  # drafted tokens dropped so far, on arrival or in the buffer

    @property
    def root(self) -> int:
        """Return the path hash of the committed text; it names the root of the tree."""
        return self.text.path_hashes[-1]

    def children(self, key: int) -> list[int]:
        """Return the path hashes of the children of the root or of a live node."""
        is_root = key == self.text.path_hashes[-1]
        return self._root_children if is_root else self.nodes[key].children

    def child(self, key: int, token: int) -> Node | None:
        """Return the child with this token of the root or of a live node; None: there is none."""
        for child in self.children(key):
            if self.nodes[child].token == token:
                return self.nodes[child]
        return None

    def best_chain(self, limit: int) -> list[Node]:
        """Return the path from the root, of at most `limit` nodes, with most expected acceptances.

        A chain that is likely to go far is preferred to one whose first node alone is likelier.
        """
        chain: list[Node] = []
        children = self._root_children
        while len(chain) < limit and children:
            best = children[0]
            if len(children) > 1:
                best = max(children, key=partial(self._worth, limit - len(chain)))
            chain.append(self.nodes[best])
            children = self.nodes[best].children
        return chain

    def _worth(self, limit: int, key: int) -> float:
        """Return how many of `limit` nodes from `key` on are expected to be accepted, at best."""
        node, most = self.nodes[key], 0.0
        if limit > 1:
            for child in node.children:
                below = self._worth(limit - 1, child)
                if below > most:
                    most = below
        return exp(node.score) * (1.0 + most)

    def rows_of(self, nodes: Iterable[Node]) -> list[tuple[int, int | None, int, int]]:
        """Return (key, parent's key or None: the root, token, position) of each node."""
        root = self.root
        return [
            (node.key, None if node.parent == root else node.parent, node.token, node.position)
            for node in nodes
        ]

    def below(self, key: int) -> list[Node]:
        """Return every node below the root or below a live node, parents before children."""
        nodes = self.nodes
        found = [nodes[child] for child in self.children(key)]
        for node in found:  # `found` grows during the loop, until the last node has no children
            if node.children:
                found += [nodes[child] for child in node.children]
        return found

    # -- growing ---------------------------------------------------------------------------------

    def attach(self, graft: Graft) -> int:
        """Attach the nodes whose parent is known, and return how many nodes are new in the tree.

        Nodes whose parent may still arrive wait as orphans; the others are counted as stale.
        """
        if not self._is_known(graft):
            if graft.parent_len <= len(self.text):
                self.num_stale += len(graft.tokens)
            else:
                self._keep_orphan(graft)
            return 0
        added = self._attach_known(graft)
        return added + (self._adopt_orphans() if added else 0)

    def _is_known(self, graft: Graft) -> bool:
        node = self.nodes.get(graft.parent_hash)
        if node is not None:
            return node.position + 1 == graft.parent_len
        return self.text.is_prefix(graft.parent_len, graft.parent_hash)

    def _keep_orphan(self, graft: Graft) -> None:
        if graft in self._orphans:
            return
        if len(self._orphans) == MAX_ORPHANS:
            self.num_stale += len(self._orphans.popleft().tokens)
        self._orphans.append(graft)

    def _adopt_orphans(self) -> int:
        """Attach orphans with known parents, and drop those that the root has passed.

        Returns the number of new nodes.
        """
        if not self._orphans:
            return 0
        before = len(self.nodes)
        # A parent's path is shorter: with the shortest first, each graft is looked at only once.
        for graft in sorted(self._orphans, key=lambda graft: graft.parent_len):
            if self._is_known(graft):
                self._attach_known(graft)
            elif graft.parent_len <= len(self.text):
                self.num_stale += len(graft.tokens)
            else:
                continue
            self._orphans.remove(graft)
        return len(self.nodes) - before

    def _attach_known(self, graft: Graft) -> int:
        """Attach a graft whose parent is known; returns the number of new nodes.

        `where[i]` is the length and hash of the path that ends with node i; None if the node was
        dropped.
        """
        where: list[tuple[int, int] | None] = []
        start = (graft.parent_len, graft.parent_hash)
        before = len(self.nodes)
        for index, parent in enumerate(graft.parents):
            at = start if parent < 0 else where[parent]
            where.append(None if at is None else self._place(*at, graft, index))
        self.num_stale += sum(place is None for place in where)
        return len(self.nodes) - before

    def _place(self, length: int, parent: int, graft: Graft, index: int) -> tuple[int, int] | None:
        """Place node `index` after the known path; returns where it is, or None if dropped.

        Where it is: length and hash of the path that ends with the node.
        """
        token, committed = graft.tokens[index], self.text.tokens
        if length < len(committed):
            if committed[length] != token:
                return None
            return length + 1, self.text.path_hashes[length + 1]
        proposal = graft.proposals[index] if graft.proposals else None
        key = self._child_for(parent, length, token, graft.scores[index], graft.source, proposal)
        return None if key is None else (length + 1, key)

    def grow(
        self,
        parent: int,
        tokens: Sequence[int],
        scores: Sequence[float],
        source: int,
        proposals: Sequence[Proposal] = (),
    ) -> list[int]:
        """Attach children to the root or a live node, unless refused; return new ones' path hashes.

        A child is refused if the tree is full, or if the first child wins and there is one.

        tokens, scores, proposals  one for each child; scores as in `Node`
        """
        length = len(self.text) if parent == self.root else self.nodes[parent].position + 1
        children = self.children(parent)
        num_before = len(children)
        for index, token in enumerate(tokens):
            proposal = proposals[index] if proposals else None
            key = self._child_for(parent, length, token, scores[index], source, proposal)
            self.num_stale += key is None
        return children[num_before:]

    def _child_for(
        self,
        parent: int,
        length: int,
        token: int,
        score: float,
        source: int,
        proposal: Proposal | None,
    ) -> int | None:
        """Return the hash of the parent's child with this token, made if need be; None: refused.

        parent  the root or a live node

        A new child is refused if the tree is full, or if the first child wins and there is one.
        """
        nodes, key = self.nodes, path_hash(parent, token, self.text.key)
        if key in nodes:
            return key
        above = nodes.get(parent)
        children = self._root_children if above is None else above.children
        if len(nodes) >= self.max_nodes or (self.first_child_wins and children):
            return None
        children.append(key)
        nodes[key] = Node(key, parent, token, length, score, source, proposal)
        return key

    # -- moving the root ---------------------------------------------------------------------------

    def path_to(self, length: int, hash_: int) -> list[int] | None:
        """Return the tokens from the root to the live node with this path; None: no such node."""
        tokens: list[int] = []
        node = self.nodes.get(hash_)
        if node is None or node.position + 1 != length:
            return None
        while True:
            tokens.append(node.token)
            if node.parent == self.root:
                return tokens[::-1]
            node = self.nodes[node.parent]

    def news(self, base_len: int, base_hash: int, tokens: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens that a verdict adds to the committed text.

        Its base may be a committed position or a live node. None: the base is unknown here, so a
        message was missed. Raises Diverged if the verdict contradicts the committed text.
        """
        if (path := self.path_to(base_len, base_hash)) is not None:
            return (*path, *tokens)
        return self.text.continuation(base_len, base_hash, tokens)

    def advance(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Commit `tokens` after the root; returns their path hashes and how many nodes died."""
        self.text.extend(tokens)
        path = self.text.path_hashes[len(self.text) + 1 - len(tokens) :]
        if path:
            node = self.nodes.get(path[-1])
            self._root_children = [] if node is None else node.children
        survivors = {node.key: node for node in self.below(self.root)}
        num_dead = len(self.nodes) - len(survivors) - sum(key in self.nodes for key in path)
        self.nodes = survivors
        self._adopt_orphans()
        return path, num_dead

    def prune(self, tail: Sequence[int], said: bytes, follows: Follows) -> None:
        """Remove the nodes below the root that contradict what is known of the text's end.

        Also remove nodes that end inside the known end, except the tail's own tokens: their text is
        known already.

        tail     the tokens of the end, behind the root
        said     the same in bytes
        follows  returns what of such bytes is left behind a token; None: the token contradicts them
        """
        self._root_children = self._kept(self._root_children, tail, said, follows)
        survivors = self.below(self.root)
        self.nodes = {node.key: node for node in survivors}

    def _kept(
        self, children: list[int], tail: Sequence[int], said: bytes, follows: Follows
    ) -> list[int]:
        kept: list[int] = []
        for key in children:
            node = self.nodes[key]
            is_known = bool(tail) and node.token == tail[0]
            rest = follows(said, node.token)
            if rest is None and not is_known:
                continue
            if rest or is_known:  # else nothing is known of what is below it
                below = tail[1:] if is_known else ()
                node.children = self._kept(node.children, below, rest or b"", follows)
                if not node.children and not is_known:
                    continue
            kept.append(key)
        return kept

    def clear(self) -> int:
        """Remove every node and every orphan; returns how many nodes there were."""
        num_nodes = len(self.nodes)
        self.nodes.clear()
        self._root_children = []
        self._orphans.clear()
        return num_nodes

    def check(self) -> None:
        """Assert every invariant of the tree (for tests and the simulator)."""
        assert len(self.text.path_hashes) == len(self.text) + 1
        assert len(self.nodes) <= self.max_nodes
        assert len(self._orphans) <= MAX_ORPHANS
        reached = self.below(self.root)
        assert {node.key for node in reached} == set(self.nodes), "a node hangs nowhere"
        for node in reached:
            assert node.key == _hashed_before(node.parent, node.token, self.text.key)
            above = None if node.parent == self.root else self.nodes[node.parent]
            assert node.position == (len(self.text) if above is None else above.position + 1)
            tokens = [self.nodes[child].token for child in node.children]
            assert len(set(tokens)) == len(tokens), "two children with one token"
