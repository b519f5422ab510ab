"""`python -m coordinator experiment FILE`: run or resume an experiment, and show the results."""

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
from typing import TYPE_CHECKING, Annotated, Any

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
from lab.experiments.engines import Warm, what_is_missing
from lab.experiments.folder import AFTER_PROMPT, TRACES, ArmRecord, Folder, Header, RunRecord
from lab.experiments.prompt_sets import Conversation, Prompt, read
from lab.experiments.rows import Row, RowFile
from lab.experiments.runner import Job, Runner, Step
from lab.experiments.testbeds import with_models
from lab.experiments.traces import write_traces
from lab.needed import check_installed
from proto.errors import ConfigurationError, did_you_mean, shown

if TYPE_CHECKING:
    from lab.pair.record import Measured

SHIPPED = Path(__file__).parent
SUFFIX = ".toml"
DRAWN_WITH = ("matplotlib", "scipy")  # packages that only tables and pictures need
OR_TEXTS_ONLY = ", or measure with --texts-only and write the tables elsewhere"
BAR, NAME = 10, 32  # columns of the bar and of the words before it: a line has 80
LINE_S = 15.0  # seconds between two lines of progress where there is no terminal

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Experiment file, or the name of one that ships.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for the results. If an experiment was interrupted there, it continues. "
        "Default: results/NAME.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file", metavar="FILE", help="Prompts to use instead of the experiment's."
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use only this many prompts, spread over the file.")
]
Repetitions = Annotated[
    int | None,
    typer.Option(min=1, help="How often each prompt is run. Default: as the experiment says."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set this for all arms, as in the file. May be given several times.",
    ),
]
Models = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder for the models that the experiment makes.")
]
WithPredictions = Annotated[
    bool, typer.Option("--predict", help="Show the speed that `plan` predicts beside each figure.")
]
MeasuredPair = Annotated[
    Path | None,
    typer.Option(
        "--pair",
        metavar="FILE",
        help="Predict from what `measure` has written of a pair. Arms with another pair get no "
        "prediction. It takes the place of --predict.",
    ),
]
WithTraces = Annotated[
    bool,
    typer.Option("--trace", help="Record a trace of one more text of each arm, in OUT/traces."),
]
Report = Annotated[bool, typer.Option("--report", help="Write report.html, too.")]
TextsOnly = Annotated[
    bool,
    typer.Option(
        "--texts-only",
        help="Measure, and write no tables and pictures. The same command without it writes them, "
        "also on another machine.",
    ),
]


def experiment(
    context: typer.Context,
    file: File,
    out: Out = None,
    prompts: Prompts = None,
    limit: Limit = None,
    repetitions: Repetitions = None,
    settings: Settings = None,
    models: Models = Path("results/models"),
    with_predictions: WithPredictions = False,
    pair: MeasuredPair = None,
    with_traces: WithTraces = False,
    report: Report = False,
    texts_only: TextsOnly = False,
) -> None:
    """Compare settings (arms) on every prompt, in random order."""
    _check_results(texts_only, {"--report": report, "--predict": with_predictions, "--pair": pair})
    path = _path_of(file)
    given = {"prompts": prompts and str(prompts), "limit": limit, "repetitions": repetitions}
    overrides = _overrides(settings or [])
    overrides |= {name: value for name, value in given.items() if value is not None}
    wanted = load(path, overrides)
    measured = None if pair is None else _read_pair(pair)
    sets = {arm.name: read(Path(arm.work.prompts), arm.work.limit) for arm in wanted.arms}
    console = Console(stderr=True, highlight=False)
    with Folder(out or Path("results") / path.stem) as folder:
        header, rows = folder.open(_header(wanted, sets))  # raises before anything is measured
        if rows.rows:
            console.print(f"{len(rows.rows)} texts are in {folder.path} already", markup=False)
        with Watch(console) as watch:
            arms = _that_run_here(wanted.arms, watch.warn)
            jobs = [_job(arm, sets[arm.name]) for arm in with_models(arms, models, watch.warn)]
            _check_models([job.arm for job in jobs])
            if measured is not None:
                _check_pair(measured, [job.arm for job in jobs])
            header = folder.begin(header, _run(watch.warn))
            _measure(wanted, jobs, rows, watch, context.obj)
            traces = ""
            if with_traces:
                traces = _traced(jobs, rows.rows, folder.path / TRACES, watch, context.obj)
        if texts_only:
            typer.echo(f"{folder.path}: {len(rows.rows)} texts", err=True)
            return
        # matplotlib and scipy are imported only here, because other commands do not need them.
        from lab.experiments.results.writing import Wanted, write_results

        predicted = None
        if with_predictions or measured is not None:
            predicted = _predicted(jobs, rows.rows, folder.path, measured)
        wanted_results = Wanted(
            decoders={job.arm.name: job.decode for job in jobs},
            predicted=predicted,
            report=report,
            command=shlex.join(["python", "-m", "coordinator", *sys.argv[1:]]),
            traces=traces,
        )
        typer.echo(write_results(folder.path, header, rows.rows, wanted_results))


def _check_results(texts_only: bool, of_results: Mapping[str, object]) -> None:
    """Check now, not hours later, that the wanted results can be written.

    of_results  flags that need tables and pictures, with their values

    Raises ConfigurationError.
    """
    if not texts_only:
        check_installed("experiment", *DRAWN_WITH, otherwise=OR_TEXTS_ONLY)
    elif given := [flag for flag, value in of_results.items() if value]:
        raise ConfigurationError(f"--texts-only writes no results, so leave out {given[0]}")


def _measure(
    wanted: Experiment,
    jobs: Sequence[Job],
    rows: RowFile,
    watch: "Watch",
    connect_ray: ConnectRay | None,
) -> None:
    """Run all cells (arm, prompt, repetition) that have no rows yet. Raises SlipstreamError."""
    # A Ray cluster has room for one pair of target and drafter.
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
    """Write a trace of each measured arm; return the line that tells the user where the traces are.

    Raises SlipstreamError.
    """
    measured = {row.arm for row in rows if row.stage == "main"}
    chosen = [job for job in jobs if job.arm.name in measured]
    files = write_traces(chosen, where, connect_ray, watch.warn)
    return f"{where}: {len(files)} traces, for trace-summary and trace viewers"


def _path_of(file: Path) -> Path:
    """Return the path of the experiment file: the given file, or one that ships with this name.

    Raises ConfigurationError if there is no such file.
    """
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
    """Return the settings in the NAME=VALUE texts of `--set`. Raises ConfigurationError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--set: expected NAME=VALUE, got {shown(text)}")
        try:
            found[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip()] = value  # not TOML: taken as a string that was given without quotes
    return found


def _that_run_here(arms: Sequence[Arm], warn: Callable[[str], None]) -> list[Arm]:
    """Return the arms that can run on this machine; warn once for each thing that is missing."""
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
    """Return in a few words what this machine lacks to run the arm; "" if nothing is known.

    Devices are looked at only for optional arms of a local pair.
    """
    if reason := what_is_missing(arm):
        return reason
    if not arm.is_optional or arm.launch.ray or arm.work.peer:
        return ""
    devices = arm.pair.target_device, arm.pair.drafter_device
    return next((f"there is no {one} here" for one in devices if not is_device_here(one)), "")


def _job(arm: Arm, prompts: Sequence[Prompt]) -> Job:
    """Return the arm with its prompts, tokenizer and chat template.

    Raises ConfigurationError, ModelError.
    """
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
    """Check the models of all local pairs now, not hours later. Raises SlipstreamError."""
    looked_at: list[PairConfig] = []
    for arm in arms:
        if not arm.work.peer and not arm.launch.ray and arm.pair not in looked_at:
            look_at(arm.pair, drafts=True)
            looked_at.append(arm.pair)


def _read_pair(path: Path) -> "Measured":
    """Return what `measure` has written into a file. Raises ConfigurationError."""
    from lab.pair.files import read as read_file  # it knows the simulator, and so both nodes

    return read_file(path, "--pair")


def _check_pair(measured: "Measured", arms: Sequence[Arm]) -> None:
    """Raise ConfigurationError if the file is of a pair that no arm has."""
    from lab.experiments.results.predictions import is_of_pair

    if not any(is_of_pair(arm, measured) for arm in arms if arm.speculation.drafts):
        target, drafter = (Path(node.model).name[-20:] for node in measured.nodes)
        raise ConfigurationError(
            f"--pair: no arm has {target} with {drafter} on the file's devices; `measure` your pair"
        )


def _predicted(
    jobs: Sequence[Job], rows: Sequence[Row], folder: Path, measured: "Measured | None"
) -> dict[str, float]:
    """Return the tokens per second that the simulator predicts, by name of arm.

    measured  what costs and acceptance are taken from; None: from the rows, and from ranks of their
              texts that are recorded into `folder`

    Raises SlipstreamError.
    """
    from lab.experiments.results.predictions import has_ranks, predict, predict_of_pair, recorded

    if measured is not None:
        return predict_of_pair(measured, [job.arm for job in jobs], rows)
    drafting = [job for job in jobs if not job.arm.work.peer and has_ranks(job.arm.pair)]
    found: dict[str, float] = {}
    kinds: dict[tuple[object, ...], list[Job]] = {}
    for job in drafting:  # the recorded ranks of drafts depend only on models and texts
        pair, work, sampling = job.arm.pair, job.arm.work, job.arm.sampling
        models = pair.target, pair.drafter, pair.dtype
        texts = sampling.temperature, sampling.max_tokens, work.prompts, work.limit
        kinds.setdefault((*models, *texts), []).append(job)
    for number, alike in enumerate(kinds.values()):
        plain = next((job for job in alike if not job.arm.speculation.drafts), None)
        if plain is None:
            continue  # without the texts of the target alone nothing can be predicted
        ranks = recorded(plain, rows, folder / f"ranks-{number}.jsonl")
        if ranks:
            found |= predict([job.arm for job in alike], rows, ranks)
    return found


def _header(wanted: Experiment, sets: Mapping[str, Sequence[Prompt]]) -> Header:
    """Return the header of the experiment, with a digest of all that decides its rows."""
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
    # Defaults of newer settings are left out of the digest, so that folders that were begun before
    # the setting existed can still be resumed.
    others = description.model_dump(exclude={"arms", "fixed", "title", "question", "x"})
    if description.warm_prompts == 1:
        del others["warm_prompts"]
    if not description.without_prompt:
        del others["without_prompt"]
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
        speed=AFTER_PROMPT if description.without_prompt else "",
    )


def _run(say: Callable[[str], None]) -> RunRecord:
    """Wait for a quiet machine; return the record of this run (time, machine, versions, load)."""
    return RunRecord(
        datetime.now(UTC).isoformat(timespec="seconds"),
        surroundings.machine(),
        surroundings.versions(),
        surroundings.commit(),
        surroundings.wait_for_quiet(say),
    )


def _on_all_devices(arm: Arm, arms: Sequence[Arm]) -> str:
    """Return the name of a plain-decoding arm that uses as many devices; "" if there is none.

    Both arms have the same baseline, and use more than 1 device.
    """
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
    """Shows the progress of an experiment: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = -LINE_S
        self._stage = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR),
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
        if self._console.is_terminal:  # elsewhere it would print an empty line
            self._bar.stop()

    def warn(self, line: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(line, markup=False)

    def say(self, step: Step) -> None:
        """Show that this step (the next cell) begins, and about how much time is left."""
        left = "" if step.left_s is None else f"about {_duration(step.left_s)} left"
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", left="")
            self._bar.update(
                self._task,
                description=f"{step.key.stage}: {step.key.arm}"[:NAME],
                completed=step.num_done,
                total=step.num_cells,
                left=left,
            )
        elif step.key.stage != self._stage or time.monotonic() - self._last_s >= LINE_S:
            self._stage, self._last_s = step.key.stage, time.monotonic()
            done = f"{step.key.stage}: {step.num_done} of {step.num_cells} measurements {left}"
            self.warn(done.strip())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
