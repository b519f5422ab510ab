"""`python -m coordinator train-head`: train a draft head for a target, from texts that it writes.

Checks everything that can be checked before torch is loaded. The training is in `train_heads.py`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from coordinator.api.models import folders
from coordinator.api.models.settings import located
from coordinator.api.prompts import Tokenization
from lab.training.features import NUM_BLOCK_LAYERS, layers_of
from proto.errors import ConfigurationError, ModelError, OutputError, SlipstreamError
from proto.head_kinds import HeadKind
from proto.installation import MODELS
from proto.system import cannot_write, remedy

if TYPE_CHECKING:  # torch is imported only when the command runs
    from lab.training.head_texts import Texts
    from lab.training.heads import Head
    from lab.training.teacher import Teacher
    from lab.training.train_heads import OpenWriter, Report, TrainingPlan

WORK, DONE = ".training", "training.json"  # of a run that is not finished, and of one that is
RUN = "run.json"
PROMPT_FILE = "--prompt-file"
REPORT_S = 30.0  # seconds between two lines where there is no terminal
NUM_HELD_OUT = 64  # held-out prompts
TEMPERATURES = (0.0, 1.0)
STATE_BYTES = 12  # of a head's parameter in a checkpoint: itself and two numbers of the optimizer
TRANSFORMER_BLOCK = 13  # about how many times the square of its width a head has parameters


Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Folder for the head. It is new, or empty, or holds an unfinished run of the same "
        "command, which then goes on.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The model that the head is for. A folder, a GGUF file, or a name on the Hugging Face "
        "hub.",
    ),
]
Kind = Annotated[
    Literal["eagle3", "eagle", "medusa", "dflash"],
    typer.Option(metavar="NAME", help="What to train: eagle3, eagle, medusa or dflash."),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="Prompts that the target continues. The head learns from what the target writes. "
        'One prompt per line, or JSON Lines with "prompt" or "turns" (.jsonl). '
        "Default: pieces of Python's standard library.",
    ),
]
AsIs = Annotated[
    bool, typer.Option("--as-is", help="Train on the texts themselves. Nothing is continued.")
]
NoChatTemplate = Annotated[
    bool,
    typer.Option(
        "--no-chat-template",
        help="Let the target continue each prompt as it is. By default a target that has a chat "
        "template answers it, as in a chat.",
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1e5,
        help="Minutes of computing. Texts and training count, in all runs together; on a CPU a "
        "minute in which other programs compute counts less.",
    ),
]
NumSteps = Annotated[
    int | None, typer.Option(min=1, max=10**8, help="Train so many steps, however long that takes.")
]
NumTexts = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=10**7,
        help="How many texts the target writes. Default: as many as it can write in three "
        "tenths of the minutes, or 512 with --num-steps.",
    ),
]
DraftVocab = Annotated[
    int | None,
    typer.Option(
        "--draft-vocab-size",
        metavar="N",
        min=2,
        max=10**6,
        help="How many tokens an EAGLE-3 head can draft: those that are commonest in the texts. "
        "Fewer make the head smaller and each draft cheaper. Default: half of the target's, at "
        "most 32,000.",
    ),
]
StartFrom = Annotated[
    Path | None,
    typer.Option(
        "--start-from",
        metavar="DIR",
        help="Begin with the weights of this head. train-head has written it for the same "
        "target and kind, and goes on with other texts.",
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="A model to compare the head with. It has the target's tokenizer."
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="Branch, tag or commit of --target on the hub."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="Where to train: cuda:0 or cpu. Default: a GPU if there is one."
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        metavar="NAME",
        help="The target's number type. float32, bfloat16, float16, or auto: that of the "
        "checkpoint.",
    ),
]


def train_head(
    *,
    out: Out,
    target: Target = str(MODELS / "target"),
    kind: Kind = "eagle3",
    texts: TextFile = None,
    as_is: AsIs = False,
    no_chat_template: NoChatTemplate = False,
    minutes: Minutes = 30.0,
    num_steps: NumSteps = None,
    num_texts: NumTexts = None,
    draft_vocab_size: DraftVocab = None,
    start_from: StartFrom = None,
    drafter: Drafter = None,
    target_revision: Revision = None,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Train a head that drafts for your target."""
    if draft_vocab_size is not None and HeadKind(kind) is not HeadKind.EAGLE3:
        raise ConfigurationError(
            f"--draft-vocab-size: a head of the kind {kind} can draft every token; leave it out, "
            "or use --kind eagle3"
        )
    if start_from is not None and draft_vocab_size is not None:
        raise ConfigurationError(
            "--start-from: the head keeps its vocabulary; leave --draft-vocab-size out"
        )
    name, target = target, located(target)
    found = _check_target(target, target_revision, HeadKind(kind))
    if drafter is not None:
        _check_drafter(drafter, target, target_revision)
    tokenization = Tokenization.of_model(target, target_revision)
    if tokenization is None:
        raise ConfigurationError(f"--target: {target} has no tokenizer.json, which texts need")
    folder = Folder(out)
    folder.check()
    _check_room(found, HeadKind(kind), folder, draft_vocab_size)

    from lab.training.head_texts import Chat, read_texts
    from lab.training.train_heads import TrainingPlan

    is_bare = as_is or no_chat_template
    chat = None if is_bare else Chat.of_model(target, target_revision, tokenization)
    read = read_texts(texts, tokenization, _end(found), as_is=as_is, chat=chat)
    folder.open(
        {
            "target": name,
            "target_revision": target_revision,
            "kind": kind,
            "texts": read.digest,
            "as_is": as_is,
            "no_chat_template": no_chat_template,
            "draft_vocab_size": draft_vocab_size,
            "start_from": None if start_from is None else str(start_from),
        }
    )
    if folder.figures is None:
        plan = TrainingPlan(
            *(HeadKind(kind), minutes, num_steps, num_texts),
            as_is=as_is,
            num_draft_tokens=draft_vocab_size,
            start_from=start_from,
        )
        _finish(folder, target, target_revision, plan, read, drafter, dtype=dtype, device=device)
    else:
        typer.echo(f"{out}: this head is finished; name another folder to train one anew", err=True)
    for line in lines_of(folder.figures or {}):
        typer.echo(line)
    typer.echo(f"\nUse it with --target {name} --drafter {out}")


def _finish(
    folder: "Folder",
    target: str,
    revision: str | None,
    plan: "TrainingPlan",
    texts: "Texts",
    drafter: str | None,
    *,
    dtype: str,
    device: str | None,
) -> None:
    """Train the head of a folder to its end, and measure it. Raises SlipstreamError."""
    try:
        teacher, head = _trained(target, revision, plan, texts, folder, dtype=dtype, device=device)
    except SlipstreamError:
        folder.leave()
        raise
    except KeyboardInterrupt:
        folder.leave()
        if (folder.out / "config.json").exists():
            typer.echo(
                f"{folder.out} holds the head as far as it was trained, and can be used; the same "
                "command goes on",
                err=True,
            )
        raise
    folder.finish(_measured(teacher, head, drafter, texts))


# -- before anything is loaded ---------------------------------------------------------------------


def _check_target(name: str, revision: str | None, kind: HeadKind) -> folders.Checkpoint:
    """Return the target's folder. Raises ModelError if it cannot be a target of such a head."""
    found = folders.find(name, revision)
    found.fetch_weights(None)
    found.check_weights()
    num_layers = found.number("num_hidden_layers")
    if num_layers is not None:
        layers_of(name, kind, num_layers)
    return found


def _check_drafter(name: str, target: str, target_revision: str | None) -> None:
    """Raise ModelError or ConfigurationError if a drafter cannot be compared with a head."""
    found = folders.find(name, None)
    found.fetch_weights(None)
    found.check_weights()
    own, other = Tokenization.of_model(name, None), Tokenization.of_model(target, target_revision)
    if own is None or other is None or not own.digests() & other.digests():
        raise ConfigurationError(
            f"--drafter: {name} has another tokenizer than the target; leave --drafter out"
        )


def _end(found: folders.Checkpoint) -> int | None:
    """Return the token between two texts: the target's first end-of-text token."""
    end = found.text_config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return end if type(end) is int else None


def _check_room(
    found: folders.Checkpoint, kind: HeadKind, folder: "Folder", num_draft_tokens: int | None
) -> None:
    """Raise ConfigurationError if the disk has no room for two checkpoints of the head.

    What an unfinished run has written is counted as room.
    """
    width, vocab_size = found.number("hidden_size"), found.number("vocab_size")
    if width is None or vocab_size is None:
        return
    of_eagle3 = num_draft_tokens or min(32_000, vocab_size // 2)
    num_rows = {HeadKind.MEDUSA: 4 * vocab_size, HeadKind.EAGLE3: of_eagle3}
    num_blocks = NUM_BLOCK_LAYERS if kind is HeadKind.DFLASH else 1
    num_parameters = num_blocks * TRANSFORMER_BLOCK * width**2 + num_rows.get(kind, 0) * width
    out = folder.out
    above = next(one for one in (out, *out.absolute().parents) if one.exists())
    needed, free = 2 * STATE_BYTES * num_parameters, shutil.disk_usage(above).free
    free += sum(path.stat().st_size for path in folder.work.glob("*"))
    if needed > free:
        raise ConfigurationError(
            f"--out: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free on the disk "
            f"of {above}; name a folder on another one"
        )


@dataclass(slots=True)
class Folder:
    """The folder of a head: new, or with a run to go on with, or with a finished head.

    figures  of the finished head; None: it is not finished
    is_new   `open` has made it
    """

    out: Path
    figures: dict[str, Any] | None = None
    is_new: bool = False

    @property
    def work(self) -> Path:
        """Return the folder of the unfinished run."""
        return self.out / WORK

    def check(self) -> None:
        """Raise ConfigurationError if the folder holds other files than those of a run."""
        if not self.out.exists():
            return
        is_empty = self.out.is_dir() and {path.name for path in self.out.iterdir()} <= {WORK}
        is_ours = "run" in (_read(self.out / DONE) or {}) or _read(self.work / RUN) is not None
        if not (is_empty or is_ours):
            raise ConfigurationError(
                f"--out: {self.out} holds something else; name a new or empty folder"
            )

    def open(self, run: dict[str, Any]) -> None:
        """Make the folder, or find the same run in it.

        Raises ConfigurationError if it holds another run, OutputError if it cannot be made.
        """
        from lab.training.files import write_text

        done, begun = _read(self.out / DONE), _read(self.work / RUN)
        before = begun if done is None else done.get("run")
        # Runs of earlier versions lack what they did not know.
        if before is not None and any(before.get(key) != run[key] for key in run):
            names = {key: f"--{key.replace('_', '-')}" for key in run} | {"texts": PROMPT_FILE}
            other = next((names[key] for key in run if before.get(key) != run[key]), PROMPT_FILE)
            raise ConfigurationError(
                f"--out: {self.out} holds a run with another {other}; name another folder"
            )
        if done is not None:
            self.figures = done.get("figures", {})
            shutil.rmtree(self.work, ignore_errors=True)
            return
        self.is_new = not self.out.exists()
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = remedy(error, cannot_write(error))
            raise OutputError(f"--out: {self.out} cannot be made: {why}") from error
        if begun is None:
            write_text(self.work / RUN, json.dumps(run))

    def leave(self) -> None:
        """Remove what `open` has made if the run has written nothing that it could go on with."""
        if {path.name for path in self.work.glob("*")} == {RUN}:
            shutil.rmtree(self.out if self.is_new else self.work, ignore_errors=True)

    def finish(self, figures: dict[str, Any]) -> None:
        """Note that the head is finished, and remove what only training needs."""
        from lab.training.files import write_text

        run = _read(self.work / RUN)
        write_text(self.out / DONE, json.dumps({"run": run, "figures": figures}, indent=2) + "\n")
        shutil.rmtree(self.work, ignore_errors=True)
        self.figures = figures


def _read(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# -- the run ---------------------------------------------------------------------------------------


def _trained(
    target: str,
    revision: str | None,
    plan: "TrainingPlan",
    texts: "Texts",
    folder: Folder,
    *,
    dtype: str,
    device: str | None,
) -> "tuple[Teacher, Head]":
    """Train a head, and write it to its folder; return it and its target."""
    import torch

    from engine.errors import lacks_memory
    from lab.training.heads import write_head
    from lab.training.teacher import load_teacher
    from lab.training.train_heads import train

    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    teacher = load_teacher(target, revision, plan.kind, dtype=dtype, device=device)

    def keep(head: "Head") -> None:
        write_head(head, plan.kind, teacher.shared, folder.out)

    try:
        with Screen(Console(stderr=True)) as screen:
            write = writer(target, revision, dtype=dtype, device=device)
            head = train(teacher, texts, plan, folder.work, screen.say, keep, write)
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise ModelError(
            f"{target}: not enough memory on {device} to train this head; use a larger device"
        ) from error
    keep(head)  # also where a run that was killed had only this left to do
    return teacher, head


def writer(target: str, revision: str | None, *, dtype: str, device: str) -> "OpenWriter | None":
    """Return what starts a node in which the target writes texts; None: the teacher writes them.

    On a GPU it does: there the node's memory would be missing in training.
    """
    from lab.training.train_heads import WINDOW
    from lab.training.writing import node_that_writes

    if device != "cpu":
        return None
    return partial(node_that_writes, target, revision, dtype=dtype, length=WINDOW)


class Screen:
    """Shows how far a run is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),  # so that the line fits 80 columns
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0, more="")
        self._part, self._begun, self._said_at = "", (0.0, 0.0), monotonic()

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, report: "Report") -> None:
        """Show a report."""
        now = monotonic()
        if report.part != self._part:
            self._part, self._begun = report.part, (now, report.share)
            self._bar.reset(self._task, description=report.part)
        loss = "" if report.loss is None else f"loss {report.loss:.2f}"
        more = f"{report.number} {report.part}" + (f", {loss}" if loss else "")
        self._bar.update(self._task, completed=min(1.0, report.share), more=more)
        if report.quality is not None:  # above the bar, where there is one
            self._console.print(quality_line(report), highlight=False, soft_wrap=True)
        if self._console.is_terminal or now - self._said_at < REPORT_S:
            return
        self._said_at = now
        done = report.share - self._begun[1]
        left = max(0.0, 1 - report.share) * (now - self._begun[0]) / done if done > 0 else None
        when = "" if left is None else f", about {left / 60:.1f} minutes left of this part"
        typer.echo(f"{more}{when}", err=True)


def quality_line(report: "Report") -> str:
    """Return how good the head of a report is, for people."""
    assert report.quality is not None
    first, tokens = report.quality.first, report.quality.tokens
    return (
        f"step {report.number}: {first:.0%} of first drafts right, {tokens:.2f} tokens a pass "
        f"(4 drafts, greedy, held-out texts)"
    )


def _measured(
    teacher: "Teacher", head: "Head", drafter: str | None, texts: "Texts"
) -> dict[str, Any]:
    """Return how often the first choices on held-out texts are right, by temperature."""
    import torch

    from engine.checkpoint.model import load_model
    from engine.errors import EngineError
    from lab.training import train_heads
    from lab.training.first_choices import drafter_hits, head_hits, rates

    hits = {"head": head_hits(head, teacher)}
    if drafter is not None:
        try:
            loaded = load_model(drafter, device=str(teacher.device))
        except EngineError as error:
            raise ModelError(str(error)) from error
        hits["drafter"] = drafter_hits(loaded.model)
    longest = train_heads.WINDOW // 2
    prompts = [texts.prompt(at, longest, held_out=True) for at in range(NUM_HELD_OUT)]
    figures: dict[str, Any] = {name: {} for name in hits}
    with train_heads.autocast(teacher.device), torch.inference_mode():
        for temperature in TEMPERATURES:
            found = rates(teacher, list(hits.values()), prompts, train_heads.WINDOW, temperature)
            for name, numbers in zip(hits, found, strict=True):
                figures[name][f"{temperature:g}"] = [round(number, 4) for number in numbers]
    return figures


def lines_of(figures: dict[str, Any]) -> Sequence[str]:
    """Return the figures as a table: how often drafts are right if those before them are."""
    lines = ["right on held-out text, draft by draft:"]
    for name, by_temperature in figures.items():
        for temperature, numbers in by_temperature.items():
            shares = "  ".join(f"{number:.3f}" for number in numbers)
            lines.append(f"  {name:8} temperature {temperature:4} {shares}")
    return lines
