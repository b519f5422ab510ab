"""Request bodies: OpenAI's fields, and those that vLLM adds.

`SamplingParams` checks what a field may be; here are its name, its type and its default.
"""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from coordinator.api.asking import Asking
from coordinator.api.config import ALONE, SpeculationConfig
from coordinator.api.config_base import named_as
from coordinator.api.params import MAX_TOKENS, SamplingParams
from coordinator.api.structured import NAME, StructuredOutputsParams
from coordinator.http.conversations import MAX_MESSAGES, ChatMessage, Conversation, Many
from coordinator.http.fields import Route, check
from proto.errors import ConfigurationError, shown
from proto.messages import MAX_TEXT_LEN
from proto.policies import PolicyName

MAX_TOKEN_ID = 1 << 31
TokenId = Annotated[int, Strict(), Field(ge=0, lt=MAX_TOKEN_ID)]
MAX_PROMPTS = 64
COMPLETION_TOKENS = 16  # what OpenAI's /v1/completions writes if nobody says more

FORM = "response_format"
KINDS = ("json", "regex", "choice", "grammar")  # of grammars, in the names of vLLM's older fields

# Fields of SamplingParams that a request has under the same name.
SAME = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *(
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
    ),
    *("include_stop_str_in_output", "skip_special_tokens", "temperature", "top_p", "n"),
)


class Speculative(BaseModel):
    """How drafts are made for one request; fields left out are as the server was started.

    events  the chunks of a stream tell what became of drafts and what both devices did
    """

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    policy: PolicyName | None = None
    num_speculative_tokens: int | None = Field(None, ge=1, le=48)
    events: bool = False


class Resume(BaseModel):
    """What another server has written of this request's answer, which goes on behind it.

    prompt_token_ids  of the prompt, as that server has said them; left out: read from the request
    token_ids         of the answer so far; where n is above 1, a list for each choice
    """

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Annotated[Many[TokenId], Field(min_length=1)] | None = None
    token_ids: Many[TokenId] | Many[Many[TokenId]]

    def written(self) -> list[tuple[int, ...]]:
        """Return the token ids of each choice."""
        given: list[Any] = list(self.token_ids)
        if any(isinstance(one, list) for one in given):
            return [tuple(one) for one in given]
        return [tuple(given)]


class StreamOptions(BaseModel):
    """What a streamed answer reports besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """A JSON schema with its name; `strict` changes nothing: every answer is held to the schema."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    schema_: bool | dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form that the answer must have, in OpenAI's words."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the answer must have; None: any. Raises ConfigurationError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True, called=FORM)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ConfigurationError("response_format: json_schema.schema is missing; give it")
        schema = self.json_schema.schema_
        return StructuredOutputsParams(
            json=json.dumps(schema) if isinstance(schema, bool) else schema, called=FORM
        )


class Body(BaseModel):
    """A request's body. A field that is null is as if it were left out; unknown ones are ignored.

    ROUTE  which fields are refused depends on it
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    ROUTE: ClassVar[Route]

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse known fields that are not obeyed here. Raises ConfigurationError."""
        if not isinstance(given, Mapping):
            return given
        check(given, cls.ROUTE)
        return {name: value for name, value in given.items() if value is not None}


class Common(Body):
    """The fields that completions and chat requests share."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=64)
    best_of: int | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], Field(fail_fast=True)] | None = None
    # As vLLM has them.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = None
    bad_words: Many[str] | None = None
    stop_token_ids: Many[TokenId] | None = None
    allowed_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    # vLLM's older names of what is in structured_outputs.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    # As llama.cpp has it.
    return_progress: bool | None = None
    return_token_ids: bool | None = None  # as vLLM has it
    # Ours.
    speculative: Speculative | None = None
    resume: Resume | None = None

    def given(self) -> dict[str, Any]:
        """Return the given fields that `SamplingParams` has under the same name, without nulls."""
        values = {name: getattr(self, name) for name in SAME}
        given = {name: value for name, value in values.items() if value is not None}
        given.setdefault("temperature", 1.0)  # OpenAI's default; ours is greedy
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ConfigurationError("best_of is not supported; leave it out, or make it equal n")
        if (form := self.form()) is not None:
            given["structured_outputs"] = form
        return given

    @property
    def stated_length(self) -> tuple[str, int] | None:
        """Return the name and value of the field that limits the answer; None: none does."""
        names = ("max_completion_tokens", "max_tokens")
        given = ((name, getattr(self, name, None)) for name in names)
        return next(((name, value) for name, value in given if value is not None), None)

    @property
    def wants_progress(self) -> bool:
        """True if chunks tell how far the prompt was read. Raises ConfigurationError."""
        if self.return_progress and not self.stream:
            raise ConfigurationError("return_progress goes with stream: true")
        return bool(self.return_progress)

    def resumed(self) -> Resume | None:
        """Return what was written elsewhere. Raises ConfigurationError if it does not fit here."""
        has_logprobs = getattr(self, "logprobs", None) not in (None, False)
        if self.resume is not None and has_logprobs and not self.stream:
            raise ConfigurationError(
                "resume with logprobs goes with stream: true: those of tokens before are unknown"
            )
        return self.resume

    @property
    def wants_form(self) -> bool:
        """True if the answer may have to fit a grammar, which another process compiles."""
        names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in KINDS))
        return any(getattr(self, name) is not None for name in names)

    @property
    def wants_events(self) -> bool:
        """True if chunks tell of the speculation. Raises ConfigurationError without a stream."""
        wanted = self.speculative is not None and self.speculative.events
        if wanted and not self.stream:
            raise ConfigurationError("speculative.events goes with stream: true")
        return wanted

    def form(self) -> StructuredOutputsParams | None:
        """Return what the answer must look like; None: it may be any text.

        Raises ConfigurationError, also if a request says it twice.
        """
        said = {NAME: self.structured_outputs}
        for kind in KINDS:
            value = getattr(self, f"guided_{kind}")
            said[f"guided_{kind}"] = None if value is None else {kind: value}
        forms = {
            name: StructuredOutputsParams.read(value, "" if name == NAME else name)
            for name, value in said.items()
            if value is not None
        }
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            forms[FORM] = form
        if len(forms) > 1:
            raise ConfigurationError(f"the answer's form is given twice: {' and '.join(forms)}")
        return next(iter(forms.values()), None)

    def speculation(self, asking: Asking) -> SpeculationConfig:
        """Return how drafts are made for this request. Raises ConfigurationError."""
        wanted = self.speculative
        if wanted is None:
            return asking.speculation
        given = wanted.model_dump(exclude={"enabled", "events"}, exclude_none=True)
        if not wanted.enabled:
            if given:
                raise ConfigurationError(
                    f"speculative: enabled is false, so {' and '.join(given)} would do nothing; "
                    "leave it out"
                )
            return ALONE
        base = asking.speculation.model_dump()
        if wanted.policy is not None:  # numbers of one policy say nothing of another
            for name in ("num_speculative_tokens", "window", "policy_option"):
                base.pop(name)
        made = named_as(SpeculationConfig, {}, **{**base, **given})
        if made.drafts and not asking.speculation.drafts:
            raise ConfigurationError("speculative: this server was started without a drafter")
        if not made.drafts and wanted.num_speculative_tokens is not None:
            raise ConfigurationError(
                f"speculative: the policy {made.policy} drafts nothing, so num_speculative_tokens "
                "would do nothing; leave it out"
            )
        made.check(asking.pair.config)
        return made


class CompletionBody(Common):
    """The body of POST /v1/completions."""

    ROUTE: ClassVar[Route] = Route.COMPLETIONS

    prompt: Any
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = False
    add_special_tokens: bool | None = None  # null: true; it does not count for token ids

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, also if one is given. Raises ConfigurationError."""
        given = self.prompt
        if isinstance(given, list) and not given:
            raise ConfigurationError("prompt: the list is empty; give at least one prompt")
        is_several = isinstance(given, list) and isinstance(given[0], str | list)
        prompts: list[Any] = given if is_several else [given]
        if len(prompts) > MAX_PROMPTS:
            raise ConfigurationError(f"prompt: {len(prompts)} of them; at most {MAX_PROMPTS}")
        for prompt in prompts:
            _check_prompt(prompt)
        return prompts

    def params(self, most: int) -> SamplingParams:
        """Return the sampling parameters. Raises ConfigurationError.

        most  tokens that a request may ask for; 0: any number
        """
        default = min(COMPLETION_TOKENS, most or COMPLETION_TOKENS)
        wanted = default if self.max_tokens is None else self.max_tokens
        if wanted == 0 and not self.echo:
            raise ConfigurationError("max_tokens is 0, which goes with echo alone")
        given = self.given() | {"max_tokens": limited("max_tokens", max(1, wanted), most)}
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["prompt_logprobs"] = self.logprobs
        return named_as(SamplingParams, {}, **given)


class ChatBody(Conversation, Common):
    """The body of POST /v1/chat/completions."""

    ROUTE: ClassVar[Route] = Route.CHAT

    messages: Annotated[Many[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    include_reasoning: bool | None = None

    @property
    def wants_form(self) -> bool:
        """True if the answer may have to fit a grammar, also by `tool_choice`."""
        return super().wants_form or self.tool_choice not in (None, "none", "auto")

    def form(self) -> StructuredOutputsParams | None:
        """Return what the answer must look like, also by `tool_choice`."""
        said, of_tools = super().form(), self.asked_tools().form
        if said is not None and of_tools is not None:
            raise ConfigurationError("tool_choice and the answer's form exclude each other")
        return of_tools or said

    def params(self, most: int) -> SamplingParams:
        """Return the sampling parameters. Raises ConfigurationError.

        most  tokens that a request may ask for; 0: any number
        """
        wanted = self.max_completion_tokens or self.max_tokens or most or MAX_TOKENS
        given = self.given() | {"max_tokens": limited("max_tokens", wanted, most)}
        if self.top_logprobs and not self.logprobs:
            raise ConfigurationError("top_logprobs goes with logprobs: true")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return named_as(SamplingParams, {}, **given)


class TokenizeBody(Conversation, Body):
    """The body of POST /tokenize: a text, or a conversation as the chat route takes it."""

    ROUTE: ClassVar[Route] = Route.TOKENIZE

    prompt: str | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: Annotated[Many[TokenId], Field(max_length=MAX_TEXT_LEN)]


def _check_prompt(prompt: Any) -> None:
    """Raise ConfigurationError if it is neither a text nor a list of token ids."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise ConfigurationError(
            f"prompt: expected a text, token ids or a list of either, got {shown(prompt)}"
        )
    if not prompt:
        raise ConfigurationError("prompt: a list of token ids is empty; give at least one token")
    # A list that is too long for any text is refused by its length, once that of texts is known.
    for token in islice(prompt, MAX_TEXT_LEN):
        if type(token) is not int or not 0 <= token < MAX_TOKEN_ID:
            raise ConfigurationError(
                f"prompt: a token id is a whole number from 0 on, not {shown(token)}"
            )


def limited(name: str, wanted: int, most: int) -> int:
    """Return `wanted`. Raises ConfigurationError if over `most` (0: no limit) or MAX_TOKENS."""
    if most and wanted > most:
        raise ConfigurationError(f"{name} is {wanted}; this server writes at most {most} tokens")
    if wanted > MAX_TOKENS:
        raise ConfigurationError(f"{name} is {wanted}; it must be at most {MAX_TOKENS}")
    return wanted
