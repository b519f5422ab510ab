"""`python -m coordinator generate`: reads the prompts, continues each, and prints the texts."""

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
from coordinator.api.models.lengths import cut_answers
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import MakeLauncher, Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from coordinator.api.structured import StructuredOutputsParams
from coordinator.api.without_effect import without_effect
from coordinator.cli import flags as options
from coordinator.cli.account_view import dry_run, explaining
from coordinator.cli.flags import Flags, parse_ids, with_settings
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.wrapping import for_stderr
from coordinator.cli.writers import (
    JsonWriter,
    Progress,
    ShownPrompt,
    TextWriter,
    Writer,
    ran_on,
)
from coordinator.launching.launcher import ConnectRay, Launcher, Wanted
from coordinator.launching.remote import RemoteNodes
from proto.errors import ConfigurationError, OutputError, SlipstreamError, TextError
from proto.installation import node_program, program
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import check_writable

# -- turns -----------------------------------------------------------------------------------------

# Puts the steps of texts that are generated at the same time into the order of the prompts.


class Turns:
    """Reads interleaved steps of several texts and returns them one text after another."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._held: dict[tuple[Request, int], deque[Step]] = defaultdict(deque)

    def of(self, request: Request) -> Iterator[Step]:
        """Yield all steps of a request, text by text. Raises the error of the steps."""
        index = 0
        while index < request.num_texts:  # num_texts may become smaller
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

# Ctrl-C while several texts are generated: the first starts no more texts, the second ends all now.

WAITS = "interrupted: no more texts are begun; {} are finished first (Ctrl-C again ends now)"


class WindingUp:
    """Handles Ctrl-C inside its `with` block: the first one winds up if several texts are open.

    With a single open text the previous handler is called.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._before = signal.getsignal(signal.SIGINT)
        # If SIGINT is ignored (nohup) it stays so; only the main thread may set handlers.
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
                # Not through sys.stderr: the signal may have interrupted code that writes to it.
                os.write(2, (start + line).encode())
        elif callable(self._before):
            self._before(number, frame)


# -- generate --------------------------------------------------------------------------------------

EXIT_SOME_FAILED = 2
NO_TEMPLATE = "the target has no chat template; a plain one is used"


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
    # There is no --no-speculate: --policy ar decodes without drafts.
    params: Annotated[
        SamplingParams, Flags(but=("speculate", "structured_outputs", "output_kind"))
    ],
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    launch: LaunchConfig,
    as_json: options.Json = False,
    show_speculation: options.ShowSpeculation = False,
    verbose: options.Verbose = False,
    trace: options.Trace = None,
    is_dry: options.DryRun = False,
) -> None:
    """Continue PROMPT, or every prompt of a file."""
    params = structured(params, json_schema, regex)
    speculation.check(pair)
    if is_dry:
        dry_run(pair, drafts=speculation.drafts)
        return
    if speculation.reference:
        prompts.text_of(Path(speculation.reference))  # an error here comes before nodes are started
    if trace is not None:
        check_writable(trace, "--trace")
    asked = _asked(prompt, prompt_file, prompt_ids, chat=chat)
    shown = {"show_speculation": show_speculation, "verbose": verbose}
    writer = _writer(speculation.policy, params, as_json=as_json, **shown)
    explained = explaining(pair, drafts=speculation.drafts)
    with explained, Progress(Console(stderr=True), models_of(pair)) as progress:
        with_drafter = speculation.drafts and pair.has_draft_process
        launcher = launcher_for(
            launch, pair, context.obj, with_drafter=with_drafter, invite=progress.invite
        )
        started = Pair(
            _with_room_for(len(asked) * params.n, pair),
            with_drafter=speculation.drafts,
            say=progress.say,
            check=partial(_check_known, asked, params),
            make_launcher=launcher,
            traced=trace is not None,
        )
    with started as running:
        unheeded = without_effect(pair, speculation, params, is_remote=launch.nodes == "remote")
        unheeded += _turns_left_out(prompt_file, len(asked))
        if chat and running.chat_template.is_plain:
            unheeded.append(NO_TEMPLATE)
        for line in (*running.whereabouts(), *running.notices(params), *unheeded):
            typer.echo(for_stderr(harmless(line)), err=True)
        try:
            all_fit = Run(running, speculation, params, writer).every(asked)
        finally:
            if trace is not None:
                running.write_trace(trace)
        if isinstance(writer, TextWriter):
            for line in ran_on(running, compares=writer.compares, with_forms=verbose):
                typer.echo(for_stderr(line), err=True)
        if trace is not None:
            words = f"trace: {trace} (for ui.perfetto.dev, or trace-summary)"
            typer.echo(for_stderr(words), err=True)
        if not all_fit:
            raise typer.Exit(EXIT_SOME_FAILED)


def _turns_left_out(file: Path | None, total: int) -> list[str]:
    """Return a line if prompts of a file have turns that are not read, else []."""
    number = 0 if file is None else prompts.num_with_more_turns(file)
    if not number:
        return []
    return [f"{number} of {total} prompts have several turns: only the first of each is read"]


def _with_room_for(num_texts: int, pair: PairConfig) -> PairConfig:
    """Return the config with room for no more texts at once than there are.

    In reproducible mode it is unchanged: the shape of every pass depends on it, so the text might.
    """
    if pair.reproducible:
        return pair
    return pair.model_copy(update={"max_num_seqs": min(pair.num_seqs, num_texts)})


def _writer(
    policy: str,
    params: SamplingParams,
    *,
    as_json: bool,
    show_speculation: bool,
    verbose: bool,
) -> Writer:
    """Return the writer for the chosen form of output. Raises ConfigurationError."""
    if as_json:
        if show_speculation:
            raise ConfigurationError("--show-speculation is for people; --json has token_origins")
        if verbose:
            typer.echo("--verbose has no effect: --json has all figures", err=True)
        return JsonWriter(policy)
    if (params.logprobs, params.prompt_logprobs) != (None, None):
        raise ConfigurationError("--logprobs and --prompt-logprobs are shown with --json")
    return TextWriter(policy, params, show_speculation=show_speculation, verbose=verbose)


# Settings that a node started by hand gets on its own command line, not from the coordinator.
OF_THE_NODES = (
    *("targets", "drafters"),
    *("target_device", "drafter_device", "tensor_parallel_size", "drafter_tensor_parallel_size"),
    *("quantization", "drafter_quantization", "gpu_memory_utilization"),
    *("placement", "dtype", "drafter_dtype", "backend", "reproducible", "heads", "heads_revision"),
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
    """Return the function that makes the launcher for these settings. Raises ConfigurationError.

    invite  called with the folder of keys and the config of each node to start by hand
    """
    devices = {Role.TARGET: pair.target_device}
    if with_drafter:
        devices[Role.DRAFTER] = pair.drafter_device
    if launch.nodes == "remote":
        for name in OF_THE_NODES:
            is_none = name == "heads" and (pair.has_default_heads or not pair.heads)
            if not is_none and getattr(pair, name) != PairConfig.model_fields[name].default:
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(
                    f"{flag} is for nodes that are started here; for others see "
                    f"`{node_program(Role.TARGET)} --help`"
                )
        told = partial(invite, launch.keys)
        return partial(RemoteNodes, launch.listen, launch.keys, tuple(devices), told)
    if not launch.ray:
        return Launcher
    if connect_ray is None:
        raise ConfigurationError(f"--ray works with `{program()}` only")
    if pair.has_several:
        raise ConfigurationError(
            "--ray starts one target and one drafter; leave it out, or use --nodes remote"
        )
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
    """A prompt with its request, or with the reason why it was refused (`misfit`)."""

    place: ShownPrompt
    request: Request | None
    misfit: str = ""

    @property
    def is_complete(self) -> bool:
        """True if all texts of the prompt have ended."""
        return self.request is not None and self.request.is_complete

    @property
    def is_well(self) -> bool:
        """True if all texts of the prompt were completed without an error."""
        if self.request is None or not self.request.is_complete:
            return False
        return all(made.error is None for made in self.request.whole().outputs)

    @property
    def has_failed(self) -> bool:
        """True if an error ended one of the prompt's texts."""
        return self.request is not None and self.request.failure is not None


@dataclass(frozen=True, slots=True)
class Run:
    """Generates the texts of several prompts at once and shows them one after another."""

    pair: Pair
    speculation: SpeculationConfig
    params: SamplingParams
    writer: Writer

    def every(self, asked: Sequence[Asked]) -> bool:
        """Generate and show all prompts, refused ones as errors; True if all went well.

        Raises KeyboardInterrupt after the texts that ran, if Ctrl-C kept others from starting.
        """
        prompts = [self._prompt(index, len(asked), one) for index, one in enumerate(asked)]
        requests = [prompt.request for prompt in prompts if prompt.request is not None]
        lengths = [len(request.prompt_ids) for request in requests]
        longer = self.pair.how_longer()
        for line in cut_answers(self.params, self.pair.max_len, lengths, longer):
            typer.echo(for_stderr(line), err=True)
        wanted = sum(request.num_texts for request in requests)
        batch = Batch(self.pair, requests)
        with WindingUp(batch), closing(batch.steps()) as steps:
            self._show(prompts, Turns(steps))
        self.writer.close()
        if sum(request.num_texts for request in requests) < wanted:
            raise KeyboardInterrupt
        return all(prompt.is_well for prompt in prompts)

    def _prompt(self, index: int, total: int, asked: Asked) -> _Prompt:
        """Return a prompt with its request; a refused one gets a `misfit` if there are others."""
        skips = self.params.skip_special_tokens
        decoder = partial(self.pair.decoder, skip_special_tokens=skips)
        place = ShownPrompt(index, total, asked.text, decoder)
        try:
            text, ids = _encoded(self.pair, asked)
            self.pair.check(ids)
        except ConfigurationError as error:
            if total == 1:
                raise
            return _Prompt(place, None, str(error))
        request = Request(self.pair, self.speculation, text, ids, self.params)
        if total == self.params.n == 1:  # of several, others may be shown meanwhile
            request.on_read = self.writer.reading
        return _Prompt(place, request)

    def _show(self, prompts: Sequence[_Prompt], turns: Turns) -> None:
        """Show each prompt in turn. After a failure or Ctrl-C, complete ones are still shown."""
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
            return  # Ctrl-C came before one of its texts was started
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


def _text_of(place: ShownPrompt, index: int, whole: RequestOutput) -> str:
    """Return the name of a text for messages: its prompt, and its number if there are several."""
    if len(whole.outputs) == 1:
        return str(place)
    text = f"text {index + 1} of {len(whole.outputs)}"
    return text if place.total == 1 else f"{place}, {text}"


def _encoded(pair: Pair, asked: Asked) -> tuple[str | None, tuple[int, ...]]:
    """Return (prompt text or None, token ids). Raises ConfigurationError, ModelError."""
    if asked.text is None:
        return None, asked.ids
    if asked.is_chat:
        return pair.encode_chat([{"role": "user", "content": asked.text}])
    return asked.text, pair.encode(asked.text)


def structured(
    params: SamplingParams, json_schema: Path | None, regex: str | None
) -> SamplingParams:
    """Return `params` with the form that answers must have. Raises ConfigurationError."""
    if json_schema is None and regex is None:
        return params
    if json_schema is not None and regex is not None:
        raise ConfigurationError("an answer has one form: give --json-schema or --regex")
    schema = None if json_schema is None else prompts.text_of(json_schema)
    name = "--regex" if json_schema is None else f"--json-schema {json_schema}"
    form = StructuredOutputsParams(json=schema, regex=regex, called=name)
    given = {name: getattr(params, name) for name in params.model_fields_set}
    return SamplingParams(**{**given, "structured_outputs": form})


def _check_known(asked: Sequence[Asked], params: SamplingParams, pair: Pair) -> None:
    """Check the parameters, and an only prompt, before a process starts.

    Of several prompts, those that fit are answered even if others do not. Raises
    ConfigurationError.
    """
    pair.reviewed_params(params)
    if len(asked) == 1:
        pair.check(_encoded(pair, asked[0])[1])


def _asked(prompt: str | None, file: Path | None, ids: str | None, *, chat: bool) -> list[Asked]:
    """Return the prompts that the options give, at least one. Raises ConfigurationError."""
    if sum(source is not None for source in (prompt, file, ids)) != 1:
        raise ConfigurationError("give either PROMPT, --prompt-file or --prompt-ids")
    if ids is not None:
        if chat:
            raise ConfigurationError("--chat needs a text, not --prompt-ids")
        return [Asked(None, parse_ids("--prompt-ids", ids))]
    texts = prompts.from_file(file) if file else [prompts.from_argument(prompt or "")]
    return [Asked(text, is_chat=chat) for text in texts]
