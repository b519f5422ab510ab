"""Which texts the drafter's next forward serves (pure).

Theory of operation
-------------------
    Tick, no forward running
        a text to read, unless the forward before read one too   -> Compute, one chunk
        texts with something to expand                           -> Compute, a row for each
        a text without                                           -> Send(Draft) | WaitUntil
    Proposed    each text that is still in that life has its children       -> Send(Draft) ...

A forward reads the weights once for the rows of all its texts, but a row more is not always free.
The rows go where they are worth most: to the drafts that will likeliest be needed, as many as make
the most of them a second (`price.num_texts_worth`). Who was left out comes first the next time.

Chunks of texts to be read take turns with forwards of the others. Texts that begin alike are read
once and copied.
"""

from collections.abc import Mapping, Sequence

from drafter_node.drafting import Drafting
from drafter_node.events import Action, Compute, Part, Proposed
from drafter_node.known import Known
from node.events import SharedAction
from node.follower import is_open
from node.lanes import Lane, Lanes, next_reader
from node.price import num_texts_worth
from proto.messages import Open

Texts = Mapping[int, Drafting]


class Schedule:
    """The forwards of one drafter.

    num_per_pass  most texts that share one
    """

    def __init__(self, lanes: Lanes, known: Known, *, num_per_pass: int) -> None:
        self._lanes = lanes
        self._known = known
        self._num_per_pass = num_per_pass
        self._running: tuple[Drafting, ...] = ()
        self._num_rows = 0  # of the running forward; 0: it reads a text
        self._started = 0.0  # the running forward
        self._ticket = 0  # of the last forward
        self._was_chunk = False  # it read a text
        self._left_out: Sequence[Drafting] = ()  # of it

    def make(self, message: Open, lane: Lane, earlier: Drafting | None, now: float) -> Drafting:
        """The machine of a text."""
        del earlier, now  # the lane knows what is cached
        return Drafting(message, lane, self._known)

    def tick(self, texts: Texts, now: float) -> Sequence[Action]:
        """Begin a forward, if there is something to draft."""
        if self._running:
            return ()
        said: list[SharedAction] = []
        tips: dict[Drafting, int] = {}
        for text in sorted(texts.values(), key=lambda text: text.served):
            if text.rests:
                continue
            if (tip := text.tip) is None:
                said += text.idle(now)
            else:
                tips[text] = tip
        return (*said, *self._begin(tips, now))

    def _begin(self, tips: Mapping[Drafting, int], now: float) -> Sequence[Action]:
        """A forward for these texts, or for some of them."""
        reader = next_reader([text for text in tips if text.chunk])
        writers = [text for text in tips if not text.chunk]
        if reader is None or (writers and self._was_chunk):
            return self._expand(writers, tips, now) if writers else ()
        if copy := self._lanes.copy_for(reader.lane, reader.tree.text.tokens):
            return (copy, *self._begin(tips, now))
        self._was_chunk = True
        self._num_rows = 0
        return (self._launched((reader,), (reader.read(tips[reader]),), now),)

    def _expand(
        self, writers: Sequence[Drafting], tips: Mapping[Drafting, int], now: float
    ) -> Sequence[Action]:
        """Expand the tips of those where it is worth most."""
        self._was_chunk = False
        chosen = tuple(writers)
        if len(chosen) > 1:  # what a small drafter does on the host is felt
            chosen = self._chosen({text: text.chance_of(tips[text]) for text in writers})
        self._left_out = [text for text in writers if text not in chosen]
        parts = tuple(text.expand(tips[text]) for text in chosen)
        self._num_rows = sum(len(part.feed.tokens) for part in parts)
        return (self._launched(chosen, parts, now),)

    def _chosen(self, chances: Mapping[Drafting, float]) -> tuple[Drafting, ...]:
        """As many of the likeliest as are worth their rows, and whoever was left out before.

        chances  by turn, as those who were left out come
        """
        likeliest = sorted(chances, key=lambda text: -chances[text])
        number = num_texts_worth([chances[text] for text in likeliest], self._known.steps)
        first = [text for text in chances if text in self._left_out]
        others = [text for text in likeliest if text not in first]
        number = min(self._num_per_pass, max(number, len(first)))
        return tuple((first + others)[:number])

    def _launched(
        self, texts: tuple[Drafting, ...], parts: tuple[Part, ...], now: float
    ) -> Compute:
        self._ticket += 1
        self._running, self._started = texts, now
        for text in texts:
            text.served = self._ticket
        return Compute(self._ticket, parts)

    def done(self, result: Proposed, texts: Texts, now: float) -> Sequence[SharedAction]:
        """Tell every text of the forward that is still in the same life."""
        assert result.ticket == self._ticket
        running, self._running = self._running, ()
        if self._num_rows and now > self._started:
            self._known.steps.took(self._num_rows, now - self._started)
        actions: list[SharedAction] = []
        for text, children in zip(running, result.children, strict=True):
            if is_open(text, texts):
                actions += text.proposed(children, result.model_us, now)
        return actions
