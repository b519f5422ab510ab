"""One prompt on its way to its texts, which are put together as they come.

The `n` continuations of a prompt share the seed, also one that is drawn. Text is made here, in the
thread or task of whoever asked, and never in the service's; what comes is waited for in
`coordinator.api.batch`.
"""

from dataclasses import dataclass

from coordinator.api.config import SpeculationConfig
from coordinator.api.outputs import Assembly, RequestOutput, merged
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from coordinator.text.running import Result
from coordinator.text.session import Emit, EmitPrompt
from coordinator.text.stream import Item, Reader, Stream
from proto.errors import SlipstreamError, TextError

ERROR = "error"  # the finish reason of a text that could not be completed, as vLLM has it


class Request:
    """A prompt and how to continue it.

    failure  what ended one of its texts, or kept it from being begun
    """

    def __init__(
        self,
        pair: Pair,
        speculation: SpeculationConfig,
        prompt: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
    ) -> None:
        self.failure: SlipstreamError | None = None
        self._pair = pair
        self._speculation = speculation
        self._prompt = prompt
        self._ids = ids
        self._params = params
        self._open: dict[Stream, Assembly] = {}  # the texts that are asked for and not complete
        self._simulated = pair.simulated()  # as it was when the request was made
        self._complete: dict[int, RequestOutput] = {}  # those that are, by their index
        self._num_texts = params.n

    @property
    def num_texts(self) -> int:
        """How many continuations are wanted."""
        return self._num_texts

    def want_no_more(self) -> None:
        """Only those that have been begun are wanted."""
        self._num_texts = len(self._open) + len(self._complete)

    @property
    def is_complete(self) -> bool:
        """Whether all of them are there."""
        return len(self._complete) == self.num_texts

    def start(self, reader: Reader) -> Stream:
        """Ask for the next of its texts. Raises ConfigurationError if it cannot work."""
        pair, index = self._pair, len(self._open) + len(self._complete)
        try:
            stream, seed = pair.generate(
                self._ids, self._speculation, self._params, sample_index=index, reader=reader
            )
        except SlipstreamError as error:
            self.failure = error
            raise
        self._params = self._params.model_copy(update={"seed": seed})
        self._open[stream] = Assembly(
            self._prompt,
            self._ids,
            seed,
            pair.decoder(self._ids, skip_special_tokens=self._params.skip_special_tokens),
            ending=pair.ending(self._params),
            index=index,
        )
        return stream

    def read(self, stream: Stream) -> "Step | None":
        """What the next item of one of its texts adds. Raises the error that ended the text."""
        try:
            item = stream.take(0)
        except SlipstreamError as error:
            self.failure = error
            raise
        return None if item is None else self._step(stream, self._open[stream], item)

    def failed(self, stream: Stream, error: TextError) -> "Step":
        """One of its texts could not be completed. What has come of it is the whole of it."""
        self.failure = None
        return self._ended(stream, ERROR, None, str(error))

    def _ended(
        self, stream: Stream, reason: str, metrics: Metrics | None, error: str | None = None
    ) -> "Step":
        assembly = self._open.pop(stream)
        is_last = len(self._complete) == self.num_texts - 1
        part = assembly.finish(reason, metrics, is_last=is_last, error=error)
        self._complete[assembly.index] = assembly.whole()
        return Step(self, None, part)

    def _step(self, stream: Stream, assembly: Assembly, item: Item) -> "Step | None":
        """At a stop string both nodes are freed; what follows it is dropped."""
        match item:
            case EmitPrompt(logprobs):
                assembly.scored(logprobs)
            case Emit() if not assembly.is_stopped:
                emit, part = assembly.cut(item)
                if assembly.is_stopped:
                    stream.stop()
                return Step(self, emit, part)
            case Result(reason, metrics, until):
                if assembly.is_stopped:
                    metrics = until(assembly.num_tokens)
                metrics = self._pair.marked(metrics, self._simulated)
                return self._ended(stream, str(reason), metrics)
        return None

    def whole(self) -> RequestOutput:
        """All texts, at their end."""
        assert self.is_complete
        return merged([self._complete[index] for index in range(self.num_texts)])


@dataclass(frozen=True, slots=True)
class Step:
    """A pass as far as it belongs to a text, and what it adds; None: how the text ended."""

    request: Request
    emit: Emit | None
    part: RequestOutput

    @property
    def index(self) -> int:
        """Of the text among those of its prompt."""
        return self.part.outputs[0].index

    @property
    def is_last(self) -> bool:
        """Whether the text is complete."""
        return self.emit is None
