"""One prompt on its way to its texts, which are put together as they come.

The `n` continuations of a prompt share the seed, also one that is drawn. Text is made here, in the
thread or task of whoever asked, and never in the service's; `Batch` waits for what comes.
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from coordinator.api.config import SpeculationConfig
from coordinator.api.outputs import Assembly, RequestOutput, merged
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from coordinator.text.session import Emit, EmitPrompt, Result
from coordinator.text.stream import WAIT_S, Item, Reader, TokenStream
from proto.errors import SlipstreamError, TextError

# -- request ---------------------------------------------------------------------------------------

# Finish reasons, as vLLM has them: of a text that could not be completed, and of one that its
# client has ended.
ERROR, ABORT = "error", "abort"


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
        self._open: dict[TokenStream, Assembly] = {}  # those asked for and not complete
        self._simulated = pair.simulated()  # as it was when the request was made
        self._complete: dict[int, RequestOutput] = {}  # those that are, by their index
        self._num_texts = params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._ids)

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

    def start(self, reader: Reader) -> TokenStream:
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

    def read(self, stream: TokenStream) -> "Step | None":
        """What the next item of one of its texts adds. Raises the error that ended the text."""
        try:
            item = stream.take(0)
        except SlipstreamError as error:
            self.failure = error
            raise
        return None if item is None else self._step(stream, self._open[stream], item)

    def failed(self, stream: TokenStream, error: TextError) -> "Step":
        """One of its texts could not be completed. What has come of it is the whole of it."""
        self.failure = None
        return self._ended(stream, ERROR, None, str(error))

    def aborted(self, stream: TokenStream) -> "Step":
        """One of its texts is not wanted any more. What has come of it is the whole of it."""
        stream.cancel()
        return self._ended(stream, ABORT, None)

    def so_far(self) -> RequestOutput:
        """All texts that were begun, up to now."""
        texts = [
            *self._complete.values(),
            *(one.whole() for one in self._open.values() if one.has_parts),
        ]
        output = merged(sorted(texts, key=lambda text: text.outputs[0].index))
        return replace(output, finished=self.is_complete)

    def _ended(
        self, stream: TokenStream, reason: str, metrics: Metrics | None, error: str | None = None
    ) -> "Step":
        assembly = self._open.pop(stream)
        is_last = len(self._complete) == self.num_texts - 1
        part = assembly.finish(reason, metrics, is_last=is_last, error=error)
        self._complete[assembly.index] = assembly.whole()
        return Step(self, None, part)

    def _step(self, stream: TokenStream, assembly: Assembly, item: Item) -> "Step | None":
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


# -- batch -----------------------------------------------------------------------------------------

# The texts of one call on their way: as many at once as there is room for.
#
# One thread or one task reads them all: the service says of which text there is news.


class Batch:
    """Requests of one call. Read its steps once; then each request has its `whole`.

    Texts are begun in the order of the requests, and all of them are queued from now on. A text
    that cannot be completed ends with a step that says so (`CompletionOutput.error`). Any other
    error ends those that are open and is raised; leaving the steps early ends them too.
    """

    def __init__(self, pair: Pair, requests: Sequence[Request]) -> None:
        self._pair = pair
        self._since = time.monotonic()
        # One entry for each text that has not been asked for.
        self._waiting = deque(request for request in requests for _ in range(request.num_texts))
        self._open: dict[TokenStream, Request] = {}
        self._winds_up = False

    @property
    def num_open(self) -> int:
        """Texts that are being written."""
        return len(self._open)

    @property
    def is_winding_up(self) -> bool:
        """Whether no more texts are begun."""
        return self._winds_up

    def wind_up(self) -> None:
        """Begin no more texts; also from the handler of a signal. What runs goes on to its end.

        A request of which some texts were begun wants no others any more; of one of which none
        was, `num_texts` is 0.
        """
        self._winds_up = True

    def steps(self) -> Generator[Step, None, None]:
        """What comes, waited for in this thread. The steps of several texts are mixed."""
        news: queue.SimpleQueue[TokenStream] = queue.SimpleQueue()
        reader = Reader(self._since, news.put)
        try:
            self._begin(reader)
            while self._open:
                try:
                    stream = news.get(timeout=WAIT_S)
                except queue.Empty:
                    self._pair.service.check_alive()
                    continue
                if step := self._read(stream, reader):
                    yield step
        finally:
            self._leave()

    async def steps_async(self) -> AsyncGenerator[Step, None]:
        """The same, waited for without a thread: the service wakes the event loop."""
        news: asyncio.Queue[TokenStream] = asyncio.Queue()
        reader = Reader(self._since, teller(asyncio.get_running_loop(), news.put_nowait))
        try:
            self._begin(reader)
            while self._open:
                try:
                    async with asyncio.timeout(WAIT_S):
                        stream = await news.get()
                except TimeoutError:
                    self._pair.service.check_alive()
                    continue
                if step := self._read(stream, reader):
                    yield step
        finally:
            self._leave()

    def _begin(self, reader: Reader) -> None:
        """Ask for as many texts as there is room for."""
        if self._winds_up:
            for request in self._waiting:
                request.want_no_more()
            self._waiting.clear()
        while self._waiting and len(self._open) < self._pair.num_seqs:
            request = self._waiting.popleft()
            self._open[request.start(reader)] = request

    def _read(self, stream: TokenStream, reader: Reader) -> Step | None:
        """What the next item of a text adds. At its end the next one begins."""
        request = self._open[stream]
        try:
            step = request.read(stream)
        except TextError as error:
            step = request.failed(stream, error)
        if step is not None and step.is_last:
            del self._open[stream]
            self._begin(reader)
        return step

    def _leave(self) -> None:
        """End on both nodes what has not ended."""
        for stream in self._open:
            stream.cancel()


def teller(
    loop: asyncio.AbstractEventLoop, put: Callable[[TokenStream], None]
) -> Callable[[TokenStream], None]:
    """What the service's thread calls. An event loop that has ended needs no news."""

    def tell(stream: TokenStream) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(put, stream)

    return tell
