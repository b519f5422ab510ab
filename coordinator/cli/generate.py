"""`python -m coordinator generate`: read the prompts, continue each, show or print what comes."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from coordinator.api import prompts
from coordinator.api.config import (
    LaunchConfig,
    PairConfig,
    SamplingParams,
    SpeculationConfig,
    checked,
)
from coordinator.api.pair import MakeLauncher, Pair
from coordinator.api.request import Request
from coordinator.cli import options
from coordinator.cli.display import Progress
from coordinator.cli.writers import JsonWriter, Place, TextWriter, Writer
from coordinator.cluster.launcher import ConnectRay, Launcher
from proto.errors import ConfigurationError, SlipstreamError
from proto.messages import Role

EXIT_SOME_FAILED = 2

_PAIR, _SPECULATION, _REQUEST = PairConfig(), SpeculationConfig(), SamplingParams()
_LAUNCH = LaunchConfig()


def generate(
    context: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    prompt_ids: options.PromptIds = None,
    chat: options.Chat = False,
    target: options.Target = _PAIR.target,
    drafter: options.Drafter = _PAIR.drafter,
    target_revision: options.Revision = None,
    drafter_revision: options.Revision = None,
    target_device: options.TargetDevice = _PAIR.target_device,
    drafter_device: options.DrafterDevice = _PAIR.drafter_device,
    dtype: options.Dtype = _PAIR.dtype,
    drafter_dtype: options.DrafterDtype = _PAIR.drafter_dtype,
    backend: options.Backend = _PAIR.backend,
    max_model_len: options.MaxModelLen = _PAIR.max_model_len,
    policy: options.Policy = _SPECULATION.policy,
    num_speculative_tokens: options.NumSpeculativeTokens = _SPECULATION.num_speculative_tokens,
    window: options.Window = _SPECULATION.window,
    adaptive: options.Adaptive = _SPECULATION.adaptive,
    verify: options.Verify = _SPECULATION.verify,
    also_ngram: options.AlsoNgram = _SPECULATION.also_ngram,
    ngram_max: options.NgramMax = _SPECULATION.ngram_max,
    ngram_min: options.NgramMin = _SPECULATION.ngram_min,
    reference: options.Reference = _SPECULATION.reference,
    max_draft_candidates: options.MaxDraftCandidates = _PAIR.max_draft_candidates,
    temperature: options.Temperature = _REQUEST.temperature,
    top_k: options.TopK = _REQUEST.top_k,
    top_p: options.TopP = _REQUEST.top_p,
    min_p: options.MinP = _REQUEST.min_p,
    repetition_penalty: options.RepetitionPenalty = _REQUEST.repetition_penalty,
    presence_penalty: options.PresencePenalty = _REQUEST.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = _REQUEST.frequency_penalty,
    logit_bias: options.LogitBias = None,
    bad_words: options.BadWords = None,
    seed: options.Seed = _REQUEST.seed,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = _REQUEST.ignore_eos,
    include_stop_str_in_output: options.IncludeStop = _REQUEST.include_stop_str_in_output,
    min_tokens: options.MinTokens = _REQUEST.min_tokens,
    max_tokens: options.MaxTokens = _REQUEST.max_tokens,
    logprobs: options.Logprobs = _REQUEST.logprobs,
    prompt_logprobs: options.PromptLogprobs = _REQUEST.prompt_logprobs,
    n: options.Number = _REQUEST.n,
    reproducible: options.Reproducible = _PAIR.reproducible,
    ray: options.Ray = _LAUNCH.ray,
    start_timeout_s: options.StartTimeout = _PAIR.start_timeout_s,
    busy_poll_us: options.BusyPoll = _PAIR.busy_poll_us,
    min_target_pass_ms: options.MinTargetPass = _PAIR.min_target_pass_ms,
    min_draft_step_ms: options.MinDraftStep = _PAIR.min_draft_step_ms,
    as_json: options.Json = False,
    show_speculation: options.ShowSpeculation = False,
) -> None:
    """Continue PROMPT, or every prompt of a file, with two models in two processes."""
    values = dict(locals())
    pair = checked(PairConfig, **_fields(PairConfig, values))
    speculation = checked(SpeculationConfig, **_fields(SpeculationConfig, values))
    launch = checked(LaunchConfig, ray=ray)
    speculation.check(pair)
    if speculation.reference:
        prompts.text_of(Path(speculation.reference))  # before anything is started
    asked = _asked(prompt, prompt_file, prompt_ids, chat=chat)
    _generate(context.obj, pair, speculation, launch, asked, values)


def _generate(
    connect_ray: ConnectRay | None,
    pair: PairConfig,
    speculation: SpeculationConfig,
    launch: LaunchConfig,
    asked: "Sequence[Asked]",
    values: dict[str, Any],
) -> None:
    """values  the rest of the command line"""
    request = checked(SamplingParams, **_request_values(values))
    writer = _writer(speculation.policy, request, values)
    chat = values["chat"]
    with Progress(Console(stderr=True)) as progress:
        with_drafter = speculation.drafts and pair.has_draft_model
        launcher = _launcher(launch, connect_ray, with_drafter=with_drafter)
        started = Pair(pair, with_drafter=with_drafter, say=progress.say, make_launcher=launcher)
    with started as running:
        if chat and running.chat_template.is_plain:
            typer.echo("the target has no chat template; a plain one is used", err=True)
        run = _Run(running, speculation, request, writer)
        if not run.every(asked):
            raise typer.Exit(EXIT_SOME_FAILED)


def _request_values(values: dict[str, Any]) -> dict[str, object]:
    """What SamplingParams takes. Raises ConfigurationError."""
    found = _fields(SamplingParams, values)
    if values["logit_bias"] is not None:
        found["logit_bias"] = options.parse_biases("--logit-bias", values["logit_bias"])
    if values["stop_token_ids"] is not None:
        found["stop_token_ids"] = options.parse_ids("--stop-token-ids", values["stop_token_ids"])
    return found


def _writer(policy: str, request: SamplingParams, values: dict[str, Any]) -> Writer:
    """Raises ConfigurationError."""
    if values["as_json"]:
        if values["show_speculation"]:
            raise ConfigurationError("--show-speculation is for people; --json has token_origins")
        return JsonWriter(policy)
    if (request.logprobs, request.prompt_logprobs) != (None, None):
        raise ConfigurationError("--logprobs and --prompt-logprobs are shown with --json")
    return TextWriter(policy, request, show_speculation=values["show_speculation"])


def _launcher(
    launch: LaunchConfig, connect_ray: ConnectRay | None, *, with_drafter: bool
) -> MakeLauncher:
    if not launch.ray:
        return Launcher
    if connect_ray is None:
        raise ConfigurationError("--ray works with `python -m coordinator` only")
    roles = (Role.TARGET, Role.DRAFTER) if with_drafter else (Role.TARGET,)
    return partial(connect_ray, launch.ray, roles)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it was given: a text, a chat's question, or token ids."""

    text: str | None
    ids: tuple[int, ...] = ()
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """Prompts one after another on warm nodes."""

    pair: Pair
    speculation: SpeculationConfig
    request: SamplingParams
    writer: Writer

    def every(self, asked: Sequence[Asked]) -> bool:
        """Whether all went well. What fits is generated although other prompts do not fit."""
        num_failed = 0
        for index, one in enumerate(asked):
            place = Place(index, len(asked), one.text, self.pair.decoder)
            self.writer.begin(place)
            try:
                self._one(one)
            except SlipstreamError as error:
                if len(asked) == 1:
                    raise
                if not isinstance(error, ConfigurationError):
                    raise type(error)(f"{place}: {error}") from error
                self.writer.failed(place, str(error))
                num_failed += 1
        self.writer.close()
        return num_failed == 0

    def _one(self, asked: Asked) -> None:
        prompt, ids = self._encoded(asked)
        request = Request(self.pair, self.speculation, prompt, ids, self.request)
        try:
            with closing(request.steps()) as steps:
                for step in steps:
                    self.writer.add(step.emit, step.part)
        except (SlipstreamError, KeyboardInterrupt):
            self.writer.break_off()
            raise
        self.writer.end(request.whole())

    def _encoded(self, asked: Asked) -> tuple[str | None, tuple[int, ...]]:
        if asked.text is None:
            return None, asked.ids
        if asked.is_chat:
            return self.pair.encode_chat([{"role": "user", "content": asked.text}])
        return asked.text, self.pair.encode(asked.text)


def _asked(prompt: str | None, file: Path | None, ids: str | None, *, chat: bool) -> list[Asked]:
    """What is to be continued, at least one prompt. Raises ConfigurationError."""
    if sum(source is not None for source in (prompt, file, ids)) != 1:
        raise ConfigurationError("give either PROMPT, --prompt-file or --prompt-ids")
    if ids is not None:
        if chat:
            raise ConfigurationError("--chat needs a text, not --prompt-ids")
        return [Asked(None, options.parse_ids("--prompt-ids", ids))]
    texts = prompts.from_file(file) if file else [prompts.from_argument(prompt or "")]
    return [Asked(text, is_chat=chat) for text in texts]


def _fields(
    kind: type[PairConfig | SpeculationConfig | SamplingParams], values: dict[str, object]
) -> dict[str, object]:
    # The command line has a flag for every field but `speculate`, which is `--policy ar`.
    return {name: values[name] for name in kind.model_fields if name in values}
