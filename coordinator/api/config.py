"""What a user can set, with its ranges and its defaults: the only home of both."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from proto.errors import ConfigurationError, shown
from proto.messages import (
    GREEDY_BELOW,
    MAX_BANS,
    MAX_BIASES,
    MAX_CANDIDATES,
    MAX_LOGPROBS,
    MAX_NGRAM,
    MAX_STOP_IDS,
    MAX_WINDOW,
    Lookup,
    Policy,
    Rule,
)
from proto.policies import POLICIES, PolicyName, without_drafter

MODELS = Path(__file__).resolve().parents[2] / "models"
T = TypeVar("T", bound=BaseModel)
VerifyName = Literal["coupled", "token", "block"]
Backend = Literal["auto", "fused", "graphs", "compiled", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Rows of every pass in reproducible mode. It must not depend on the policy, or `ar` and `sync`
# would round differently; so it bounds K.
REPRODUCIBLE_ROWS = 16

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 256
MAX_SAMPLES = 64

NGRAM = "ngram"  # in place of a draft model: the target drafts from what was written before

AS_FLAGS = "as flags"  # validation context: name settings as the command line does


class _Frozen(BaseModel):
    """Whatever does not fit is a ConfigurationError of one line that names the setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _explain(
        cls, values: object, make: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        try:
            return make(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "the settings"
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                line = f"{cls.__name__} has no setting {name!r}; there are {known}"
            else:
                line = f"{_named(name, info)}: {first['msg']} (got {shown(first['input'])})"
            raise ConfigurationError(line) from error

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        raise ConfigurationError(f"{name}: a {kind} does not change; make another {kind}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


def _named(name: str, info: ValidationInfo) -> str:
    """A setting as whoever made it calls it."""
    return "--" + name.replace("_", "-") if info.context == AS_FLAGS else name


class PairConfig(_Frozen):
    """The two models and where they run.

    drafter  a model, or NGRAM
    """

    target: Annotated[str, Field(min_length=1)] = str(MODELS / "target")
    drafter: Annotated[str, Field(min_length=1)] = str(MODELS / "drafter")
    target_revision: Annotated[str, Field(min_length=1)] | None = None
    drafter_revision: Annotated[str, Field(min_length=1)] | None = None
    target_device: str = ""  # "": chosen by `devices.default_devices`
    drafter_device: str = ""
    dtype: Dtype = "auto"
    # "": the faster one on a CPU, by timing (it does not decide the text), else as dtype
    drafter_dtype: Dtype | Literal["", "fastest"] = ""
    max_model_len: Annotated[int, Field(ge=2, le=1 << 20)] = 4096
    backend: Backend = "auto"
    reproducible: bool = False
    start_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    busy_poll_us: Annotated[int, Field(ge=0, le=10_000)] = 0
    max_draft_candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 64
    min_target_pass_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    min_draft_step_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0

    @model_validator(mode="after")
    def _revisions_have_a_meaning(self, info: ValidationInfo) -> Self:
        models = {"target_revision": self.target, "drafter_revision": self.drafter}
        for name, model in models.items():
            is_copied = name == "drafter_revision" and model == NGRAM
            if getattr(self, name) is None or not (is_copied or is_folder(model)):
                continue
            what = "n-gram drafts come from no model" if is_copied else f"{model} is a folder"
            raise ConfigurationError(
                f"{_named(name, info)} is for a model on the hub, but {what}; leave it out"
            )
        return self

    @property
    def has_draft_model(self) -> bool:
        """Whether drafts come from a model."""
        return self.drafter != NGRAM


def is_folder(model: str) -> bool:
    """Whether a model is a folder here, and not a name on the hub."""
    return Path(model).expanduser().is_dir()


def _check_ray_address(address: str) -> str:
    if not re.fullmatch(r"(auto|[^:/\s]+:\d+)?", address):
        raise ConfigurationError(f"--ray: expected auto or HOST:PORT, got {address!r}")
    return address


class LaunchConfig(_Frozen):
    """Who starts the node processes.

    ray  address of a Ray cluster; "": they are started on this machine, without Ray
    """

    ray: Annotated[str, AfterValidator(_check_ray_address)] = ""


class SpeculationConfig(_Frozen):
    """The policy and its numbers.

    also_ngram            n-gram drafts besides those of the draft model
    ngram_max, ngram_min  most and fewest of the last tokens that must have been there before
    reference             a text file to copy from as well; "": none
    adaptive              pipelined: the drafter rests where plain decoding is measured to be faster
    """

    policy: PolicyName = "pipelined"
    num_speculative_tokens: Annotated[int, Field(ge=1, le=48)] = 4
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 16
    verify: VerifyName = "coupled"
    also_ngram: bool = False
    ngram_max: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 4
    ngram_min: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 2
    reference: str = ""
    adaptive: bool = True

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted; else the target writes alone."""
        return POLICIES[self.policy].drafts

    @property
    def rule(self) -> Rule:
        """How drafts are verified."""
        return Rule[self.verify.upper()]

    def uses_ngrams(self, pair: PairConfig) -> bool:
        """Whether the target drafts by itself."""
        return self.drafts and (self.also_ngram or not pair.has_draft_model)

    def lookup(self, reference: tuple[int, ...]) -> Lookup:
        """How it does that, as the target reads it."""
        return Lookup(self.ngram_min, self.ngram_max, reference)

    def check(self, pair: PairConfig) -> None:
        """Raises ConfigurationError if these settings do not go together, or not with the pair."""
        self.make(pair)
        if self.also_ngram and pair.has_draft_model and self.verify != "coupled":
            raise ConfigurationError(
                f"also_ngram needs coupled verification, not {self.verify}: to choose between two "
                "drafters would bias the text"
            )
        if self.ngram_min > self.ngram_max:
            raise ConfigurationError(
                f"ngram_min is {self.ngram_min}, which is above ngram_max, {self.ngram_max}"
            )
        if self.reference and not self.uses_ngrams(pair):
            raise ConfigurationError(
                "reference is a text for n-gram drafts; choose the drafter ngram, or also_ngram, "
                "and another policy than ar"
            )

    def make(self, pair: PairConfig) -> Policy:
        """The policy as the nodes read it. Raises ConfigurationError."""
        policy = self._policy(reproducible=pair.reproducible)
        return policy if pair.has_draft_model else without_drafter(policy)

    def _policy(self, *, reproducible: bool) -> Policy:
        k = self.num_speculative_tokens
        if reproducible and k >= REPRODUCIBLE_ROWS:
            raise ConfigurationError(
                f"num_speculative_tokens is {k}; with --reproducible it must be below "
                f"{REPRODUCIBLE_ROWS}, the rows of every pass"
            )
        return POLICIES[self.policy].make(k, max(k, self.window), adaptive=self.adaptive)


ALONE = SpeculationConfig(policy="ar")  # nothing is drafted


def _listed(value: object) -> object:
    """One string, or nothing, where several may stand."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None


class SamplingParams(_Frozen):
    """How a text is generated: the names, meanings and defaults of vLLM, but for max_tokens.

    Made without a seed, each text gets a fresh one and reports it. bad_words may not be written,
    with or without a space before them; min_tokens come before any stop token or stop string;
    logprobs and prompt_logprobs are numbers of alternatives (0: only the token itself); n is the
    number of texts, each with noise of its own. Without speculate the target writes alone.
    """

    temperature: Annotated[
        float,
        Field(ge=0, le=100),
        # What is greedy is shown as such too.
        AfterValidator(lambda value: 0.0 if value < GREEDY_BELOW else value),
    ] = 0.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(lambda value: {} if value is None else value),
        Field(max_length=MAX_BIASES),
    ] = {}
    bad_words: Annotated[
        tuple[Word, ...], BeforeValidator(_listed), Field(max_length=MAX_BANS // 2)
    ] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Annotated[
        tuple[Word, ...], BeforeValidator(_listed), Field(max_length=MAX_STOP_STRINGS)
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...], BeforeValidator(_listed), Field(max_length=MAX_STOP_IDS // 2)
    ] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 20)] = 0
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 20)] = 128
    logprobs: NumLogprobs = None
    prompt_logprobs: NumLogprobs = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    speculate: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ConfigurationError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}"
            )
        if self.n > 1 and self.temperature == 0:
            raise ConfigurationError(
                f"n is {self.n}, but at temperature 0 all texts are the same; raise the temperature"
            )
        return self


def checked(kind: type[T], **values: object) -> T:
    """Make a config of command line options; raises ConfigurationError, which names the flag."""
    return kind.model_validate(values, context=AS_FLAGS)


def reviewed(kind: type[T], value: object, name: str) -> T:
    """The config that was handed over as `name`, checked again. Raises ConfigurationError.

    What is frozen changes all the same: `model_copy(update=...)` checks nothing, and a dict in it
    is a dict.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}: expected {kind.__name__}, got {shown(value)}")
    return type(value).model_validate(dict(value))
