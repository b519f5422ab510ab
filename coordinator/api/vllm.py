"""Accepts the names of vLLM: `speculative_config`, settings, progress bar and tokenizer.

Our own names are accepted as well. A setting given under two names is refused, and so is an unknown
name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from coordinator.api.chat import PromptForm
from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.conversations import Messages
from coordinator.api.models.heads import find_config
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import find_file
from coordinator.api.refusals import scalar
from coordinator.api.requests import Step
from coordinator.api.special_tokens import read_json
from proto.errors import ConfigurationError, did_you_mean, shown
from proto.head_kinds import MTP, HeadKind, is_mtp
from proto.messages import Role
from proto.policies import POLICIES

# -- progress --------------------------------------------------------------------------------------

# The progress bar of `generate` and `chat`, if the caller wants one.

# True: show a bar. A function makes the bar from `total` and `desc`, as `tqdm.tqdm` does.
UseTqdm: TypeAlias = bool | Callable[..., Any]


class Bar(AbstractContextManager["Bar"]):
    """A progress bar that counts complete prompts and shows the tokens per second.

    The constructor raises ConfigurationError if `use_tqdm` is neither a bool nor a function.
    """

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._num_tokens, self._since = 0, time.monotonic()
        self._bar: Any = None
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise ConfigurationError(
                f"use_tqdm: expected true, false or a function, got {shown(use_tqdm)}"
            )
        if use_tqdm:
            self._bar = _maker(use_tqdm)(total=total, desc="prompts")

    def show(self, step: Step) -> None:
        """Count one more step of the call."""
        if self._bar is None:
            return
        self._num_tokens += len(step.part.outputs[0].token_ids)
        if step.request.is_complete:
            per_second = self._num_tokens / (time.monotonic() - self._since)
            self._bar.set_postfix_str(f"{per_second:.1f} tokens/s", refresh=False)
            self._bar.update(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm import tqdm

    return tqdm  # type: ignore[no-any-return]


# -- tokenizer -------------------------------------------------------------------------------------

# The tokenizer that `LLM.get_tokenizer` returns, with the method names of transformers.
#
# A tokenizer of transformers would load torch into the process that owns the text. A caller who
# needs more methods can make one with its `from_pretrained` on the same model.


class TargetTokenizer:
    """Converts text to token ids and back, exactly as for the prompts and answers of the pair.

    The constructor raises ConfigurationError if the target has no tokenizer.
    """

    def __init__(self, pair: Pair) -> None:
        if pair.tokenization is None:
            raise ConfigurationError(f"{pair.config.target} has no tokenizer.json")
        self._pair = pair
        self._tokenization = pair.tokenization
        self._raw = self._tokenization.raw

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ConfigurationError: it is not valid Unicode."""
        return list(self._tokenization.encode(text, special_tokens=add_special_tokens))

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return `input_ids` and `attention_mask` of one text."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of one token or of several."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenization.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the tokens as spelled in the vocabulary; None for an id that has no token."""
        return [self._raw.id_to_token(token) for token in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """Return the ids of tokens as spelled in the vocabulary; None for an unknown one."""
        return [self._raw.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """Render a conversation for the target; return its token ids, or the text.

        variables  of the template, such as documents; the rest is as in `LLM.chat`

        Raises ConfigurationError, ModelError.
        """
        form = PromptForm(add_generation_prompt, continue_final_message, chat_template)
        text, ids = self._pair.encode_chat(conversation, {**variables, "tools": tools}, form)
        return list(ids) if tokenize else text

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the tokenizer's `eos_token`.

        If it names none: the first token that ends the target's texts; None if there is none.
        """
        if (own := self._pair.eos_token) is not None:
            return own[1]
        ids: Sequence[int] = self._pair.hello(Role.TARGET).fingerprint.eos_ids
        return next(iter(ids), None)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, without added tokens."""
        return int(self._raw.get_vocab_size(with_added_tokens=False))

    def get_vocab(self) -> dict[str, Any]:
        """Return the ids by token, added tokens included."""
        return dict(self._raw.get_vocab())

    def __len__(self) -> int:
        return int(self._raw.get_vocab_size())


# -- speculation -----------------------------------------------------------------------------------

NAME = "speculative_config"
DRAFT_MODEL = "draft_model"
METHODS = (DRAFT_MODEL, NGRAM, *HeadKind, *POLICIES)
# Our name of a setting: the names accepted for it, vLLM's and ours. Messages show the first.
NAMES = {
    "policy": ("policy",),
    "ngram_max": ("prompt_lookup_max", "ngram_max"),
    "ngram_min": ("prompt_lookup_min", "ngram_min"),
    "verify": ("rejection_sample_method", "verify"),
}
# vLLM's names of `mtp` by family.
ITS_MTP = tuple(
    f"{family}_mtp"
    for family in (
        *("deepseek", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "qwen3_5", "qwen3_next"),
    )
)
SETTINGS = {
    name: setting
    for setting in SpeculationConfig.model_fields
    for name in NAMES.get(setting, (setting,))
}
# Names for settings of the pair of models, not of one text.
OF_THE_PAIR = {
    "revision": "drafter_revision",
    "draft_tensor_parallel_size": "drafter_tensor_parallel_size",
    "quantization": "drafter_quantization",
}
# vLLM's names for how its own engine drafts. False or None ask for nothing, and are accepted.
OF_ITS_ENGINE = ("disable_padded_drafter_batch", "parallel_drafting", "enforce_eager")
KNOWN = ("method", "model", *SETTINGS, *OF_THE_PAIR)
RULES = {"standard": "token"}  # vLLM's name: ours


@dataclass(frozen=True, slots=True)
class Speculation:
    """The content of a `speculative_config`.

    method    the method as given; None: not given, the model's files tell its kind
    model     the draft model, the head, or NGRAM; None: not given
    settings  the settings of speculation
    of_pair   settings of the pair of models, by our names (fields of PairConfig)
    name      the name by which the caller gave it
    """

    method: str | None
    model: str | None
    settings: SpeculationConfig
    of_pair: Mapping[str, Any]
    name: str = NAME

    def check_kind(self, pair: PairConfig) -> None:
        """Raise ConfigurationError if the drafter is known to be of another kind than `method`."""
        if self.method not in (DRAFT_MODEL, *HeadKind):
            return
        if self.method == DRAFT_MODEL and pair.found_drafter:
            raise ConfigurationError(
                f'{self.name}["method"] is {self.method}, and no "model" is named: name one'
            )
        is_known = find_config(pair.drafter, pair.drafter_revision) is not None
        if pair.drafter == NGRAM or not (is_known or is_mtp(pair.drafter)):
            return
        kind = pair.drafter_head
        if kind == (None if self.method == DRAFT_MODEL else self.method):
            return
        what = f"a head of the kind {kind}" if kind is not None else "no head"
        raise ConfigurationError(
            f'{self.name}["method"] is {self.method}, and the model {pair.drafter} is {what}'
        )


def read(config: Mapping[str, Any] | None, name: str = NAME) -> Speculation:
    """Check a `speculative_config` and return its content. Raises ConfigurationError.

    name  by which the caller gave it, for messages
    """
    given = _known(config, name)
    method, model = given.get("method"), given.get("model")
    if isinstance(method, str) and method in ITS_MTP:
        method = MTP
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise ConfigurationError(
            f'{name}["method"] is one of {", ".join(METHODS)}, not {shown(method)}'
            f"{did_you_mean(method, METHODS) if isinstance(method, str) else ''}"
        )
    values = _values(given, name)
    if method in POLICIES:
        if "policy" in values:
            raise ConfigurationError(
                f'{name} names a policy twice: "method" is {method}, "policy" is '
                f"{shown(values['policy'])}"
            )
        values["policy"] = method
    elif method == NGRAM:
        if model is not None and not (isinstance(model, str) and model == NGRAM):
            raise ConfigurationError(
                f'the method ngram has no model, but {shown(model)} is given; "also_ngram" uses '
                "both"
            )
        model = NGRAM
    elif method == HeadKind.MTP:
        if model is not None:
            raise ConfigurationError(
                f"the method {method} has no model: the layer is in the target's own checkpoint; "
                f"leave {shown(model)} out"
            )
        model = MTP
    elif method in list(HeadKind) and model is None:
        raise ConfigurationError(
            f'the method {method} needs a "model": the folder or name of a head'
        )
    of_pair = {ours: given[theirs] for theirs, ours in OF_THE_PAIR.items() if theirs in given}
    return Speculation(method, model, _made(values, name), of_pair, name)


def _known(config: Mapping[str, Any] | None, called: str) -> Mapping[str, Any]:
    """Return the entries whose value is not None. Raises ConfigurationError for an unknown name."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"{called}: expected a dict of {', '.join(KNOWN)}, got {shown(config)}"
        )
    config = {
        name: value
        for name, value in config.items()
        if name not in OF_ITS_ENGINE or not (value is None or value is False)
    }
    if unknown := [name for name in config if name not in KNOWN]:
        meant = did_you_mean(unknown[0], KNOWN) if isinstance(unknown[0], str) else ""
        raise ConfigurationError(
            f"{called} has no {shown(unknown[0])}; there are {', '.join(KNOWN)}{meant}"
        )
    return {name: scalar(value) for name, value in config.items() if value is not None}


def _values(given: Mapping[str, Any], called: str) -> dict[str, Any]:
    """Return the settings of speculation by our names."""
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name not in given:
            continue
        if setting in values:
            both = " and ".join(NAMES[setting])
            raise ConfigurationError(f"{called} says {both}, which are one setting; leave one out")
        values[setting] = given[name]
    if isinstance(rule := values.get("verify"), str):
        values["verify"] = RULES.get(rule, rule)
    _fit(values)
    return values


def _fit(values: dict[str, Any]) -> None:
    """If only one of ngram_min and ngram_max is given, adjust the other's default to fit it."""
    fields = SpeculationConfig.model_fields
    longest, shortest = values.get("ngram_max"), values.get("ngram_min")
    if type(longest) is int and shortest is None:
        values["ngram_min"] = min(longest, fields["ngram_min"].default)
    if type(shortest) is int and longest is None:
        values["ngram_max"] = max(shortest, fields["ngram_max"].default)


def _made(values: Mapping[str, Any], called: str) -> SpeculationConfig:
    """Return the SpeculationConfig. Raises ConfigurationError, in vLLM's names of settings."""
    try:
        return SpeculationConfig(**values)
    except ConfigurationError as error:
        setting, _, rest = str(error).partition(": ")
        name = NAMES.get(setting, (setting,))[0]
        raise ConfigurationError(f"{called}, {name}: {rest}") from error


# -- settings --------------------------------------------------------------------------------------

# Settings of vLLM's `LLM`: those that we have under another name, and those that we do not have.

# vLLM's name: ours.
ALIASES = {
    "model": "target",
    "revision": "target_revision",
    "data_parallel_size": "targets",
}
DTYPES = {"half": "float16", "float": "float32"}
GENERATION = "generation_config"
# vLLM's settings that we do not have: the values that change nothing and are accepted, and what to
# use instead.
NOTHING = (None, False)
NOT_OURS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "trust_remote_code": (NOTHING, "code that comes with a checkpoint is never run"),
    "seed": ((None, 0), "SamplingParams(seed=...) is of a text"),
    "tokenizer": ((None,), "the target's own is used"),
    "tokenizer_mode": (("auto",), "the target's tokenizer.json is used"),
    "tokenizer_revision": ((None,), "it is that of the target, revision"),
    "load_format": (("auto", None), "the files of a model tell their format"),
    "config_format": (("auto", None), "config.json is read"),
    "skip_tokenizer_init": (NOTHING, "prompts and answers may be token ids alone as it is"),
    "kv_cache_dtype": (("auto", None), "the cache has the number type of the model"),
    "pipeline_parallel_size": ((1, None), "tensor_parallel_size shares a model among GPUs"),
    "download_dir": ((None,), "the variable HF_HOME says where models are kept"),
    "swap_space": ((None, 0), "everything stays on its device"),
    "cpu_offload_gb": ((None, 0), "everything stays on its device"),
    "enable_prefix_caching": ((None, True, False), "what texts begin alike is read once"),
    "enable_chunked_prefill": ((None, True, False), "long prompts are read in parts"),
    "disable_log_stats": ((None, True, False), "each output has its metrics"),
}


# Parameters of `LLM` and `AsyncLLM` that are no fields of PairConfig.
OF_LLM = (NAME, GENERATION, "max_waiting", "enforce_eager", *ALIASES)
WHERE = "docs/python-api.md lists the settings"


def in_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under the names of `PairConfig`, without those that change nothing.

    given  only the settings that the caller gave

    Raises ConfigurationError for a setting that is given twice, for one that we do not have, with
    what to use instead, and for one that nobody has, with the one that was probably meant.
    """
    values: dict[str, Any] = {}
    known = (*OF_LLM, *NOT_OURS, *PairConfig.model_fields)
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known) or f"; {WHERE}"
        raise ConfigurationError(f"there is no setting {unknown[0]}{hint}")
    for name, value in given.items():
        is_own = name == "tokenizer" and value in (given.get("model"), given.get("target"))
        if is_own or name == "enforce_eager":
            continue
        if name in NOT_OURS:
            accepted, instead = NOT_OURS[name]
            if not any(type(value) is type(one) and value == one for one in accepted):
                raise ConfigurationError(f"{name}={shown(value)} is not a setting here: {instead}")
            continue
        ours = ALIASES.get(name, name)
        if ours in values:
            raise ConfigurationError(
                f"{_theirs(ours)} and {ours} are one setting; give one of them"
            )
        values[ours] = value
    if _is_eager(given):
        values["backend"] = "fused"  # nothing is recorded then, on whatever device
    if isinstance(dtype := values.get("dtype"), str):
        values["dtype"] = DTYPES.get(dtype, dtype)
    return values


def as_given(given: Mapping[str, Any]) -> dict[str, str]:
    """Return vLLM's name for each of our settings that the caller gave under that name."""
    return {ALIASES[name]: name for name in given if name in ALIASES}


def _theirs(ours: str) -> str:
    return next(name for name, other in ALIASES.items() if other == ours)


def _is_eager(given: Mapping[str, Any]) -> bool:
    """True if `enforce_eager` asks for a backend. Raises ConfigurationError."""
    value = given.get("enforce_eager")
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"enforce_eager: expected true or false, got {shown(value)}")
    if value and given.get("backend") not in (None, "fused"):
        raise ConfigurationError("enforce_eager and backend are one setting; give one of them")
    return bool(value)


# Methods that `LLM` had once, and what to use instead.
METHODS_GONE: Mapping[str, str] = {
    "agenerate": "AsyncLLM(...).generate(prompt), whose last output is the whole text",
    "astream": "AsyncLLM(...).generate(prompt, output_kind=RequestOutputKind.DELTA)",
}
# Methods of vLLM's `LLM` that we do not have, and what to use instead.
_PROFILE = "the command `slipstream profile` shows where the time goes"
_TEXTS_ALONE = "this program generates texts alone"
METHODS_NOT_OURS: Mapping[str, str] = {
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), _TEXTS_ALONE),
    **dict.fromkeys(("sleep", "wake_up"), "close() frees the memory; make a new LLM afterwards"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the models run in processes of their own"),
    "beam_search": "SamplingParams(n=...) gives several answers",
    "llm_engine": "generate, stream and AsyncLLM are the ways to the models",
}


def no_such_method(name: str, owner: str = "LLM") -> AttributeError:
    """Return the error for a name that `LLM` does not have; known ones say what to use instead."""
    told = ""
    if (instead := METHODS_NOT_OURS.get(name)) is not None:
        told = f", which vLLM's has: {instead}"
    elif (instead := METHODS_GONE.get(name)) is not None:
        told = f" any more: in an event loop use {instead}"
    return AttributeError(f"{owner} has no {name!r}{told}", name=name)


# Arguments of vLLM's `generate` and `chat` that we do not have, beside the request itself: the
# values that change nothing and are accepted, and what to use instead.
ARGUMENTS_NOT_OURS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "lora_request": ((None,), "adapters are not loaded; merge yours into its model"),
    "priority": ((None, 0), "texts begin in the order in which they are asked for"),
    "prompt_token_ids": ((None,), 'a prompt may be {"prompt_token_ids": [...]}'),
    "tokenization_kwargs": ((None,), "a prompt may be token ids"),
    "trace_headers": ((None,), "requests are not traced"),
    "data_parallel_rank": ((None,), "there is one pair"),
    "mm_processor_kwargs": ((None,), "prompts are texts alone"),
    "prompt_adapter_request": ((None,), "adapters are not loaded"),
    "guided_options_request": ((None,), "SamplingParams(structured_outputs=...) says the form"),
    "chat_template_content_format": (("auto", "string", "openai", None), "the template says it"),
    "reasoning_ended": ((None,), "the template says it"),
}


def check_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Refuse what `generate` and the like do not take.

    Raises ConfigurationError for what vLLM has and we do not, with what to use instead, and
    TypeError for what neither has.
    """
    for name, value in given.items():
        if name not in ARGUMENTS_NOT_OURS:
            raise TypeError(f"{method} has no argument {name!r}")
        accepted, instead = ARGUMENTS_NOT_OURS[name]
        is_list = isinstance(value, list | tuple) and all(one is None for one in value)
        if not is_list and not any(type(value) is type(one) and value == one for one in accepted):
            raise ConfigurationError(f"{method} takes no {name}: {instead}")


class EngineArgs:
    """The arguments of `LLM` or `AsyncLLM`, kept until one is made of them (vLLM's name)."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.settings = {**({} if model is None else {"model": model}), **settings}


AsyncEngineArgs = EngineArgs

# -- a model's own sampling parameters -------------------------------------------------------------

# Fields of generation_config.json that vLLM reads, and their names in `SamplingParams`.
OF_GENERATION = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def sampling_params_of(model: str, revision: str | None) -> SamplingParams:
    """Return the parameters in a model's generation_config.json; other ones have our defaults.

    Raises ModelError, and ConfigurationError: a value cannot be used.
    """
    path = find_file(model, revision, f"{GENERATION}.json")
    stated = read_json(path)
    found = {ours: stated.get(name) for name, ours in OF_GENERATION.items()}
    try:
        return SamplingParams(**{name: one for name, one in found.items() if one is not None})
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
