"""The Python API: `LLM`, in the shapes and names of vLLM.

An `LLM` owns two node processes. Its methods may be called from any thread and from asyncio at the
same time. The nodes write up to `max_num_seqs` texts at once, and begin with them in the order in
which they were asked for; a call asks for no more of its own than can be written at once.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any

from coordinator.api.batch import Batch
from coordinator.api.chat import Messages
from coordinator.api.config import (
    NGRAM,
    Dtype,
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.models.heads import find_config
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.request import Request
from proto.errors import ClosedError, ConfigurationError, shown
from proto.heads import HeadKind
from proto.policies import POLICIES

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

_PAIR = PairConfig()
# What speculative_config may say besides "method" and "model": the other fields of
# SpeculationConfig, by vLLM's name where it has one.
_VLLM_NAMES = {"ngram_max": "prompt_lookup_max", "ngram_min": "prompt_lookup_min"}
_SETTINGS = {
    _VLLM_NAMES.get(name, name): name for name in SpeculationConfig.model_fields if name != "policy"
}
_PROMPT_KINDS = 'a prompt is a string, a list of token ids or {"prompt_token_ids": [...]}'


class LLM:
    """A target and a drafter, loaded and warm. Close it, or use it as a context manager.

    target, drafter     folder or Hugging Face name; the drafter may be a head of the target's
    speculative_config  "method" (auto, ar, sync, tree ... as `--policy`; ngram: no draft model;
                        medusa, eagle or eagle3: "model" is such a head),
                        "num_speculative_tokens", "window", "adaptive", "verify", "model" as another
                        way to name the drafter; for n-gram drafts "prompt_lookup_max",
                        "prompt_lookup_min", "reference", "remember" (earlier texts), and
                        "also_ngram" for both kinds
    settings            any other field of PairConfig: "max_num_seqs", "drafter_home", "heads", ...

    Raises, with one line each: ConfigurationError, ModelError, IncompatibleError, NodeError.
    """

    def __init__(
        self,
        target: str = _PAIR.target,
        drafter: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: Dtype = _PAIR.dtype,
        reproducible: bool = _PAIR.reproducible,
        max_model_len: int = _PAIR.max_model_len,
        target_device: str = _PAIR.target_device,
        drafter_device: str = _PAIR.drafter_device,
        **settings: Any,
    ) -> None:
        model, self._speculation = _speculation(speculative_config)
        if drafter is not None and model is not None:
            raise ConfigurationError(
                'the drafter is named twice: by drafter= and by speculative_config["model"]'
            )
        config = PairConfig(
            target=target,
            drafter=next((name for name in (drafter, model) if name is not None), _PAIR.drafter),
            dtype=dtype,
            reproducible=reproducible,
            max_model_len=max_model_len,
            target_device=target_device,
            drafter_device=drafter_device,
            **settings,
        )
        self._speculation.check(config)
        _check_kind(speculative_config, config)
        self.pair = Pair(config, with_drafter=self._speculation.drafts)
        self._close = weakref.finalize(self, self.pair.close)

    # -- blocking ---------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Continue one prompt or several: up to `max_num_seqs` texts at once, results in order.

        The first error ends all texts of this call and is raised: ConfigurationError, NodeError.
        """
        return self._answers(self._requests(prompts, sampling_params))

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the target's chat template; as `generate`."""
        return self._answers(self._chat_requests(messages, sampling_params))

    def _answers(self, requests: Sequence[Request]) -> list[RequestOutput]:
        with closing(Batch(self.pair, requests).steps()) as steps:
            for _ in steps:
                pass
        return [request.whole() for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """What each pass adds, as it comes; the last part is `finished` and carries the metrics.

        With `n` > 1 the parts of the texts are mixed, and each names its text (`index`). Leaving
        the loop early, or closing the generator, ends the texts on both nodes.
        """
        return self._parts(self._request(prompt, sampling_params))

    def _parts(self, request: Request) -> Generator[RequestOutput, None, None]:
        self._check_open()
        with closing(Batch(self.pair, [request]).steps()) as steps:
            for step in steps:
                yield step.part

    # -- asyncio ----------------------------------------------------------------------------------

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """As `generate`; a cancelled task ends its texts on both nodes."""
        requests = await asyncio.to_thread(self._requests, prompts, sampling_params)
        async with aclosing(Batch(self.pair, requests).steps_async()) as steps:
            async for _ in steps:
                pass
        return [request.whole() for request in requests]

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `stream`; closing the iterator or cancelling the task ends the texts on both nodes."""
        request = await asyncio.to_thread(self._request, prompt, sampling_params)
        async with aclosing(Batch(self.pair, [request]).steps_async()) as steps:
            async for step in steps:
                yield step.part

    # -- prompts ----------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        requests = self._requests(prompt, params)
        if len(requests) != 1:
            raise ConfigurationError(f"stream takes one prompt, not {len(requests)}")
        return requests[0]

    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Params) -> list[Request]:
        self._check_open()
        pairs = [self._read(prompt) for prompt in _listed(prompts)]
        return self._with_params(pairs, params)

    def _chat_requests(
        self, messages: Messages | Sequence[Messages], params: Params
    ) -> list[Request]:
        self._check_open()
        pairs = [self.pair.encode_chat(conversation) for conversation in _conversations(messages)]
        return self._with_params(pairs, params)

    def _read(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        match prompt:
            case str(text) | {"prompt": str(text)}:
                return text, self.pair.encode(text)
            case {"prompt_token_ids": [*ids]} | [*ids] if all(type(token) is int for token in ids):
                return None, tuple(ids)
        raise ConfigurationError(f"{_PROMPT_KINDS}; this one is {shown(prompt)}")

    def _with_params(
        self, prompts: Sequence[tuple[str | None, tuple[int, ...]]], params: Params
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        elif isinstance(params, Sequence) and not isinstance(params, str):
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
        return [
            Request(self.pair, self._speculation, *prompt, one)
            for prompt, one in zip(prompts, reviewed, strict=True)
        ]

    # -- the pair ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ClosedError("this LLM was closed; make a new one")

    def close(self) -> None:
        """End both nodes and every text. May be called twice."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also of one; a list of numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ConfigurationError(f"{_PROMPT_KINDS}; this one is {shown(prompts)}")
    is_ids = bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [prompts] if is_ids else prompts  # type: ignore[list-item, return-value]


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """A list of conversations, also of one; `ChatTemplate` says what is wrong inside of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigurationError(
            f"a conversation is a list of messages, and this is none: {shown(messages)}"
        )
    is_several = all(isinstance(item, Sequence) and not isinstance(item, str) for item in messages)
    return messages if messages and is_several else [messages]  # type: ignore[list-item, return-value]


def _speculation(config: Mapping[str, Any] | None) -> tuple[str | None, SpeculationConfig]:
    """The drafter's model, if it is named here, and the policy. Raises ConfigurationError."""
    known = ("method", "model", *_SETTINGS)
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"speculative_config: expected a dict of {', '.join(known)}, got {shown(config)}"
        )
    if unknown := [name for name in config if name not in known]:
        raise ConfigurationError(
            f"speculative_config has no {shown(unknown[0])}; there are {', '.join(known)}"
        )
    values = {setting: config[name] for name, setting in _SETTINGS.items() if name in config}
    model = config.get("model")
    if "method" in config:
        methods = (*POLICIES, NGRAM, *HeadKind)
        if config["method"] not in methods:
            raise ConfigurationError(
                f'speculative_config["method"] is one of {", ".join(methods)}, '
                f"not {shown(config['method'])}"
            )
        if config["method"] in list(HeadKind):
            if model is None:
                raise ConfigurationError(
                    f'the method {config["method"]} needs a "model": the folder or name of a head'
                )
        elif config["method"] != NGRAM:
            values["policy"] = config["method"]
        elif model is not None:
            raise ConfigurationError(
                f"the method ngram has no model, but {shown(model)} is given; "
                '"also_ngram" uses both'
            )
        else:
            model = NGRAM
    return model, SpeculationConfig(**values)


def _check_kind(config: Mapping[str, Any] | None, pair: PairConfig) -> None:
    """Raises ConfigurationError if the model is known to be no head of the kind that is named."""
    method = (config or {}).get("method")
    if method not in list(HeadKind):
        return
    kind, is_here = pair.drafter_head, find_config(pair.drafter, pair.drafter_revision) is not None
    if is_here and kind != method:
        what = f"a head of the kind {kind}" if kind is not None else "no head"
        raise ConfigurationError(
            f'speculative_config["method"] is {method}, and the model {pair.drafter} is {what}'
        )
