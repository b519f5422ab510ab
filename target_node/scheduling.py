"""Does what is decided for a target: starts its passes, and handles their results (pure).

`deciding.py` decides what comes next; this file makes the view of it, and does it:

    Tick, no pass running       what `decide` says    -> Compute, CopyPrefix, or WaitUntil
    Computed    each text that is still in the same life goes on with its outcome
    Afterwards  each of these texts reports it        -> Send(Verdict) ..., MoveRows

If the drafter waits for the verdicts of all texts (`sync`), no pass can start before it has heard
them. Then they are sent with Computed, and Afterwards only learns from the pass.

Moves of cache rows are only needed by the next pass: if it is launched before Afterwards, the moves
go ahead of it.

Chunks of prompts take turns with passes of the other texts, and of several texts the one that was
served least recently comes first. Texts that begin alike are read once and copied, except in
reproducible mode, where nothing of another text is used.

On CPUs each pass is told on which cores it runs (`placing.py`), and its time is noted there.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.layout.slots import Move
from node.dispatcher import is_open
from node.economics import FIRST_OF_MODEL
from node.events import MoveRows, Remember, SharedAction, WaitUntil
from node.lanes import Lane, Lanes, next_reader
from node.placing import Place
from proto.messages import Open
from target_node.compute import Action, Compute, Computed, Part
from target_node.deciding import (
    Copy,
    Cores,
    Decision,
    Read,
    Reader,
    Start,
    View,
    Wait,
    decide,
    num_sharing,
    shared_out,
)
from target_node.known import Known
from target_node.resting import Course
from target_node.verifying import ComputedPart, Verifying

Texts = Mapping[int, Verifying]


@dataclass(frozen=True, slots=True)
class _LaunchedPass:
    """A pass that was launched, and is running.

    num_rows  number of rows; 0 if some text only reads in it, so that its cost is not typical
    is_plain  True: it verifies no drafts
    started   when it began (seconds)
    wait_s    seconds before it in which it could have started
    chances   its expected number of tokens, by the chances of its drafts
    cores     where it runs; None: there is no choice
    """

    texts: tuple[Verifying, ...]
    num_rows: int
    is_plain: bool
    started: float
    wait_s: float
    chances: float
    cores: Cores | None


@dataclass(frozen=True, slots=True)
class _Grown:
    """A text of a pass that is still in the same life.

    num_tokens  number of tokens that it has gained
    part        what is left to be told and learnt of its part; None: nothing
    """

    text: Verifying
    num_tokens: int
    part: ComputedPart | None


@dataclass(frozen=True, slots=True)
class _ComputedPass:
    """A pass that was computed, and is not learnt from yet.

    ended     when it ended (seconds)
    is_usual  True: its cost is typical, and is measured
    is_told   True: its verdicts were sent
    """

    launched: _LaunchedPass
    grown: Sequence[_Grown]
    ended: float
    is_usual: bool
    is_told: bool

    def reports(self) -> list[SharedAction]:
        """Return the messages about the pass, of all its texts."""
        return [
            action
            for one in self.grown
            if one.part is not None
            for action in one.text.report(one.part)
        ]


class Schedule:
    """Schedules the passes of one target over all its texts.

    num_per_pass  most texts that share a pass
    """

    def __init__(self, lanes: Lanes, known: Known, *, num_per_pass: int) -> None:
        self._lanes = lanes
        self._known = known
        self._num_per_pass = num_per_pass
        # A pass is launched, computed and told; the next may be launched before the last is told.
        self._running: _LaunchedPass | None = None
        self._untold: _ComputedPass | None = None
        self._moves: list[Move] = []  # moves in the cache that the next pass needs
        self._ticket = 0  # number of the last pass
        self._num_served = 0  # parts of passes so far
        self._was_chunk = False  # the last pass was a prefill
        self._ended_at = 0.0  # when the last pass ended
        self._held_since: float | None = None  # since when the next pass is held back; None: not
        self._place = Place.APART  # where the last pass ran

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
        """Do what comes next; returns the actions."""
        readers, writers = self._by_turn(texts)
        self._follow((*readers, *writers), num_sharing(len(writers), self._num_per_pass))
        decision = decide(self._view(readers, writers), now)
        self._note(decision, texts)
        match decision.action:
            case Copy(session, copy):
                texts[session].lane.copied(copy)
                return (copy, *self._next(texts, now))
            case Read(session, cores):
                self._leave_out(texts, (session,), now)
                return (self._read(texts[session], cores, now),)
            case Start() as start:
                self._leave_out(texts, start.causes, now)
                return (self._write(start, texts, now),)
            case Wait(until):
                return (WaitUntil(until),) if until < math.inf else ()

    def _by_turn(self, texts: Texts) -> tuple[list[Verifying], list[Verifying]]:
        """Return the texts that have to read, and those that write, in the order of their turns."""
        readers: list[Verifying] = []
        writers: list[Verifying] = []
        for text in sorted(texts.values(), key=lambda text: text.served):
            if not text.finished:
                (readers if text.chunk else writers).append(text)
        return readers, writers

    def _view(self, readers: Sequence[Verifying], writers: Sequence[Verifying]) -> View:
        """Return what decides what comes next."""
        reader = next_reader(readers)
        return View(
            writers=tuple(text.view for text in writers),
            reader=None if reader is None else self._reader(reader),
            was_chunk=self._was_chunk,
            held_since=self._held_since,
            num_per_pass=self._num_per_pass,
            p=self._known.acceptance.chance(FIRST_OF_MODEL),
            prices=self._known.costs.at(self._place),
            placing=self._known.placing,
        )

    def _reader(self, text: Verifying) -> Reader:
        copy = None
        if text.may_copy:
            copy = self._lanes.copy_for(text.lane, text.tree.text.tokens)
        opened = text.opened
        return Reader(opened.session, opened.policy, text.rests, text.is_trial, copy)

    def _follow(self, texts: Sequence[Verifying], num_texts: int) -> None:
        """Give each text the measurements of its kind where `num_texts` texts share the passes."""
        for text in texts:
            text.follow(self._known.courses.of(text.opened, num_texts), num_texts)

    def _note(self, decision: Decision, texts: Texts) -> None:
        """Note which texts wait for drafts, and since when a pass is held back for them."""
        for session in decision.awaiting:
            texts[session].begin_wait()
        self._held_since = decision.held_since

    def _leave_out(self, texts: Texts, chosen: Collection[int], now: float) -> None:
        """Note which texts the next pass leaves out; `chosen` are the sessions of the others."""
        for session, text in texts.items():
            if session not in chosen:
                text.leave_out(now)

    def _read(self, text: Verifying, cores: Cores | None, now: float) -> Compute:
        """Begin a prefill of a chunk of one text; return it."""
        self._was_chunk = True
        part = text.read(now)
        self._running = _LaunchedPass((text,), 0, True, now, 0.0, 0.0, cores)
        return self._numbered((text,), (part,), cores)

    def _write(self, start: Start, texts: Texts, now: float) -> Compute:
        """Begin a pass; return it."""
        self._was_chunk = False
        chosen, cores = [texts[session] for session in start.causes], start.cores
        at_hand = [text.gather() for text in chosen]
        place = self._place if cores is None else cores.place
        counts = shared_out(
            [text.opened.policy for text in chosen],
            at_hand,
            sum(text.num_missing for text in chosen),
            self._known.costs.at(place),
        )
        started_s = max(self._ended_at, min(text.ready_at for text in chosen))
        parts = tuple(
            text.take_part(list(drafts)[:count], cause, now, cores)
            for text, drafts, count, cause in zip(
                chosen, at_hand, counts, start.causes.values(), strict=True
            )
        )
        is_usual = all(part.num_asked for part in parts)
        num_rows = sum(len(part.feed.tokens) for part in parts) if is_usual else 0
        chances = sum(
            sum(list(drafts.values())[:count])
            for drafts, count in zip(at_hand, counts, strict=True)
        )
        self._running = _LaunchedPass(
            texts=tuple(chosen),
            num_rows=num_rows,
            is_plain=not any(counts),
            started=now,
            wait_s=now - started_s,
            chances=len(chosen) + chances,
            cores=cores,
        )
        return self._numbered(chosen, parts, cores)

    def _numbered(
        self, texts: Sequence[Verifying], parts: tuple[Part, ...], cores: Cores | None
    ) -> Compute:
        self._ticket += 1
        if cores is not None:
            self._place = cores.place
        for text in texts:
            self._num_served += 1
            text.serve(self._num_served, self._place)
        return Compute(self._ticket, parts, self._place)

    # -- results ----------------------------------------------------------------------------------

    def done(self, result: Computed, texts: Texts, now: float) -> Sequence[SharedAction]:
        """Give the pass's results to its texts not reopened or closed since; return actions."""
        launched, self._running = self._running, None
        assert launched is not None
        assert self._untold is None, "the previous pass was not reported yet"
        assert result.ticket == self._ticket
        actions: list[SharedAction] = []
        grown: list[_Grown] = []
        for text, outcome in zip(launched.texts, result.outcomes, strict=True):
            if not is_open(text, texts):
                if outcome.is_failed:  # a later text may be in this lane, or begin alike
                    actions.append(text.wipe())
                continue
            length = len(text.tree.text)
            said, part = text.computed(outcome, result.model_us, now)
            grown.append(_Grown(text, len(text.tree.text) - length, part))
            actions += said
            if part is not None and part.moved.move is not None:
                self._moves.append(part.moved.move)
        is_usual = not any(outcome.is_unusual for outcome in result.outcomes)
        is_usual = is_usual and launched.num_rows > 0 and len(grown) == len(launched.texts)
        is_told = len(grown) == len(texts) and all(one.text.drafter_waits for one in grown)
        self._untold = _ComputedPass(launched, grown, now, is_usual, is_told)
        self._ended_at = now
        if is_told:
            actions += self._untold.reports()
        return actions

    def afterwards(self, now: float) -> Sequence[SharedAction]:
        """Learn from the ended pass, and what it cost; return what is left to be said and moved.

        No text was closed since `done`.
        """
        del now  # the times are those of the pass's end
        ended, self._untold = self._untold, None
        if ended is None:
            return ()
        said = () if ended.is_told else ended.reports()
        for one in ended.grown:
            if one.part is not None:
                one.text.learn(one.part)
        if not ended.is_usual:
            return (*said, *self._take_moves())
        self._measure(ended)
        news = self._known.courses.news(is_end=any(one.text.finished for one in ended.grown))
        return (*said, *self._take_moves(), *([Remember(news)] if news else ()))

    def _take_moves(self) -> Sequence[SharedAction]:
        """Take and return all pending moves as one action; (): there are none."""
        moves, self._moves = tuple(self._moves), []
        return (MoveRows(moves),) if moves else ()

    def _measure(self, ended: _ComputedPass) -> None:
        """Measure what a pass has cost, and how many tokens it has made for each kind of text."""
        launched, grown = ended.launched, ended.grown
        pass_s = ended.ended - launched.started
        round_s, num_tokens = launched.wait_s + pass_s, sum(one.num_tokens for one in grown)
        self._known.costs.passed(
            len(grown),
            launched.num_rows,
            num_tokens,
            pass_s,
            round_s,
            is_plain=launched.is_plain,
            place=Place.APART if launched.cores is None else launched.cores.place,
        )
        self._note_place(launched, round_s)
        by_course: dict[Course, list[int]] = {}
        for one in grown:
            if one.text.course is not None:
                by_course.setdefault(one.text.course, []).append(one.num_tokens)
        plain_s = self._known.plain_s(len(grown))
        if any(one.text.was_try for one in grown):
            round_s = pass_s  # such a wait says nothing of whether drafts pay
        for course, numbers in by_course.items():
            course.passed(sum(numbers) / len(numbers), round_s, plain_s)

    def _note_place(self, launched: _LaunchedPass, round_s: float) -> None:
        """Note what a pass and its wait took on its cores."""
        placing, cores = self._known.placing, launched.cores
        if placing is not None and cores is not None and cores.counts:
            placing.passed(
                *(cores.kind, cores.place, launched.chances, round_s),
                is_drafted=cores.is_drafted,
                is_crowd=len(launched.texts) > 1,
            )
