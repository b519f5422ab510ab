"""`python -m coordinator experiment FILE`: run it, or go on with it, and show what came of it."""

import hashlib
import json
import shlex
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from coordinator.api.chat import ChatTemplate
from coordinator.api.config import PairConfig
from coordinator.api.models.preflight import look_at
from coordinator.api.prompts import Tokenization
from coordinator.launching.devices import is_device_here
from coordinator.launching.launcher import ConnectRay
from lab.experiments import surroundings
from lab.experiments.description import (
    Arm,
    Experiment,
    is_same_text,
    load,
    num_devices,
)
from lab.experiments.engines import Warm, is_there
from lab.experiments.folder import TRACES, ArmRecord, Folder, Header, RunRecord
from lab.experiments.prompt_sets import Conversation, Prompt, read
from lab.experiments.rows import Row, RowFile
from lab.experiments.runner import Job, Runner, Step
from lab.experiments.testbeds import with_models
from lab.experiments.traces import write_traces
from proto.errors import ConfigurationError, did_you_mean, shown
from proto.installation import missing

SHIPPED = Path(__file__).parent
SUFFIX = ".toml"
NO_TABLES = "type the same command again"
LINE_S = 15.0  # between two lines where there is no terminal


def experiment(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Experiment file, or the name of one that ships.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results. Default: results/NAME. An experiment that was "
            "interrupted goes on there."
        ),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Other prompts than the file's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="In place of the file's.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of all arms, as in the file."),
    ] = None,
    models: Annotated[
        Path, typer.Option(help="Where models are made that the file asks for.")
    ] = Path("results/models"),
    with_predictions: Annotated[
        bool, typer.Option("--predict", help="Put what `plan` would have said beside the figures.")
    ] = False,
    with_traces: Annotated[
        bool, typer.Option("--trace", help="Trace one more text of each arm, in OUT/traces.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write report.html as well.")] = False,
) -> None:
    """Run an experiment: every arm on every prompt, in an order drawn anew, and compare them."""
    path = _path_of(file)
    given = {"prompts": prompts and str(prompts), "limit": limit, "repetitions": repetitions}
    overrides = _overrides(settings or [])
    overrides |= {name: value for name, value in given.items() if value is not None}
    wanted = load(path, overrides)
    sets = {arm.name: read(Path(arm.work.prompts), arm.work.limit) for arm in wanted.arms}
    console = Console(stderr=True, highlight=False)
    with Folder(out or Path("results") / path.stem) as folder:
        header, rows = folder.open(_header(wanted, sets))  # what is wrong with it is said now
        if rows.rows:
            console.print(f"{len(rows.rows)} texts are in {folder.path} already", markup=False)
        with Watch(console) as watch:
            arms = _that_run_here(wanted.arms, watch.warn)
            jobs = [_job(arm, sets[arm.name]) for arm in with_models(arms, models, watch.warn)]
            _check_models([job.arm for job in jobs])
            header = folder.begin(header, _run(watch.warn))
            _measure(wanted, jobs, rows, watch, context.obj)
            traces = ""
            if with_traces:
                traces = _traced(jobs, rows.rows, folder.path / TRACES, watch, context.obj)
        # Only here are matplotlib and scipy loaded: other commands have no use for them.
        try:
            from lab.experiments.results.writing import Wanted, write_results
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"{len(rows.rows)} texts are kept in {folder.path}, but their tables and pictures "
                f"need {missing(str(error.name), 'experiments')}, and {NO_TABLES}"
            ) from error

        wanted_results = Wanted(
            decoders={job.arm.name: job.decode for job in jobs},
            predicted=_predicted(jobs, rows.rows, folder.path) if with_predictions else None,
            report=report,
            command=shlex.join(["python", "-m", "coordinator", *sys.argv[1:]]),
            traces=traces,
        )
        typer.echo(write_results(folder.path, header, rows.rows, wanted_results))


def _measure(
    wanted: Experiment,
    jobs: Sequence[Job],
    rows: RowFile,
    watch: "Watch",
    connect_ray: ConnectRay | None,
) -> None:
    """Run what is not there yet. Raises SlipstreamError."""
    # A cluster has a place for one pair.
    is_on_ray = any(job.arm.launch.ray for job in jobs)
    num_warm = 1 if is_on_ray else wanted.description.warm_pairs
    with closing(Warm(num_warm, connect_ray)) as warm:
        runner = Runner(
            *(wanted, jobs, rows, warm), num_warm=num_warm, say=watch.say, warn=watch.warn
        )
        try:
            runner.run()
        except KeyboardInterrupt:
            watch.warn(f"{len(rows.rows)} texts are kept; the same command goes on from there")
            raise


def _traced(
    jobs: Sequence[Job],
    rows: Sequence[Row],
    where: Path,
    watch: "Watch",
    connect_ray: ConnectRay | None,
) -> str:
    """Where the traces are, in words. Raises SlipstreamError."""
    measured = {row.arm for row in rows if row.stage == "main"}
    chosen = [job for job in jobs if job.arm.name in measured]
    files = write_traces(chosen, where, connect_ray, watch.warn)
    return f"{where}: {len(files)} traces, for trace-summary and trace viewers"


def _path_of(file: Path) -> Path:
    """An experiment file, here or one that ships. Raises ConfigurationError."""
    shipped = SHIPPED / file.with_suffix(SUFFIX).name
    if file.exists() or file.parent != Path() or not shipped.exists():
        if file.is_file():
            return file
        names = sorted(path.stem for path in SHIPPED.glob(f"*{SUFFIX}"))
        raise ConfigurationError(
            f"there is no experiment {file}; those that ship are {', '.join(names)}"
            f"{did_you_mean(file.stem, names)}"
        )
    return shipped


def _overrides(texts: list[str]) -> dict[str, Any]:
    """Of `--set`. Raises ConfigurationError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--set: expected NAME=VALUE, got {shown(text)}")
        try:
            found[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip()] = value  # a text without its quotes
    return found


def _that_run_here(arms: Sequence[Arm], warn: Callable[[str], None]) -> list[Arm]:
    """Without those for which something is missing, which a line for each such thing says."""
    missing: dict[str, list[str]] = {}
    found = []
    for arm in arms:
        if reason := _what_is_missing(arm):
            missing.setdefault(reason, []).append(arm.name)
        else:
            found.append(arm)
    for reason, (first, *others) in missing.items():
        names = f"{first} and {len(others)} more are" if others else f"{first} is"
        warn(f"{names} left out: {reason}")
    return found


def _what_is_missing(arm: Arm) -> str:
    """In a few words; empty: nothing, as far as can be known before it is tried."""
    if not is_there(arm):
        return f"{arm.work.peer} is not installed"
    if not arm.is_optional or arm.launch.ray or arm.work.peer:
        return ""
    devices = arm.pair.target_device, arm.pair.drafter_device
    return next((f"there is no {one} here" for one in devices if not is_device_here(one)), "")


def _job(arm: Arm, prompts: Sequence[Prompt]) -> Job:
    """Raises ConfigurationError, ModelError."""
    tokenization = Tokenization.of_model(arm.pair.target, arm.pair.target_revision)
    if tokenization is None:
        raise ConfigurationError(f"{arm.pair.target} has no tokenizer.json to read prompts with")
    template = None
    if arm.work.chat:
        template = ChatTemplate.of_model(arm.pair.target, arm.pair.target_revision)
    most = arm.work.max_prompt_tokens
    talk = partial(Conversation, tokenization=tokenization, max_tokens=most, template=template)

    def decode(tokens: Sequence[int]) -> str:
        return tokenization.decode(tuple(tokens))

    return Job(arm, prompts, talk, decode)


def _check_models(arms: Sequence[Arm]) -> None:
    """Raises SlipstreamError if a pair of this machine could not be started, hours later."""
    looked_at: list[PairConfig] = []
    for arm in arms:
        if not arm.work.peer and not arm.launch.ray and arm.pair not in looked_at:
            look_at(arm.pair, drafts=True)
            looked_at.append(arm.pair)


def _predicted(jobs: Sequence[Job], rows: Sequence[Row], folder: Path) -> dict[str, float]:
    """Tokens a second by arm. Raises SlipstreamError."""
    from lab.experiments.results.predictions import has_ranks, predict, recorded

    drafting = [job.arm for job in jobs if not job.arm.work.peer and has_ranks(job.arm.pair)]
    found: dict[str, float] = {}
    kinds: dict[tuple[object, ...], list[Arm]] = {}
    for arm in drafting:  # arms with the same models and texts have the same ranks
        pair, work = arm.pair, arm.work
        models = pair.target, pair.drafter, pair.dtype
        texts = arm.sampling.temperature, arm.sampling.max_tokens, work.prompts, work.limit
        kinds.setdefault((*models, *texts), []).append(arm)
    for number, arms in enumerate(kinds.values()):
        ranks = recorded(arms[0], folder / f"ranks-{number}.jsonl")
        found |= predict(arms, rows, ranks)
    return found


def _header(wanted: Experiment, sets: Mapping[str, Sequence[Prompt]]) -> Header:
    """What the experiment is."""
    description = wanted.description
    names = {arm.name: arm for arm in wanted.arms}
    arms = tuple(
        ArmRecord(
            arm.name,
            dict(arm.settings),
            arm.baseline,
            is_same_text=arm.baseline != "" and is_same_text(arm, names[arm.baseline]),
            swept_from=arm.group,
            num_devices=num_devices(arm),
            all_devices=_on_all_devices(arm, wanted.arms),
        )
        for arm in wanted.arms
    )
    # How a pair warms up decides no text, and folders that were begun before it could be said
    # are to be gone on with.
    others = description.model_dump(exclude={"arms", "fixed", "title", "question", "x"})
    if description.warm_prompts == 1:
        del others["warm_prompts"]
    decided = {
        "arms": [(arm.name, arm.settings) for arm in arms],
        "prompts": [[(one.name, one.turns) for one in sets[arm.name]] for arm in arms],
        "others": others,
    }
    digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()
    return Header(
        title=description.title,
        question=description.question,
        digest=digest,
        x=description.x,
        prompts=", ".join(sorted({Path(arm.work.prompts).name for arm in wanted.arms})),
        num_prompts=max(map(len, sets.values())),
        repetitions=description.repetitions,
        max_tokens=max(arm.sampling.max_tokens for arm in wanted.arms),
        arms=arms,
    )


def _run(say: Callable[[str], None]) -> RunRecord:
    """This run of it, once the machine is quiet."""
    return RunRecord(
        datetime.now(UTC).isoformat(timespec="seconds"),
        surroundings.machine(),
        surroundings.versions(),
        surroundings.commit(),
        surroundings.wait_for_quiet(say),
    )


def _on_all_devices(arm: Arm, arms: Sequence[Arm]) -> str:
    """The arm that gives the target all devices that this one uses; empty: there is none."""
    return next(
        (
            one.name
            for one in arms
            if not one.speculation.drafts
            and not one.work.peer
            and num_devices(one) == num_devices(arm) > 1
            and one.baseline == arm.baseline
            and one is not arm
        ),
        "",
    )


class Watch:
    """How far it is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = -LINE_S
        self._stage = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Watch":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def warn(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)

    def say(self, step: Step) -> None:
        """The next cell."""
        left = "" if step.left_s is None else f"about {_duration(step.left_s)} left"
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", left="")
            self._bar.update(
                self._task,
                description=f"{step.key.stage}: {step.key.arm}"[:40],
                completed=step.num_done,
                total=step.num_cells,
                left=left,
            )
        elif step.key.stage != self._stage or time.monotonic() - self._last_s >= LINE_S:
            self._stage, self._last_s = step.key.stage, time.monotonic()
            self.warn(f"{step.key.stage}: {step.num_done} of {step.num_cells} cells {left}".strip())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
