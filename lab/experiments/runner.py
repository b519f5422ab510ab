"""Runs the cells (arm, prompt, repetition) of an experiment that have no rows yet."""

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from coordinator.launching.load import Load
from coordinator.text.metrics import percentiles_ms
from lab.experiments.description import Arm, Experiment
from lab.experiments.engines import Engine, Warm, Written, host_of
from lab.experiments.prompt_sets import Conversation, Prompt
from lab.experiments.rows import Key, Row, RowFile, was_disturbed
from proto.errors import NodeError, OutputError, SlipstreamError

# -- grid ------------------------------------------------------------------------------------------

# The order in which the cells of an experiment are run, and the settings that a sweep chooses.
#
# A drift of the machine's speed must affect every arm alike: for each repetition and prompt every
# arm runs once, in a new random order. That needs the models of all arms in memory at once. If
# there are more pairs than may be warm, they run in groups of that many, and the groups are drawn
# anew for each repetition.


@dataclass(frozen=True, slots=True)
class ArmOnHost:
    """An arm with its engine and its number of prompts, as `order` needs them.

    host  key of the pair or peer: arms with equal keys share its processes
    """

    arm: str
    host: Hashable
    num_prompts: int


def order(
    places: Sequence[ArmOnHost], *, repetitions: int, seed: int, num_warm: int, stage: str = "main"
) -> Iterator[Key]:
    """Yield the key of every cell once, in the order in which the cells are to be run.

    num_warm  most engines that run at the same time
    """
    draw = random.Random(f"{seed} {stage}")
    hosts = list(dict.fromkeys(place.host for place in places))
    for repetition in range(repetitions):
        turns = draw.sample(hosts, len(hosts)) if len(hosts) > num_warm else hosts
        for first in range(0, len(turns), num_warm):
            together = set(turns[first : first + num_warm])
            mine = [place for place in places if place.host in together]
            for prompt in range(max(place.num_prompts for place in mine)):
                for place in draw.sample(mine, len(mine)):
                    if prompt < place.num_prompts:
                        yield Key(place.arm, prompt, repetition, stage)


def fastest(groups: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> dict[str, str]:
    """Return for each group (sweep) its arm with the highest median tokens per second in the sweep.

    An arm without rows, or with a void one, comes last.
    """
    chosen = {}
    for group, arms in groups.items():
        speeds = {}
        for arm in arms:
            mine = [row for row in rows if row.arm == arm and row.stage == "sweep"]
            is_void = not mine or any(row.void for row in mine)
            speeds[arm] = 0.0 if is_void else median(row.tokens_per_second for row in mine)
        chosen[group] = max(arms, key=lambda arm: speeds[arm])
    return chosen


# -- runner ----------------------------------------------------------------------------------------

FIRST_SEED = 1000
ATTEMPTS = 3  # times that a cell is tried, because a process may die

Talk = Callable[[Prompt], Conversation]


@dataclass(frozen=True, slots=True)
class Job:
    """An arm with its prompts.

    talk    makes a conversation (token ids, turn by turn) of a prompt
    decode  turns token ids into text
    """

    arm: Arm
    prompts: Sequence[Prompt]
    talk: Talk
    decode: Callable[[Sequence[int]], str]

    @property
    def place(self) -> ArmOnHost:
        """Return the arm's name, engine and number of prompts, as `order` needs them."""
        return ArmOnHost(self.arm.name, host_of(self.arm), len(self.prompts))


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a run, for display.

    key        the cell that begins now
    num_done   cells of the stage that are done
    num_cells  cells of the stage
    left_s     estimated seconds until the stage is done; None: not known yet
    """

    key: Key
    num_done: int
    num_cells: int
    left_s: float | None


class Runner:
    """Runs the cells of an experiment and appends their rows to a file.

    say   called with a `Step` before each cell
    warn  called with a line of text when something did not go well
    """

    def __init__(
        self,
        experiment: Experiment,
        jobs: Sequence[Job],
        rows: RowFile,
        warm: Warm,
        *,
        num_warm: int,
        say: Callable[[Step], None],
        warn: Callable[[str], None],
    ) -> None:
        self._description = experiment.description
        self._jobs = {job.arm.name: job for job in jobs}
        self._rows = rows
        self._warm = warm
        self._num_warm = num_warm
        self._say = say
        self._warn = warn
        self._number = 1 + max((row.number for row in rows.rows), default=-1)
        self._broken: set[Hashable] = set()  # engines that do not run here: their arms are left out

    def run(self) -> None:
        """Run the sweeps, then all chosen arms.

        Raises OutputError, NodeError and other SlipstreamErrors.
        """
        groups: dict[str, list[str]] = {}
        for name, job in self._jobs.items():
            if job.arm.group:
                groups.setdefault(job.arm.group, []).append(name)
        swept = [name for names in groups.values() for name in names]
        self._stage("sweep", swept, repetitions=1, num_prompts=self._description.sweep_prompts)
        chosen = set(fastest(groups, self._rows.rows).values())
        main = [name for name in self._jobs if name not in swept or name in chosen]
        self._stage("main", main, repetitions=self._description.repetitions)

    def _stage(
        self, stage: str, arms: Iterable[str], *, repetitions: int, num_prompts: int | None = None
    ) -> None:
        """Run those cells of these arms that have no rows yet.

        num_prompts  at most this many prompts of each arm; None: all
        """
        places = [self._jobs[name].place for name in arms]
        if num_prompts is not None:
            places = [
                ArmOnHost(place.arm, place.host, min(place.num_prompts, num_prompts))
                for place in places
            ]
        if not places:
            return
        description = self._description
        keys = list(
            order(
                places,
                repetitions=repetitions,
                seed=description.seed,
                num_warm=self._num_warm,
                stage=stage,
            )
        )
        done = {row.key for row in self._rows.rows}
        left = [key for key in keys if key not in done]
        started = time.monotonic()
        for number, key in enumerate(left):
            spent_s = time.monotonic() - started
            estimate = spent_s / number * (len(left) - number) if number else None
            self._say(Step(key, len(keys) - len(left) + number, len(keys), estimate))
            self._measure(key)

    def _measure(self, key: Key) -> None:
        """Run one cell and append its rows.

        A cell that failed is tried again; then an optional arm is left out, and another one raises.
        """
        job = self._jobs[key.arm]
        if host_of(job.arm) in self._broken:
            return
        for attempt in range(1, ATTEMPTS + 1):
            try:
                rows = self._cell(key, job, self._engine(job))
                if attempt < ATTEMPTS and any(map(was_disturbed, rows)):
                    continue  # forwards of a simulated device ended too late: try again
                self._rows.append(rows)
                break
            except OutputError:
                raise
            except SlipstreamError as error:
                self._warm.drop(job.arm)
                if isinstance(error, NodeError) and attempt < ATTEMPTS:
                    self._warn(f"{key.arm}: {error}; it is measured again")
                elif not job.arm.is_optional:
                    raise
                else:
                    self._broken.add(host_of(job.arm))
                    self._warn(f"{key.arm} is left out: {error}")
                    break
        self._number += 1

    def _engine(self, job: Job) -> Engine:
        """Return the engine of the job's arm; if it is new, it writes the warm-up prompts first."""
        engine, is_new = self._warm.of(job.arm)
        if is_new:
            for prompt in job.prompts[: self._description.warm_prompts]:
                engine.write(job.arm, [job.talk(prompt).next_turn()], [FIRST_SEED])
        return engine

    def _cell(self, key: Key, job: Job, engine: Engine) -> list[Row]:
        """Run all texts of a cell, at the same time, turn after turn; return their rows."""
        count = job.arm.work.texts_at_once
        indices = [(key.prompt + other) % len(job.prompts) for other in range(count)]
        talks = [job.talk(job.prompts[index]) for index in indices]
        made: list[_TextOfCell] = []
        turn = 0
        while open_ones := [text for text, talk in enumerate(talks) if not talk.is_over]:
            prompts = [talks[text].next_turn() for text in open_ones]
            seeds = [FIRST_SEED + indices[text] for text in open_ones]
            at, load, num_bytes = datetime.now(UTC), Load(), engine.num_bytes
            written = engine.write(job.arm, prompts, seeds)
            num_bytes = engine.num_bytes - num_bytes
            skips = self._description.without_prompt
            together = _Turn.of(turn, at, written, load.cores(), num_bytes, without_prompt=skips)
            for text, prompt, one in zip(open_ones, prompts, written, strict=True):
                talks[text].answered(one.tokens)
                made.append(_TextOfCell(text, indices[text], len(prompt), one, together))
            turn += 1
        return [self._row(key, job.prompts[one.index], engine, len(made), one) for one in made]

    def _row(
        self, key: Key, asked: Prompt, engine: Engine, num_rows: int, text: "_TextOfCell"
    ) -> Row:
        """Return the row of one text of a cell."""
        written, turn = text.written, text.turn
        p50_ms, p99_ms = percentiles_ms(written.emitted)
        return Row(
            *key,
            num_rows=num_rows,
            number=self._number,
            turn=turn.number,
            text=text.number,
            prompt_id=asked.name,
            category=asked.category,
            at=turn.at.isoformat(timespec="milliseconds"),
            seed=FIRST_SEED + text.index,
            num_prompt_tokens=text.num_prompt_tokens,
            tokens=written.tokens,
            num_cell_tokens=turn.num_tokens,
            wall_s=turn.wall_s,
            tokens_per_second=turn.tokens_per_second,
            ttft_s=written.emitted[0][0],
            itl_p50_ms=p50_ms,
            itl_p99_ms=p99_ms,
            accept_lengths=tuple(number for _, number in written.emitted),
            accepted_by_source=written.accepted_by_source,
            num_bytes=turn.num_bytes,
            figures=written.figures,
            hosts=dict(engine.hosts),
            load=turn.load,
            void=written.void,
        )


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the texts that were generated at the same time have in common.

    number     index of the turn in the conversation
    at         when it began, UTC
    num_tokens, num_bytes  of all texts together
    wall_s     seconds until the last text ended
    tokens_per_second  of all texts together, perhaps without the prompts' part
    load       CPU cores that other processes used meanwhile
    """

    number: int
    at: datetime
    num_tokens: int
    wall_s: float
    tokens_per_second: float
    load: float
    num_bytes: int

    @classmethod
    def of(
        cls,
        number: int,
        at: datetime,
        written: Sequence[Written],
        load: float,
        num_bytes: int,
        *,
        without_prompt: bool,
    ) -> "_Turn":
        """Return the turn's totals over the texts that were written.

        without_prompt  the speed counts only what comes after the first tokens of the first text
        """
        num_tokens = sum(number for one in written for _, number in one.emitted)
        wall_s = max(one.emitted[-1][0] for one in written)
        counted, seconds = num_tokens, wall_s
        if without_prompt:
            counted -= sum(one.emitted[0][1] for one in written)
            seconds -= min(one.emitted[0][0] for one in written)
        speed = counted / seconds if seconds > 0 else 0.0
        return cls(number, at, num_tokens, wall_s, speed, load, num_bytes)


@dataclass(frozen=True, slots=True)
class _TextOfCell:
    """One generated text of a cell.

    number  index among the texts that are generated at the same time
    index   index of its prompt
    """

    number: int
    index: int
    num_prompt_tokens: int
    written: Written
    turn: _Turn
