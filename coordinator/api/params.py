"""The sampling parameters of one text, with their ranges and defaults."""

from enum import Enum
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, model_validator

from coordinator.api.config_base import Frozen, called
from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError
from proto.messages import (
    GREEDY_BELOW,
    MAX_ALLOWED,
    MAX_BANS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
)

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 256
MAX_SAMPLES = 64
MAX_TOKENS = (1 << 20) - 1


def _listed(value: object) -> object:
    """Return one string as a tuple, None as an empty one, and any other value as it is."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _by_token(value: object) -> object:
    """Return None as {} (no bias), and string keys (as in JSON) as token ids."""
    if not isinstance(value, dict):
        return {} if value is None else value
    return {
        int(key)
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 16
        else key: bias
        for key, bias in value.items()
    }


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None


def _whole_vocabulary(value: object) -> object:
    """Return top_k, with -1 changed to 0; both mean "all tokens"."""
    return 0 if type(value) is int and value == -1 else value


def _no_seed(value: object) -> object:
    """Return seed, with -1 changed to None; both mean "a fresh one"."""
    return None if type(value) is int and value == -1 else value


def _as_long_as_it_may_be(value: object) -> object:
    """Return max_tokens, with None changed to the maximum: as long as the target allows."""
    return MAX_TOKENS if value is None else value


class RequestOutputKind(Enum):
    """What an output of `AsyncLLM` holds: all text so far, new text, or only the whole text."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(Frozen):
    """The sampling parameters of a text, with the names and meanings of vLLM.

    The defaults are those of vLLM, except for temperature (0: greedy) and max_tokens.
    max_tokens=None allows as many tokens as the target takes after the prompt; top_k=-1 allows all
    tokens, as 0 does; seed=-1 is no seed.

    Without a seed, each text gets a fresh one and reports it. bad_words are never generated, with
    or without a space before them; logprobs and prompt_logprobs are numbers of alternatives (0:
    only the token itself); each of n texts has its own random numbers.
    """

    HAS_TEXTS: ClassVar[bool] = True

    temperature: Annotated[
        float,
        Field(ge=0, le=100, description="How random the text is; 0: greedy."),
        # What is greedy is shown as such too.
        AfterValidator(lambda value: 0.0 if value < GREEDY_BELOW else value),
    ] = 0.0
    top_k: Annotated[
        int,
        BeforeValidator(_whole_vocabulary),
        Field(
            ge=0, lt=1 << 31, description="Sample only from the k likeliest tokens; 0: from all."
        ),
    ] = 0
    top_p: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Sample only from the likeliest tokens. They are the fewest that together "
            "have at least this probability.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Sample only from tokens that are likely enough. Their probability is at "
            "least this share of the likeliest token's; 0: from all.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(
            ge=1e-3,
            le=1e3,
            description="Above 1: make tokens of prompt and answer less likely.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        Penalty,
        Field(
            description="Subtract this from the logits of used tokens. These are the tokens that "
            "are in the answer so far."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty,
        Field(
            description="Subtract this once for each use of a token. It is taken off the token's "
            "logit for each time that the token is in the answer."
        ),
    ] = 0.0
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_by_token),
        Field(
            max_length=MAX_BIASES, description="Add this to the logits of tokens: 50:-100,7:2.5."
        ),
    ] = Field(default_factory=dict)
    allowed_token_ids: Annotated[
        Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_ALLOWED)] | None,
        Field(description="Generate only these tokens."),
    ] = None
    bad_words: Annotated[
        tuple[Word, ...],
        BeforeValidator(_listed),
        Field(
            max_length=MAX_BANS // 2,
            description="Never write this word. May be given several times.",
        ),
    ] = ()
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=1 << 63)] | None,
        BeforeValidator(_no_seed),
        Field(
            description="The same seed gives the same text. Without one, a fresh seed is drawn "
            "and shown."
        ),
    ] = None
    stop: Annotated[
        tuple[Word, ...],
        BeforeValidator(_listed),
        Field(
            max_length=MAX_STOP_STRINGS,
            description="End the text before this string. May be given several times.",
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(_listed),
        Field(max_length=MAX_STOP_IDS // 2, description="End the text at any of these tokens."),
    ] = ()
    ignore_eos: Annotated[bool, Field(description="Continue after an end-of-text token.")] = False
    include_stop_str_in_output: Annotated[
        bool, Field(description="Show the stop string or stop token, too.")
    ] = False
    min_tokens: Annotated[
        int,
        Field(
            ge=0,
            lt=1 << 20,
            description="The fewest tokens to generate. Before them, stop tokens and stop "
            "strings do not end the text.",
        ),
    ] = 0
    max_tokens: Annotated[
        int,
        BeforeValidator(_as_long_as_it_may_be),
        Field(ge=1, le=MAX_TOKENS, description="The most tokens to generate."),
    ] = 128
    skip_special_tokens: Annotated[
        bool, Field(description="Leave special tokens out of the text.")
    ] = True
    logprobs: Annotated[
        NumLogprobs,
        Field(
            description="With --json: the log-probability of each token. This many alternatives "
            "are added for each of them."
        ),
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs,
        Field(
            description="With --json: log-probabilities of the prompt. This many alternatives "
            "are added for each token."
        ),
    ] = None
    n: Annotated[
        int, Field(ge=1, le=MAX_SAMPLES, description="How many texts to sample for each prompt.")
    ] = 1
    structured_outputs: Annotated[
        InstanceOf[StructuredOutputsParams] | None,
        Field(description="What the answer must look like."),
    ] = None
    speculate: Annotated[bool, Field(description="False: the target writes alone.")] = True
    output_kind: Annotated[
        RequestOutputKind,
        # It changes no text, so that it is no part of what is told of a text.
        Field(description="What each output of AsyncLLM holds.", exclude=True),
    ] = RequestOutputKind.CUMULATIVE

    def __setattr__(self, name: str, value: object) -> None:
        """Change a parameter, as programs of vLLM's do. Raises ConfigurationError.

        Texts that were asked for before keep theirs: each request has a copy.
        """
        made = type(self)(**{**dict(self), name: value})
        object.__setattr__(self, "__dict__", made.__dict__)

    __hash__ = None  # type: ignore[assignment]  # since they can change

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ConfigurationError(
                f"{called('min_tokens')} is {self.min_tokens}; it must be at most "
                f"{called('max_tokens')}, {self.max_tokens}"
            )
        if self.structured_outputs is not None and self.min_tokens:
            raise ConfigurationError(
                f"{called('min_tokens')} does not go with {self.structured_outputs.title}, which "
                "says where the text may end"
            )
        if self.n > 1 and self.temperature == 0:
            raise ConfigurationError(
                f"{called('n')} is {self.n}, but at temperature 0 all texts are the same; raise "
                "the temperature"
            )
        return self
