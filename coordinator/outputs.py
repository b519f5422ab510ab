"""What generation returns, in the shapes and names of vLLM, and how it is put together (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.metrics import Metrics
from coordinator.origins import origins
from coordinator.session import Emit
from coordinator.tokenization import Decoder


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt, or in a stream what has been added to it.

    index          0; several continuations of one prompt would be counted here
    text           without special tokens; the ids if the target has no tokenizer
    token_ids      an end-of-text token included
    finish_reason  "stop" or "length"; None while more is to come
    stop_reason    None: the text ended at its length or at an end-of-text token of the model
    token_origins  for each token `draft:model`, `recovered`, `bonus` or `plain`
    metrics        of the whole text, at its end
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_origins: tuple[str, ...] = ()
    metrics: Metrics | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and what came of it.

    prompt    None if the prompt was given as token ids
    finished  whether anything will be added; in a stream only the last output says so
    seed      that was used: the one of the parameters, or a fresh one if they had none
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int


class Assembly:
    """Puts one text together from its passes."""

    def __init__(
        self, prompt: str | None, prompt_ids: Sequence[int], seed: int, decoder: Decoder
    ) -> None:
        self._prompt = prompt
        self._prompt_ids = list(prompt_ids)
        self._seed = seed
        self._decoder = decoder
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._origins: list[str] = []

    def push(self, emit: Emit) -> RequestOutput:
        """What a pass adds."""
        text = "".join(self._decoder.pieces(emit.tokens))
        where = origins(emit)
        self._texts.append(text)
        self._tokens += emit.tokens
        self._origins += where
        part = CompletionOutput(0, text, list(emit.tokens), token_origins=where)
        return self._output(part, finished=False)

    def finish(self, reason: str, metrics: Metrics) -> RequestOutput:
        """The last part: text that was held back, how the text ended and what it cost."""
        text = self._decoder.finish()
        self._texts.append(text)
        part = CompletionOutput(0, text, [], finish_reason=reason, metrics=metrics)
        return self._output(part, finished=True)

    def whole(self, reason: str, metrics: Metrics) -> RequestOutput:
        """Everything, after `finish`."""
        complete = CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=self._tokens,
            finish_reason=reason,
            token_origins=tuple(self._origins),
            metrics=metrics,
        )
        return self._output(complete, finished=True)

    def _output(self, completion: CompletionOutput, *, finished: bool) -> RequestOutput:
        return RequestOutput(self._prompt, self._prompt_ids, [completion], finished, self._seed)
