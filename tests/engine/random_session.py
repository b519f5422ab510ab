"""A random session for the layout of a cache: feeds and moves, and what every row must see.

Owns a text, a tree and a `SlotMap`; draws trees that branch, partial and full acceptance, tokens
that nobody drafted, survivors in scattered slots, and re-opening on a shorter text. The paths that
it gives are its own book-keeping and owe nothing to slots or masks.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from engine.layout.slots import Feed, Move, SlotMap

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One pass, and for each of its rows all tokens from the start of the text to the row's own."""

    feed: Feed
    paths: list[Path]


class RandomSession:
    """A text that grows by drafts, some of which are committed and some dropped.

    depth  how likely a new node hangs under the deepest one; 0: under any node
    reach  how likely a commit goes on from a node to one below it
    """

    def __init__(
        self,
        seed: int,
        slots: SlotMap[Path],
        *,
        vocab: int,
        prompt_len: int,
        max_rows: int = 8,
        depth: float = 0.0,
        reach: float = 0.7,
    ) -> None:
        self.random = random.Random(seed)
        self.slots = slots
        self.vocab = vocab
        self.max_rows = max_rows
        self.depth, self.reach = depth, reach
        self.text: Path = self._draw(prompt_len)
        self.nodes: set[Path] = set()  # keys are whole paths from the start of the text

    def steps(self, count: int, *, shorten: bool = True) -> Iterator[Drawn | Move]:
        """Yield `count` rounds of passes and the moves between them; ends early when it is full."""
        for _ in range(count):
            yield from self._prefill()
            if len(self.text) + 2 * self.max_rows >= self.slots.capacity:
                return
            yield self._feed()
            move = self._advance()
            if move is not None:
                yield move
            if shorten and self.random.random() < 0.1:
                self._reopen()
            self.slots.check()

    def begin_with(self, other: "RandomSession", length: int) -> None:
        """Open on the first `length` tokens of another session's text, which are copied here.

        The caller copies the slots. Three new tokens follow.
        """
        self.text = other.text[:length] + self._draw(3)
        self.slots.adopt(length)

    def _draw(self, count: int) -> Path:
        return tuple(self.random.randrange(self.vocab) for _ in range(count))

    def _prefill(self) -> Iterator[Drawn]:
        while chunk := self.slots.next_chunk(self.text, len(self.text), 48):
            start = self.slots.prefix_len
            feed = self.slots.feed_prefix(chunk)
            yield Drawn(feed, [self.text[: start + i + 1] for i in range(len(chunk))])

    def _feed(self) -> Drawn:
        """Feed what is missing and some nodes: children of the root, of old and of new nodes."""
        missing = self.text[self.slots.prefix_len :]
        paths = [self.text[: self.slots.prefix_len + i + 1] for i in range(len(missing))]
        if self.slots.num_free == 0:
            self.slots.advance((), ())
            self.nodes.clear()
        room = min(self.max_rows, self.slots.num_free - len(missing))
        wanted = self.random.randint(0 if missing else 1, max(room, 0))
        new: list[tuple[Path, Path | None, int, int]] = []
        while len(new) < wanted:
            if self.depth and self.random.random() < self.depth:
                parent = max(sorted(self.nodes), key=len, default=self.text)
            else:
                parent = self.random.choice([self.text, *sorted(self.nodes)])
            token = self.random.randrange(self.vocab)
            key = (*parent, token)
            if key not in self.nodes:
                self.nodes.add(key)
                above = None if parent == self.text else parent
                new.append((key, above, token, len(parent)))
                paths.append(key)
        return Drawn(self.slots.feed(missing, new), paths)

    def _advance(self) -> Move | None:
        """Commit a random path and perhaps a token that is no node; a random part survives."""
        end = self.text
        while self.random.random() < self.reach:
            children = [node for node in sorted(self.nodes) if node[:-1] == end]
            if not children:
                break
            end = self.random.choice(children)
        if self.random.random() < 0.5 or end == self.text:
            end = (*end, *self._draw(1))
        path = [end[: i + 1] for i in range(len(self.text), len(end))]
        below = {node for node in self.nodes if node[: len(end)] == end and node != end}
        pruned = self.random.random() < 0.3
        dropped = {node for node in below if pruned and self.random.random() < 0.3}
        kept = {n for n in below if not any(n[: len(d)] == d for d in dropped)}
        if end not in self.nodes:
            kept = set()
        self.text, self.nodes = end, kept
        return self.slots.advance(path, sorted(kept))

    def _reopen(self) -> None:
        """Go on with another text that shares a prefix with this one."""
        length = self.random.randint(1, len(self.text))
        self.text = self.text[:length] + self._draw(self.random.randint(1, 3))
        self.nodes.clear()
        self.slots.truncate(length)
