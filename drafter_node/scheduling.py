"""Decides which texts the drafter's next forward serves (pure).

Theory of operation
-------------------
    Tick, no forward running
        a text to prefill, unless the last forward was a prefill    -> Compute, one chunk
        texts with nodes to expand                                  -> Compute, rows of each
        a text without                                              -> Send(Draft) | WaitUntil
    Proposed    each text that is still in the same life gets its children
    Afterwards  each of these texts sends its new drafts            -> Send(Draft) ...

If the only text has all the drafts that its target waits for (`sync`), they go out with Proposed.

A forward reads the weights once for all its rows, but one more row is not always free. So a forward
takes the nodes of all texts that are likeliest to be reached, as many as make the most useful
drafts a second (`num_rows_worth`). A text that was left out comes first the next time.

Prefill chunks take turns with forwards of the other texts. Texts that begin alike are read once and
copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafter_node.compute import Action, Compute, Part, Proposed
from drafter_node.drafting import Drafting
from drafter_node.frontier import Tip
from drafter_node.known import Known
from node.dispatcher import is_open
from node.economics import num_rows_worth
from node.events import SharedAction, Wipe
from node.lanes import Lane, Lanes, next_reader
from proto.messages import Open

Texts = Mapping[int, Drafting]
Tips = Mapping[Drafting, Sequence[Tip]]  # tips of each text; the text whose turn it is comes first


@dataclass(frozen=True, slots=True)
class _Ended:
    """A forward that has ended, and whose drafts have not been sent yet.

    texts     those of its texts that are still in the same life
    num_rows  rows of each of its steps; 0: it was a prefill
    step_s    seconds of each of its steps
    """

    texts: Sequence[Drafting]
    num_rows: int
    step_s: float


class Schedule:
    """Schedules the forwards of one drafter over all its texts.

    num_per_pass  most texts that share a forward
    """

    def __init__(self, lanes: Lanes, known: Known, *, num_per_pass: int) -> None:
        self._lanes = lanes
        self._known = known
        self._num_per_pass = num_per_pass
        self._running: tuple[Drafting, ...] = ()
        self._num_rows = 0  # rows of the running forward; 0: it is a prefill
        self._started = 0.0  # when the running forward began (seconds)
        self._ticket = 0  # number of the last forward
        self._was_chunk = False  # the last forward was a prefill
        self._left_out: Sequence[Drafting] = ()  # texts that had no part in the last forward
        self._ended: _Ended | None = None

    def make(
        self, message: Open, lane: Lane, earlier: Drafting | None, texts: Texts, now: float
    ) -> Drafting:
        """Return the machine of a text that was opened.

        If the drafter rests for all open texts of the same policy, it rests for this one too until
        its first verdict: under load the prompts of hundreds of texts are then never read.
        """
        del earlier, now  # the lane knows what is cached
        made = Drafting(message, lane, self._known)
        alike = [text.rests for text in texts.values() if text.opened.policy == message.policy]
        made.rests = bool(alike) and all(alike)
        return made

    def tick(self, texts: Texts, now: float) -> Sequence[Action]:
        """Begin a forward if there are nodes to expand or tokens to prefill; returns actions."""
        if self._running:
            return ()
        said: list[SharedAction] = []
        tips: dict[Drafting, Sequence[Tip]] = {}
        for text in sorted(texts.values(), key=lambda text: text.served):
            if text.rests:
                continue
            if found := text.tips:
                tips[text] = found
            else:
                said += text.idle(now)
        return (*said, *self._begin(tips, now))

    def _begin(self, tips: Tips, now: float) -> Sequence[Action]:
        """Begin a prefill of one of these texts, or a forward that expands their nodes."""
        readers = [text for text in tips if text.chunk]
        reader = next_reader(readers)
        writers = {text: found for text, found in tips.items() if text not in readers}
        if reader is None or (writers and self._was_chunk):
            return self._expand(writers, now) if writers else ()
        if copy := self._lanes.copy_for(reader.lane, reader.tree.text.tokens):
            reader.lane.copied(copy)
            # After the copy the text may lack so little that its tips change, or are none.
            anew = {text: text.tips if text is reader else tips[text] for text in tips}
            return (copy, *self._begin({text: found for text, found in anew.items() if found}, now))
        self._was_chunk = True
        self._num_rows = 0
        return (self._numbered((reader,), (reader.read(),), now),)

    def _expand(self, tips: Tips, now: float) -> Sequence[Action]:
        """Begin a forward that expands the tips which are worth most; return the Compute."""
        self._was_chunk = False
        chosen = tips
        if sum(map(len, tips.values())) > 1:  # a small drafter's time on the host matters
            chosen = self._chosen(tips)
        self._left_out = [text for text in tips if text not in chosen]
        is_alone = len(tips) == 1
        parts = tuple(text.expand(found, is_alone=is_alone) for text, found in chosen.items())
        self._num_rows = sum(len(part.feed.tokens) for part in parts)
        return (self._numbered(tuple(chosen), parts, now),)

    def _chosen(self, tips: Tips) -> Tips:
        """Return the likeliest tips, as many as are worth it, and one of each left-out text."""
        if len(tips) == 1:
            ((text, found),) = tips.items()
            return {text: found[: num_rows_worth([tip.chance for tip in found], self._known.steps)]}
        likeliest = sorted(
            ((text, tip) for text, found in tips.items() for tip in found),
            key=lambda pair: -pair[1].chance,
        )
        number = num_rows_worth([tip.chance for _, tip in likeliest], self._known.steps)
        first = [text for text in tips if text in self._left_out][: self._num_per_pass]
        chosen: dict[Drafting, list[Tip]] = {text: [tips[text][0]] for text in first}
        others = [(text, tip) for text, tip in likeliest if tip not in chosen.get(text, ())]
        for text, tip in others[: max(0, number - len(first))]:
            if text in chosen or len(chosen) < self._num_per_pass:
                chosen.setdefault(text, []).append(tip)
        return chosen

    def _numbered(
        self, texts: tuple[Drafting, ...], parts: tuple[Part, ...], now: float
    ) -> Compute:
        self._ticket += 1
        self._running, self._started = texts, now
        for text in texts:
            text.served = self._ticket
        return Compute(self._ticket, parts)

    def done(self, result: Proposed, texts: Texts, now: float) -> Sequence[SharedAction]:
        """Give the forward's results to its texts not reopened or closed since; return actions."""
        assert result.ticket == self._ticket
        assert self._ended is None, "drafts of the forward before have not been sent"
        running, self._running = self._running, ()
        actions: list[SharedAction] = []
        still_open: list[Drafting] = []
        for text, children in zip(running, result.children, strict=True):
            if is_open(text, texts):
                still_open.append(text)
                if result.has_failed:
                    actions += text.failed(now)
                else:
                    actions += text.proposed(children, result.model_us, now)
            elif result.has_failed or not all(one.is_finite for one in children):
                # A later text may be in this lane, or begin alike.
                text.slots.truncate(0)
                actions.append(Wipe(text.slots.lane, 0))
        step_s = (now - self._started) / result.num_steps
        num_rows = 0 if result.has_failed else self._num_rows  # a failure tells nothing of costs
        self._ended = _Ended(still_open, num_rows, step_s)
        if len(still_open) == len(texts) == 1 and still_open[0].target_waits:
            actions += still_open[0].send(now)
        return actions

    def afterwards(self, now: float) -> Sequence[SharedAction]:
        """Note what the ended forward cost; return messages with its drafts.

        No text was closed since `done`.
        """
        ended, self._ended = self._ended, None
        if ended is None:
            return ()
        if ended.num_rows and ended.step_s > 0:
            self._known.steps.took(ended.num_rows, ended.step_s)
        return [action for text in ended.texts for action in text.send(now)]
