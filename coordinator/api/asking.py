"""Makes requests of prompts, conversations and sampling parameters, for one running pair.

What may be written for a prompt is checked here, and nowhere else: `LLM`, `AsyncLLM` and the HTTP
server take the same.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

from coordinator.api.chat import NO_ARGUMENTS, USUAL, Arguments, PromptForm
from coordinator.api.config import SpeculationConfig
from coordinator.api.conversations import Messages, with_arguments
from coordinator.api.models.lengths import cut_answers
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.refusals import scalar
from coordinator.api.requests import Request
from coordinator.api.without_effect import of_params
from proto.errors import ConfigurationError, shown

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

_KEYS = ("prompt", "prompt_token_ids")
MAX_TOLD = 64  # lines of warning that one pair gives
BYTES = bytes | bytearray | memoryview  # sequences of numbers, but nobody's token ids
_PROMPT_KINDS = 'a prompt is a string, a list of token ids or {"prompt_token_ids": [...]}'


class Asking:
    """Makes requests for a pair.

    speculation  how drafts are made where a request does not say it
    params       the sampling parameters of requests without any
    warn         is told, once for each line, what of the sampling parameters is not heeded; None:
                 nobody is
    """

    def __init__(self, pair: Pair, speculation: SpeculationConfig) -> None:
        self.pair = pair
        self.speculation = speculation
        self.params = SamplingParams()
        self._numbers = count()  # of the requests
        self.warn: Callable[[str], object] | None = None
        self._told: set[str] = set()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculation: SpeculationConfig | None = None,
    ) -> Request:
        """Return the request of one prompt. Raises ConfigurationError, also for several prompts."""
        requests = self.requests(prompt, params, speculation)
        if len(requests) != 1:
            raise ConfigurationError(f"give one prompt here, not {len(requests)}")
        return requests[0]

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        speculation: SpeculationConfig | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Request]:
        """Return a request for each prompt. Raises ConfigurationError.

        speculation  how drafts are made for these requests; None: as for the pair
        add_special_tokens  put the tokenizer's own tokens around prompts that are texts
        """
        pairs = [
            self._read(prompt, special_tokens=add_special_tokens) for prompt in _listed(prompts)
        ]
        return self._with_params(pairs, params, speculation)

    def chat_requests(
        self,
        messages: Messages | Sequence[Messages],
        params: Params,
        speculation: SpeculationConfig | None = None,
        arguments: Arguments = NO_ARGUMENTS,
        form: PromptForm = USUAL,
    ) -> list[Request]:
        """Return a request for each conversation. Raises ConfigurationError, ModelError.

        arguments  values for the variables of the chat template
        form       how the prompt begins and ends
        """
        if not isinstance(arguments, Mapping):
            raise ConfigurationError(
                f"chat_template_kwargs: expected a dict, got {shown(arguments)}"
            )
        pairs = [
            self.pair.encode_chat(
                list(map(with_arguments, conversation)), arguments, form, is_limited=True
            )
            for conversation in _conversations(messages)
        ]
        return self._with_params(pairs, params, speculation)

    def _read(self, prompt: Prompt, *, special_tokens: bool) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
        given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if isinstance(given, list | tuple):
            self.pair.check_length(len(given))  # before each of millions is looked at
        match prompt:
            case str(text) | {"prompt": str(text)}:
                return text, self.pair.encode(text, special_tokens=special_tokens, is_limited=True)
            case {"prompt_token_ids": [*given]} | [*given] if not isinstance(prompt, memoryview):
                ids = tuple(map(scalar, given))
                if all(type(token) is int for token in ids):
                    return None, cast(tuple[int, ...], ids)
        raise ConfigurationError(f"{_PROMPT_KINDS}; this one is {shown(prompt)}")

    def _with_params(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        params: Params,
        speculation: SpeculationConfig | None,
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            each = [self.params if params is None else params] * len(prompts)
        elif isinstance(params, list | tuple):
            each = list(params)
        else:
            raise ConfigurationError(
                "sampling_params: expected SamplingParams, or a list of one for each prompt, got "
                f"{shown(params)}"
            )
        if len(each) != len(prompts):
            raise ConfigurationError(
                f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one for each"
            )
        for _, ids in prompts:
            self.pair.check(ids)
        reviewed = [self.pair.reviewed_params(one) for one in each]
        self._tell(reviewed, [len(ids) for _, ids in prompts])
        made = [
            Request(self.pair, speculation or self.speculation, *prompt, one)
            for prompt, one in zip(prompts, reviewed, strict=True)
        ]
        for request in made:
            request.request_id = str(next(self._numbers))
        return made

    def _tell(self, params: Sequence[SamplingParams], nums_prompt: Sequence[int]) -> None:
        """Warn of what is not heeded, each line once."""
        if self.warn is None:
            return
        for one, num in zip(params, nums_prompt, strict=True):
            lines = [*of_params(one), *cut_answers(one, self.pair.max_len, [num])]
            for line in lines:
                if line not in self._told and len(self._told) < MAX_TOLD:
                    self._told.add(line)
                    self.warn(line)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a prompt has keys other than its text or its token ids."""
    more = [name for name, value in prompt.items() if name not in _KEYS and value is not None]
    if more:
        raise ConfigurationError(
            f"{_PROMPT_KINDS}; this one also has {shown(more[0])}: leave it out"
        )


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list; a list of numbers is one prompt. Raises ConfigurationError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise ConfigurationError(f"{_PROMPT_KINDS}; this one is {shown(prompts)}")
    is_ids = bool(prompts) and all(isinstance(scalar(item), int) for item in prompts)
    return [prompts] if is_ids else prompts  # type: ignore[list-item, return-value]


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Return the conversations as a list, also if one is given. Raises ConfigurationError.

    `ChatTemplate` checks what is inside a conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | BYTES):
        raise ConfigurationError(
            f"a conversation is a list of messages, and this is none: {shown(messages)}"
        )
    is_several = all(isinstance(item, Sequence) and not isinstance(item, str) for item in messages)
    return messages if messages and is_several else [messages]  # type: ignore[list-item, return-value]
