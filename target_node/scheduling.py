"""Decides which texts go into the target's next pass, and when the pass starts (pure).

Theory of operation
-------------------
A pass reads the weights once for the rows of all its texts, so all texts that can use it share it:

    Tick, no pass running
        a prompt to read, unless the last pass was a prefill           -> Compute, one chunk
        some text has a reason to start (`Ready.cause`)                -> Compute, all of them
        no text has                                                    -> WaitUntil
    Computed    each text that is still in the same life goes on with its outcome
    Afterwards  each of these texts reports it                 -> Send(Verdict) ..., MoveRows

If the drafter waits for the verdicts of all texts (`sync`), no pass can start before it has heard
them. Then they are sent with Computed, and Afterwards only learns from the pass.

Moves of cache rows are only needed by the next pass: if it is launched before Afterwards, the moves
go ahead of it.

If one text has a reason to start, and drafts for another are expected, the pass is held back as
long as these drafts add more tokens than the time costs (`worth_holding_s`). When it starts, the
texts that still wait join with the drafts that they have: a token for the price of a row. They do
not join twice in a row, since drafts that always come during the pass would never be of use.

How many drafts of each text are verified is decided for all texts together: the likeliest of all
(`rows_worth`).

Chunks of prompts take turns with passes of the other texts, and of several texts the one that was
served least recently comes first. Texts that begin alike are read once and copied, except in
reproducible mode, where nothing of another text is used.

On CPUs each pass is told on which cores it runs (`placing.py`), and its time is noted there.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.layout.slots import Move
from node.costs import crowd
from node.economics import rows_worth, worth_holding_s
from node.follower import (
    Lane,
    Lanes,
    MoveRows,
    SharedAction,
    WaitUntil,
    is_open,
    next_reader,
)
from node.placing import Place
from proto.messages import Open
from target_node.compute import Action, Compute, Computed, Part
from target_node.drafts import Chances
from target_node.resting import Course
from target_node.statistics import Known
from target_node.verifying import Verifying
from target_node.waiting import Ready

Texts = Mapping[int, Verifying]
Asked = Mapping[Verifying, Ready]
"""The `Ready` of each text whose prompt was read, in the order of turns; asked once a tick."""


@dataclass(frozen=True, slots=True)
class _RunningPass:
    """The pass that is running.

    num_rows  number of rows; 0 if some text only reads in it, so that its cost is not typical
    is_plain  True: it verifies no drafts
    started   when it began (seconds)
    wait_s    seconds before it in which it could have started
    placed    where it runs, and what it is worth there; None: there is no choice
    """

    texts: tuple[Verifying, ...]
    num_rows: int
    is_plain: bool
    started: float
    wait_s: float
    placed: "_Placed | None" = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """On which cores a pass runs.

    kind        passes of one kind are compared with each other
    is_drafted  True: the drafter drafts for one of its texts
    tokens      its expected number of tokens, by the chances of its drafts
    counts      False: something else is being tried in it, so that it says nothing about places
    takes_turns  True: a drafter should draft nothing while it runs
    """

    kind: Hashable
    is_drafted: bool
    place: Place
    tokens: float
    counts: bool
    takes_turns: bool


@dataclass(frozen=True, slots=True)
class _EndedPass:
    """A pass that has ended, and whose results were not sent yet.

    grown     the texts that are still in the same life, with how many tokens each has gained
    ended     when it ended (seconds)
    is_usual  True: its cost is typical, and is measured
    """

    running: _RunningPass
    grown: Sequence[tuple[Verifying, int]]
    ended: float
    is_usual: bool


class Schedule:
    """Schedules the passes of one target over all its texts.

    num_per_pass  most texts that share a pass
    """

    def __init__(self, lanes: Lanes, known: Known, *, num_per_pass: int) -> None:
        self._lanes = lanes
        self._known = known
        self._num_per_pass = num_per_pass
        self._running: _RunningPass | None = None
        self._ended: _EndedPass | None = None
        self._moves: list[Move] = []  # moves in the cache that the next pass needs
        self._ticket = 0  # number of the last pass
        self._num_served = 0  # parts of passes so far
        self._was_chunk = False  # the last pass was a prefill
        self._ended_at = 0.0  # when the last pass ended
        self._held_since: float | None = None  # since when the next pass is held back; None: not

    def make(
        self, message: Open, lane: Lane, earlier: Verifying | None, texts: Texts, now: float
    ) -> Verifying:
        """Return the machine of a text that was opened; `earlier` is that of its last life."""
        del texts
        return Verifying(message, lane, self._known, earlier, now)

    # -- the next pass ----------------------------------------------------------------------------

    def tick(self, texts: Texts, now: float) -> Sequence[Action]:
        """Start a pass if there is a reason to; returns actions."""
        if self._running is not None:
            return ()
        actions = self._next(texts, now)
        if not self._moves or all(isinstance(action, WaitUntil) for action in actions):
            return actions
        return (*self._take_moves(), *actions)

    def _next(self, texts: Texts, now: float) -> Sequence[Action]:
        """Start what the device does next and return it, or until when it waits; (): nothing."""
        by_turn = sorted(
            (text for text in texts.values() if not text.finished), key=lambda text: text.served
        )
        readers: list[Verifying] = []
        writers: list[Verifying] = []
        for text in by_turn:
            (readers if text.chunk else writers).append(text)
        self._follow(by_turn, min(max(1, len(writers)), self._num_per_pass))
        reader = next_reader(readers)
        if reader is not None and not self._was_chunk:
            return self._read(reader, texts, now)
        for text in writers:
            text.price_wait()
        asked = {text: text.ready(now) for text in writers}
        if any(ready.cause is None for ready in asked.values()):
            self._wait(asked, now)
        start_at = self._start_at(asked, now)
        if start_at <= now:
            return self._write(asked, now)
        if reader is not None:
            return self._read(reader, texts, now)
        return (WaitUntil(start_at),) if start_at < math.inf else ()

    def _follow(self, texts: Sequence[Verifying], num_texts: int) -> None:
        """Give each text the measurements of its kind where `num_texts` texts share the passes."""
        for text in texts:
            text.follow(self._known.courses.of(text.opened, num_texts), num_texts)

    def _read(self, text: Verifying, texts: Texts, now: float) -> Sequence[Action]:
        """Return a prefill of a chunk of one text, or a copy of tokens that another lane has."""
        if text.may_copy:
            copy = self._lanes.copy_for(text.lane, text.tree.text.tokens)
            if copy is not None:
                return (copy, *self._next(texts, now))
        self._was_chunk = True
        part = text.read(now)
        placed = self._placed((text,), 0.0)
        self._running = _RunningPass((text,), 0, is_plain=True, started=now, wait_s=0.0)
        return (self._launched((text,), (part,), placed),)

    def _wait(self, asked: Asked, now: float) -> None:
        """Note which texts wait for drafts, and whether a pass is held back for them now."""
        for text, ready in asked.items():
            if ready.cause is None:
                text.waits()
        if self._held_since is None and self._may_hold(asked):
            self._held_since = now

    def _may_hold(self, asked: Asked) -> bool:
        """True if some texts could start a pass and more texts could share it later."""
        num_ready = sum(ready.cause is not None for ready in asked.values())
        is_shared = 0 < num_ready < min(len(asked), self._num_per_pass)
        return is_shared and self._known.costs.reply.num > 0

    def _start_at(self, asked: Asked, now: float) -> float:
        """Return when a pass of these texts starts if no message comes before; inf: never."""
        waiting = [ready for ready in asked.values() if ready.cause is None]
        if not waiting:
            return now if asked else math.inf
        late_at = min(ready.deadline for ready in waiting)
        if len(waiting) == len(asked):
            return late_at
        return min(late_at, self._held_until(asked, now)) if self._may_hold(asked) else now

    def _held_until(self, asked: Asked, now: float) -> float:
        """Return until when to hold back the pass for drafts; `now` if they will come too late."""
        assert self._held_since is not None
        waiting = [ready for ready in asked.values() if ready.cause is None]
        costs = self._known.costs
        num_more = sum(ready.num_awaited for ready in waiting)
        num_tokens = len(waiting) + sum(
            1.0 + text.num_at_hand for text, ready in asked.items() if ready.cause is not None
        )
        due_at = [ready.since + costs.reply.value for ready in waiting]
        worth_s = worth_holding_s(num_tokens, num_more, costs.pass_s)
        until = min(self._held_since, *due_at) + worth_s
        return now if max(due_at) > until else until

    def _write(self, asked: Asked, now: float) -> Sequence[Action]:
        """Start a pass of texts with a reason, and of others that have room in it; return it."""
        self._was_chunk = False
        self._held_since = None
        able = [text for text, one in asked.items() if one.cause is not None or one.may_join]
        texts = tuple(sorted(able, key=lambda text: asked[text].cause is None))
        texts = texts[: self._num_per_pass]
        for text in texts:
            text.add_copies()
        at_hand = [text.at_hand() for text in texts]
        placed = self._placed(texts, 0.0)
        turns = placed is not None and placed.takes_turns
        for text in texts:
            text.takes_turns = turns and text.opened.policy.prices_wanted
        counts = self._shares(texts, at_hand, sum(asked[text].num_missing for text in texts))
        parts = tuple(
            text.launch(list(drafts)[:count], asked[text].cause, now)
            for text, drafts, count in zip(texts, at_hand, counts, strict=True)
        )
        started_s = max(self._ended_at, min(asked[text].since for text in texts))
        is_usual = all(part.num_asked for part in parts)
        num_rows = sum(len(part.feed.tokens) for part in parts) if is_usual else 0
        is_plain = not any(counts)
        wait_s = now - started_s
        if placed is not None:
            chances = (
                list(drafts.values())[:count] for drafts, count in zip(at_hand, counts, strict=True)
            )
            placed = replace(placed, tokens=len(texts) + sum(map(sum, chances)))
        self._running = _RunningPass(texts, num_rows, is_plain, now, wait_s, placed)
        return (self._launched(texts, parts, placed),)

    def _placed(self, texts: Sequence[Verifying], tokens: float) -> _Placed | None:
        """Choose on which cores a pass of these texts runs, and let costs be counted for these."""
        placing = self._known.placing
        if placing is None:
            return None
        is_drafted = any(text.opened.policy.has_drafter and not text.rests for text in texts)
        kind = crowd(len(texts)), texts[0].opened.policy if is_drafted else None
        place = placing.place_for(kind, is_drafted=is_drafted)
        self._known.costs.stand(place)
        counts = not any(text.course is not None and text.course.is_trial for text in texts)
        return _Placed(kind, is_drafted, place, tokens, counts, placing.takes_turns(place))

    def _shares(
        self, texts: Sequence[Verifying], at_hand: Sequence[Chances], num_missing: int
    ) -> Sequence[int]:
        """Return how many drafts of each text to verify; all, unless costs decide.

        num_missing  rows of committed tokens in the pass
        """
        counts = [len(drafts) for drafts in at_hand]
        priced = [index for index, text in enumerate(texts) if text.opened.policy.prices_rows]
        if not priced:
            return counts
        chances = [tuple(at_hand[index].values()) for index in priced]
        num_fixed = sum(counts) - sum(map(len, chances)) + num_missing
        passes = self._known.costs.passes(len(texts))
        worth = rows_worth(chances, num_fixed, len(texts), passes)
        for index, count in zip(priced, worth, strict=True):
            counts[index] = count
        return counts

    def _launched(
        self, texts: Sequence[Verifying], parts: tuple[Part, ...], placed: _Placed | None
    ) -> Compute:
        self._ticket += 1
        for text in texts:
            self._num_served += 1
            text.served = self._num_served
        return Compute(self._ticket, parts, Place.APART if placed is None else placed.place)

    # -- results ----------------------------------------------------------------------------------

    def done(self, result: Computed, texts: Texts, now: float) -> Sequence[SharedAction]:
        """Give the pass's results to its texts not reopened or closed since; return actions."""
        running, self._running = self._running, None
        assert running is not None
        assert self._ended is None, "of the pass before nothing has been said"
        assert result.ticket == self._ticket
        pairs = [
            (text, outcome)
            for text, outcome in zip(running.texts, result.outcomes, strict=True)
            if is_open(text, texts)
        ]
        actions: list[SharedAction] = []
        lengths = [len(text.tree.text) for text, _ in pairs]
        for text, outcome in pairs:
            for action in text.computed(outcome, result.model_us, now):
                if isinstance(action, MoveRows):
                    self._moves += action.moves
                else:
                    actions.append(action)
        grown = [
            (text, len(text.tree.text) - length)
            for (text, _), length in zip(pairs, lengths, strict=True)
        ]
        is_usual = not any(outcome.was_repeated for outcome in result.outcomes)
        is_usual = is_usual and running.num_rows > 0 and len(pairs) == len(running.texts)
        self._ended = _EndedPass(running, grown, now, is_usual)
        self._ended_at = now
        if len(grown) == len(texts) and all(text.is_awaited for text, _ in grown):
            actions += _reports(self._ended)
        return actions

    def afterwards(self, texts: Texts, now: float) -> Sequence[SharedAction]:
        """Learn from the ended pass, and what it cost; return what is left to be said and moved."""
        del texts, now  # no text was closed since, and the times are those of the pass's end
        ended, self._ended = self._ended, None
        if ended is None:
            return ()
        said = _reports(ended)
        for text, _ in ended.grown:
            text.learn()
        if ended.is_usual:
            self._measure(ended)
        return (*said, *self._take_moves())

    def _take_moves(self) -> Sequence[SharedAction]:
        """Take and return all pending moves as one action; (): there are none."""
        moves, self._moves = tuple(self._moves), []
        return (MoveRows(moves),) if moves else ()

    def _measure(self, ended: _EndedPass) -> None:
        """Measure what a pass has cost, and how many tokens it has made for each kind of text."""
        running, grown = ended.running, ended.grown
        pass_s = ended.ended - running.started
        round_s, num_tokens = running.wait_s + pass_s, sum(number for _, number in grown)
        self._known.costs.passed(
            len(grown), running.num_rows, num_tokens, pass_s, round_s, is_plain=running.is_plain
        )
        self._note_place(running.placed, round_s)
        by_course: dict[Course, list[int]] = {}
        for text, number in grown:
            if text.course is not None:
                by_course.setdefault(text.course, []).append(number)
        plain_s = self._known.plain_s(len(grown))
        for course, numbers in by_course.items():
            course.passed(sum(numbers) / len(numbers), round_s, plain_s)

    def _note_place(self, placed: _Placed | None, round_s: float) -> None:
        """Note what a pass and its wait took on its cores."""
        placing = self._known.placing
        if placing is not None and placed is not None and placed.counts:
            placing.passed(
                placed.kind, placed.place, placed.tokens, round_s, is_drafted=placed.is_drafted
            )


def _reports(ended: _EndedPass) -> list[SharedAction]:
    """Return the messages about a pass of all its texts that have not returned theirs before."""
    return [action for text, _ in ended.grown for action in text.report()]
