"""`python -m coordinator generate`: read the prompts, continue each, show or print what comes."""

import os
import signal
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api import prompts
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import MakeLauncher, Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from coordinator.cli import flags as options
from coordinator.cli.flags import Flags, parse_ids, with_settings
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.wrapping import for_stderr
from coordinator.cli.writers import JsonWriter, Place, Progress, TextWriter, Writer, engines
from coordinator.launching.launcher import ConnectRay, Launcher, Wanted
from coordinator.launching.remote import RemoteNodes
from proto.errors import ConfigurationError, OutputError, SlipstreamError, TextError
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import check_writable

# -- turns -----------------------------------------------------------------------------------------

# Texts that are written at once, read one after another.


class Turns:
    """Reads mixed steps. Those of a text whose turn has not come are held until then."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._held: dict[tuple[Request, int], deque[Step]] = defaultdict(deque)

    def of(self, request: Request) -> Iterator[Step]:
        """All steps of a request, one of its texts after another. Raises what ends the steps."""
        index = 0
        while index < request.num_texts:  # it may become less
            yield from self._of_text(request, index)
            index += 1

    def _of_text(self, request: Request, index: int) -> Iterator[Step]:
        held = self._held[request, index]
        is_open = True
        while is_open:
            while not held:
                step = next(self._steps)
                self._held[step.request, step.index].append(step)
            step = held.popleft()
            is_open = not step.is_last
            yield step
        del self._held[request, index]


# -- winding up ------------------------------------------------------------------------------------

# Ctrl-C where several texts are written: once finishes those that run, twice ends now.

WAITS = "interrupted: no more texts are begun; {} are finished first (Ctrl-C again ends now)"


class WindingUp:
    """Has Ctrl-C while it is entered. Where one text runs, whoever had it before has it."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._before = signal.getsignal(signal.SIGINT)
        # Under nohup it is ignored and stays so; other threads cannot have it.
        in_main = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main and callable(self._before)

    def __enter__(self) -> "WindingUp":
        if self._is_ours:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._batch.num_open > 1 and not self._batch.is_winding_up:
            self._batch.wind_up()
            line = WAITS.format(f"{self._batch.num_open} texts") + "\n"
            start = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
            with suppress(OSError):
                # Not through sys.stderr: this may have interrupted whoever writes to it.
                os.write(2, (start + line).encode())
        elif callable(self._before):
            self._before(number, frame)


# -- generate --------------------------------------------------------------------------------------

EXIT_SOME_FAILED = 2


@with_settings
def generate(
    *,
    context: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    prompt_ids: options.PromptIds = None,
    chat: options.Chat = False,
    pair: PairConfig,
    speculation: SpeculationConfig,
    # Without drafts: --policy ar.
    request: Annotated[SamplingParams, Flags(but=("speculate",))],
    launch: LaunchConfig,
    as_json: options.Json = False,
    show_speculation: options.ShowSpeculation = False,
    verbose: options.Verbose = False,
    trace: options.Trace = None,
) -> None:
    """Continue PROMPT, or every prompt of a file, with two models in two processes."""
    speculation.check(pair)
    if speculation.reference:
        prompts.text_of(Path(speculation.reference))  # before anything is started
    if trace is not None:
        check_writable(trace, "--trace")
    asked = _asked(prompt, prompt_file, prompt_ids, chat=chat)
    writer = _writer(
        speculation.policy,
        request,
        as_json=as_json,
        show_speculation=show_speculation,
        verbose=verbose,
    )
    with Progress(Console(stderr=True), models_of(pair)) as progress:
        with_drafter = speculation.drafts and pair.has_draft_model
        launcher = launcher_for(
            launch, pair, context.obj, with_drafter=with_drafter, invite=progress.invite
        )
        config = _with_room_for(len(asked) * request.n, pair)
        started = Pair(
            config,
            with_drafter=speculation.drafts,
            say=progress.say,
            check=partial(_check_known, asked, request),
            make_launcher=launcher,
            traced=trace is not None,
        )
    with started as running:
        for line in (*running.whereabouts(), *running.notices()):
            typer.echo(for_stderr(harmless(line)), err=True)
        if chat and running.chat_template.is_plain:
            typer.echo("the target has no chat template; a plain one is used", err=True)
        run = Run(running, speculation, request, writer)
        try:
            all_fit = run.every(asked)
        finally:
            if trace is not None:
                running.write_trace(trace)
        if verbose and not as_json:
            typer.echo(for_stderr(engines(running.service.registry.nodes)), err=True)
        if trace is not None:
            words = f"trace: {trace} (for ui.perfetto.dev, or trace-summary)"
            typer.echo(for_stderr(words), err=True)
        if not all_fit:
            raise typer.Exit(EXIT_SOME_FAILED)


def _with_room_for(num_texts: int, pair: PairConfig) -> PairConfig:
    """The nodes make room for no more texts than there are.

    In reproducible mode the shape of every pass would change with it, and so could the text.
    """
    if pair.reproducible:
        return pair
    return pair.model_copy(update={"max_num_seqs": min(pair.num_seqs, num_texts)})


def _writer(
    policy: str,
    request: SamplingParams,
    *,
    as_json: bool,
    show_speculation: bool,
    verbose: bool,
) -> Writer:
    """Raises ConfigurationError."""
    if as_json:
        if show_speculation:
            raise ConfigurationError("--show-speculation is for people; --json has token_origins")
        return JsonWriter(policy)
    if (request.logprobs, request.prompt_logprobs) != (None, None):
        raise ConfigurationError("--logprobs and --prompt-logprobs are shown with --json")
    return TextWriter(policy, request, show_speculation=show_speculation, verbose=verbose)


# What a node that was started by hand has been told itself.
OF_THE_NODES = (
    *("target_device", "drafter_device", "tensor_parallel_size", "drafter_tensor_parallel_size"),
    *("dtype", "drafter_dtype", "backend", "reproducible", "heads", "heads_revision"),
    "max_draft_candidates",
    *("simulate_target_ms", "simulate_target_ms_per_row"),
    *("simulate_draft_ms", "simulate_draft_ms_per_row"),
)


def launcher_for(
    launch: LaunchConfig,
    pair: PairConfig,
    connect_ray: ConnectRay | None,
    *,
    with_drafter: bool,
    invite: Callable[[Path | None, NodeConfig], None],
) -> MakeLauncher:
    """Who starts the nodes. Raises ConfigurationError.

    invite  is told of each node that somebody has to start by hand, and of the folder of keys
    """
    devices = {Role.TARGET: pair.target_device}
    if with_drafter:
        devices[Role.DRAFTER] = pair.drafter_device
    if launch.nodes == "remote":
        for name in OF_THE_NODES:
            if getattr(pair, name) != PairConfig.model_fields[name].default:
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(
                    f"{flag} is for nodes that are started here; for others see "
                    "`python -m target_node --help`"
                )
        told = partial(invite, launch.keys)
        return partial(RemoteNodes, launch.listen, launch.keys, tuple(devices), told)
    if not launch.ray:
        return Launcher
    if connect_ray is None:
        raise ConfigurationError("--ray works with `python -m coordinator` only")
    wanted = Wanted(launch.ray, devices, is_packed=launch.ray_pack, ranks=pair.ranks)
    return partial(connect_ray, wanted)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it was given: a text, a chat's question, or token ids."""

    text: str | None
    ids: tuple[int, ...] = ()
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt and what is asked for, or why it does not fit."""

    place: Place
    request: Request | None
    misfit: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all of its texts are there."""
        return self.request is not None and self.request.is_complete

    @property
    def is_well(self) -> bool:
        """Whether all of its texts were completed."""
        if self.request is None or not self.request.is_complete:
            return False
        return all(made.error is None for made in self.request.whole().outputs)

    @property
    def has_failed(self) -> bool:
        """Whether one of its texts could not be completed."""
        return self.request is not None and self.request.failure is not None


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts on warm nodes: several texts are written at once, and shown one after another."""

    pair: Pair
    speculation: SpeculationConfig
    request: SamplingParams
    writer: Writer

    def every(self, asked: Sequence[Asked]) -> bool:
        """Whether all went well. What fits is generated although other prompts do not fit.

        Raises KeyboardInterrupt behind the texts that ran if Ctrl-C has left others out.
        """
        prompts = [self._prompt(index, len(asked), one) for index, one in enumerate(asked)]
        requests = [prompt.request for prompt in prompts if prompt.request is not None]
        wanted = sum(request.num_texts for request in requests)
        batch = Batch(self.pair, requests)
        with WindingUp(batch), closing(batch.steps()) as steps:
            self._show(prompts, Turns(steps))
        self.writer.close()
        if sum(request.num_texts for request in requests) < wanted:
            raise KeyboardInterrupt
        return all(prompt.is_well for prompt in prompts)

    def _prompt(self, index: int, total: int, asked: Asked) -> _Prompt:
        """Raises ConfigurationError if it does not fit and is the only one."""
        skips = self.request.skip_special_tokens
        decoder = partial(self.pair.decoder, skip_special_tokens=skips)
        place = Place(index, total, asked.text, decoder)
        try:
            text, ids = _encoded(self.pair, asked)
            self.pair.check(ids)
        except ConfigurationError as error:
            if total == 1:
                raise
            return _Prompt(place, None, str(error))
        return _Prompt(place, Request(self.pair, self.speculation, text, ids, self.request))

    def _show(self, prompts: Sequence[_Prompt], turns: Turns) -> None:
        """Show each in its turn. Where one fails, or on Ctrl-C, what is complete still comes."""
        for number, prompt in enumerate(prompts):
            try:
                self._show_one(prompt, turns)
            except OutputError:
                raise
            except (SlipstreamError, KeyboardInterrupt) as error:
                for one in prompts[number + 1 :]:
                    if one.is_complete:
                        self._show_one(one, turns)
                if len(prompts) == 1 or isinstance(error, KeyboardInterrupt):
                    raise
                blamed = next((one for one in prompts if one.has_failed), prompt)
                raise type(error)(f"{blamed.place}: {error}") from error

    def _show_one(self, prompt: _Prompt, turns: Turns) -> None:
        if prompt.request is not None and not prompt.request.num_texts:
            return  # Ctrl-C came before it was begun
        self.writer.begin(prompt.place)
        if prompt.request is None:
            self.writer.failed(prompt.place, prompt.misfit)
            return
        try:
            for step in turns.of(prompt.request):
                self.writer.add(step.emit, step.part)
        except (SlipstreamError, KeyboardInterrupt):
            self.writer.break_off()
            raise
        whole = prompt.request.whole()
        self.writer.end(whole)
        for made in whole.outputs:
            if made.error is None:
                continue
            if prompt.place.total == len(whole.outputs) == 1:
                raise TextError(made.error)
            line = f"error: {_text_of(prompt.place, made.index, whole)}: {made.error}"
            typer.echo(for_stderr(line), err=True)


def _text_of(place: Place, index: int, whole: RequestOutput) -> str:
    """How a text is called among all."""
    if len(whole.outputs) == 1:
        return str(place)
    text = f"text {index + 1} of {len(whole.outputs)}"
    return text if place.total == 1 else f"{place}, {text}"


def _encoded(pair: Pair, asked: Asked) -> tuple[str | None, tuple[int, ...]]:
    """Raises ConfigurationError."""
    if asked.text is None:
        return None, asked.ids
    if asked.is_chat:
        return pair.encode_chat([{"role": "user", "content": asked.text}])
    return asked.text, pair.encode(asked.text)


def _check_known(asked: Sequence[Asked], request: SamplingParams, pair: Pair) -> None:
    """Before a process starts. Of several prompts those that fit are answered all the same.

    Raises ConfigurationError.
    """
    pair.reviewed_params(request)
    if len(asked) == 1:
        pair.check(_encoded(pair, asked[0])[1])


def _asked(prompt: str | None, file: Path | None, ids: str | None, *, chat: bool) -> list[Asked]:
    """What is to be continued, at least one prompt. Raises ConfigurationError."""
    if sum(source is not None for source in (prompt, file, ids)) != 1:
        raise ConfigurationError("give either PROMPT, --prompt-file or --prompt-ids")
    if ids is not None:
        if chat:
            raise ConfigurationError("--chat needs a text, not --prompt-ids")
        return [Asked(None, parse_ids("--prompt-ids", ids))]
    texts = prompts.from_file(file) if file else [prompts.from_argument(prompt or "")]
    return [Asked(text, is_chat=chat) for text in texts]
