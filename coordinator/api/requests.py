"""Runs requests: starts the texts of each prompt and assembles their outputs as tokens come.

The `n` continuations of a prompt share the seed, also a seed that is drawn. Tokens are decoded to
text in the caller's thread or task, never in the service's thread; `Batch` waits for the tokens.
"""

import asyncio
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from coordinator.api.config import SpeculationConfig
from coordinator.api.outputs import Assembly, RequestOutput, merged
from coordinator.api.pair import Pair
from coordinator.api.params import RequestOutputKind, SamplingParams
from coordinator.api.reasoning import Marks, Thoughts
from coordinator.api.resuming import check_form, is_exact
from coordinator.api.speculation import TokenTexts
from coordinator.journal.shared import SharedText
from coordinator.text.metrics import Metrics
from coordinator.text.session_events import Emit, EmitPrompt, EmitRead
from coordinator.text.stream import WAIT_S, Item, Reader, TokenStream, WrittenElsewhere
from coordinator.text.timed_session import Result
from proto.errors import ConfigurationError, SlipstreamError, TextError
from proto.messages import GREEDY_BELOW, FinishReason

# -- request ---------------------------------------------------------------------------------------

# Finish reasons, as vLLM has them: of a text that could not be completed, and of one that its
# client has ended.
ERROR, ABORT = "error", "abort"


class Request:
    """A prompt, its sampling parameters, and its texts (continuations) so far.

    request_id  for its outputs; may be changed before `start`
    failure   the error that ended one of its texts or kept it from being started
    on_read   is told how far the target has read the prompt, while it takes a while
    thoughts  what the answers may begin with, before what a grammar holds; None: no thoughts
    shown     special tokens that are part of the texts in any case
    """

    def __init__(
        self,
        pair: Pair,
        speculation: SpeculationConfig,
        prompt: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
    ) -> None:
        self.request_id = ""
        self.failure: SlipstreamError | None = None
        self._pair = pair
        self._speculation = speculation
        self._prompt = prompt
        self._ids = ids
        self._params = params
        self._open: dict[TokenStream, Assembly] = {}  # started, not complete
        self._simulated = pair.simulated()  # as it was when the request was made
        self._complete: dict[int, RequestOutput] = {}  # the complete texts, by their index
        self._num_texts = params.n
        self._is_watched = False
        self.on_read: Callable[[EmitRead], object] | None = None
        self.thoughts: Thoughts | None = None
        self.shown: tuple[str, ...] = ()
        self._written: Sequence[tuple[int, ...]] = ()  # elsewhere, by the index of the text
        self._resumed: dict[int, str] = {}  # the text of these, by index
        self._ends: dict[int, FinishReason] = {}  # why texts of these are complete, by index
        self._shared: Sequence[SharedText] = ()  # by index; empty: its texts are its own
        self._writes = False

    @property
    def prompt(self) -> str | None:
        """Return the text of the prompt; None: it was given as token ids."""
        return self._prompt

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return the token ids of the prompt."""
        return self._ids

    @property
    def output_kind(self) -> RequestOutputKind:
        """Return what each output holds, by the sampling parameters."""
        return self._params.output_kind

    @property
    def num_texts(self) -> int:
        """Return how many texts are wanted for this prompt."""
        return self._num_texts

    @property
    def num_kv_tokens(self) -> int:
        """Return the number of tokens of the started texts, prompts included."""
        return sum(len(self._ids) + assembly.num_tokens for assembly in self._open.values())

    def watch(self) -> None:
        """Let outputs tell what became of drafts and what both devices did; call before `start`."""
        self._is_watched = True

    def expect(
        self, marks: Marks | None, shown: Iterable[str], continued: str = "", prompt: str = ""
    ) -> None:
        """Let the texts begin with thoughts between marks, if any; call before `start`.

        shown      special tokens that are part of the texts in any case
        continued  the message at the end of the prompt that the texts go on with
        prompt     its text, with special tokens by name
        """
        if marks is not None:
            self.thoughts = Thoughts.after(prompt, marks, continued)
        self.shown = tuple(shown)

    def resume(self, written: Sequence[tuple[int, ...]]) -> None:
        """Let each text go on behind tokens that were written elsewhere; call before `start`.

        A text that is complete with them only tells why it has ended. Raises ConfigurationError if
        these are no beginnings of such texts.
        """
        if len(written) != self.num_texts:
            raise ConfigurationError(
                f"resume: {len(written)} lists of token ids for {self.num_texts} texts; give one "
                "for each"
            )
        for index, tokens in enumerate(written):
            if not tokens:
                continue
            end = self._pair.review_written(len(self._ids), tokens, self._params)
            form = self._params.structured_outputs
            if form is not None and self.thoughts is None:  # else they may be thoughts
                check_form(tokens, form, self._pair)
            assembly = self._assembly(index, 0)
            self._resumed[index] = assembly.resume(tokens)
            if end is not None or assembly.is_stopped:
                self._ends[index] = end or FinishReason.STOP
        self._written = written

    def seeded(self) -> int:
        """Return the seed of the texts; if the parameters have none, draw it now."""
        seed = self._params.seed
        if seed is None:
            seed = secrets.randbits(63)
            self._params = self._params.model_copy(update={"seed": seed})
        return seed

    def again(self, seed: int | None = None) -> "Request":
        """Return the same request, of which no text was started; with another seed, if given."""
        params = self._params
        if seed is not None:
            params = params.model_copy(update={"seed": seed})
        made = Request(self._pair, self._speculation, self._prompt, self._ids, params)
        made.thoughts, made.shown, made._is_watched = self.thoughts, self.shown, self._is_watched
        return made

    def share(self, texts: Sequence[SharedText], *, writes: bool) -> None:
        """Read these texts in place of own ones, and with `writes` write them; before `start`."""
        self._shared, self._writes = texts, writes

    def reviewed_end(self, tokens: tuple[int, ...]) -> FinishReason | None:
        """Return why a text of these tokens is complete; None: more follows.

        Raises ConfigurationError if no text of this request begins so.
        """
        if not tokens:
            return None
        assembly = self._assembly(0, 0)
        assembly.cut(Emit(tokens, 0, 0, ()))
        if assembly.is_stopped:
            return FinishReason.STOP
        return self._pair.review_written(len(self._ids), tokens, self._params)

    @property
    def follows_exactly(self) -> bool:
        """True if the texts would be the same if they were written again."""
        is_sampled = self._params.temperature >= GREEDY_BELOW
        is_coupled = self._speculation.verify == "coupled" or not self._params.speculate
        return is_exact(self._pair) and (is_coupled or not is_sampled)

    def resumed_text(self, index: int) -> str:
        """Return the text that the tokens of a text have shown that were written elsewhere."""
        return self._resumed.get(index, "")

    def is_resumed(self, index: int) -> bool:
        """True if tokens of a text were written elsewhere."""
        return bool(self._written and self._written[index])

    def num_resumed_of(self, index: int) -> int:
        """Return how many tokens of a text were written elsewhere."""
        return len(self._written[index]) if self._written else 0

    @property
    def has_seed(self) -> bool:
        """True if the parameters decide the texts: they have a seed, or none is needed."""
        return self._params.seed is not None or self._params.temperature < GREEDY_BELOW

    def want_no_more(self) -> None:
        """Reduce `num_texts` to the number of texts that were started."""
        self._num_texts = len(self._open) + len(self._complete)

    @property
    def is_complete(self) -> bool:
        """True if all wanted texts are complete."""
        return len(self._complete) == self.num_texts

    def start(self, reader: Reader) -> TokenStream:
        """Start the next text of this prompt; return its stream. Raises ConfigurationError."""
        index = len(self._open) + len(self._complete)
        if index in self._ends:
            return self._told(index, reader)
        if self._shared:
            return self._start_shared(index, reader)
        try:
            written = self._written[index] if self._written else ()
            stream, seed = self._generated(index, written, reader)
        except SlipstreamError as error:
            self.failure = error
            raise
        self._params = self._params.model_copy(update={"seed": seed})
        assembly = self._open[stream] = self._assembly(index, seed)
        if self.is_resumed(index):
            assembly.resume(self._written[index])
        return stream

    def _start_shared(self, index: int, reader: Reader) -> TokenStream:
        """Return the stream of a text that others may read as well."""
        text = self._shared[index]
        if self._writes:
            try:
                stream = text.write(partial(self._begun, index), reader)
            except SlipstreamError as error:
                self.failure = error
                raise
        else:
            stream = text.read(reader, self.num_resumed_of(index))
        assembly = self._open[stream] = self._assembly(index, self._params.seed or 0)
        if self.is_resumed(index):
            assembly.resume(self._written[index])
        return stream

    def _begun(self, index: int, written: tuple[int, ...], reader: Reader) -> TokenStream:
        """Start a text behind tokens that it has; return the stream of what follows."""
        return self._generated(index, written, reader)[0]

    def _generated(
        self, index: int, written: tuple[int, ...], reader: Reader
    ) -> tuple[TokenStream, int]:
        """Start a text; return its stream and its seed (`Pair.generate`)."""
        return self._pair.generate(
            self._ids,
            self._speculation,
            self._params,
            sample_index=index,
            reader=reader,
            is_watched=self._is_watched,
            thoughts=self.thoughts,
            written=written,
        )

    def _told(self, index: int, reader: Reader) -> TokenStream:
        """Return the stream of a text that was complete before it began here."""
        stream = TokenStream(_nothing, _nothing, self._pair.service.check_alive, reader)
        assembly = self._open[stream] = self._assembly(index, self._params.seed or 0)
        assembly.resume(self._written[index])
        stream.put(WrittenElsewhere(self._ends[index]))
        return stream

    def _assembly(self, index: int, seed: int) -> Assembly:
        """Return what makes the output of a text of its tokens."""
        return Assembly(
            self._prompt,
            self._ids,
            seed,
            self._pair.decoder(
                self._ids,
                skip_special_tokens=self._params.skip_special_tokens,
                shown=self.shown,
            ),
            ending=self._pair.ending(self._params),
            index=index,
            token_texts=TokenTexts() if self._is_watched else None,
            request_id=self.request_id,
        )

    def read(self, stream: TokenStream) -> "Step | None":
        """Take the stream's next item; return the step that it makes, or None if it adds nothing.

        Raises the error that ended the text.
        """
        item = self._taken(stream)
        return None if item is None else self._step(stream, self._open[stream], item)

    async def read_async(self, stream: TokenStream) -> "Step | None":
        """Do what `read` does; what is said of a whole prompt is read by a thread."""
        item = self._taken(stream)
        if isinstance(item, EmitPrompt):
            return await asyncio.to_thread(self._step, stream, self._open[stream], item)
        return None if item is None else self._step(stream, self._open[stream], item)

    def _taken(self, stream: TokenStream) -> Item | None:
        try:
            return stream.take(0)
        except SlipstreamError as error:
            self.failure = error
            raise

    def failed(self, stream: TokenStream, error: TextError) -> "Step":
        """End a text that could not be completed, with the tokens so far; return its last step."""
        self.failure = None
        return self._ended(stream, ERROR, None, str(error))

    def aborted(self, stream: TokenStream) -> "Step":
        """Cancel one of the texts; return its last step, with the tokens that have come."""
        stream.cancel()
        return self._ended(stream, ABORT, None)

    def so_far(self) -> RequestOutput:
        """Return all texts that were begun, as far as they have come."""
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
        """Return the step of one item; None if it adds nothing.

        At a stop string the text is ended on both nodes, and later items are dropped.
        """
        match item:
            case WrittenElsewhere(reason):
                return self._ended(stream, str(reason), None)
            case EmitPrompt(logprobs):
                assembly.scored(logprobs)
            case EmitRead() if self.on_read is not None:
                self.on_read(item)
            case Emit() if not assembly.is_stopped:
                emit, part = assembly.cut(item)
                if assembly.is_stopped:
                    stream.stop()
                return Step(self, emit, part)
            case Result(reason, metrics, until):
                if assembly.is_stopped:
                    metrics = until(assembly.num_new_tokens)
                metrics = self._pair.marked(metrics, self._simulated)
                return self._ended(stream, str(reason), metrics)
        return None

    def whole(self) -> RequestOutput:
        """Return the output with all texts; call it once `is_complete`."""
        assert self.is_complete
        return merged([self._complete[index] for index in range(self.num_texts)])


def _nothing() -> None:
    """Do nothing: no node knows of a text that was complete before it began."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of a text and the output that it adds. `emit` is None in the text's last step."""

    request: Request
    emit: Emit | None
    part: RequestOutput

    @property
    def index(self) -> int:
        """Return the index of the text among the continuations of its prompt."""
        return self.part.outputs[0].index

    @property
    def is_last(self) -> bool:
        """True if this step completes the text."""
        return self.emit is None


# -- batch -----------------------------------------------------------------------------------------

# Runs the texts of one call, as many at once as there is room for.
#
# One thread or one task reads them all: the service tells it which text has a new item.


class Batch:
    """The requests of one call. Read its steps once; then each request has its `whole` output.

    Texts are started in the order of the requests; the queueing time of all of them counts from
    now. A text that cannot be completed ends with a step that says so (`CompletionOutput.error`).
    Any other error ends all open texts and is raised; leaving the steps early ends them too.
    """

    def __init__(self, pair: Pair, requests: Sequence[Request]) -> None:
        self._pair = pair
        self._since = time.monotonic()
        # One entry for each text that was not started yet.
        self._waiting = deque(request for request in requests for _ in range(request.num_texts))
        self._open: dict[TokenStream, Request] = {}
        self._winds_up = False

    @property
    def num_open(self) -> int:
        """Return the number of texts that are being generated."""
        return len(self._open)

    @property
    def is_winding_up(self) -> bool:
        """True if no more texts are started."""
        return self._winds_up

    def wind_up(self) -> None:
        """Start no more texts; running ones go on. May be called in a signal handler.

        `num_texts` of each request becomes the number of its texts that were started, also 0.
        """
        self._winds_up = True

    def steps(self) -> Generator[Step, None, None]:
        """Start the texts and yield each step as it comes, all mixed; waits in this thread.

        Raises the error that ended the pair, or another error than TextError that ended a text.
        """
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

    def _begin(self, reader: Reader) -> None:
        """Start waiting texts while lanes are free; after `wind_up`, drop the waiting ones."""
        if self._winds_up:
            for request in self._waiting:
                request.want_no_more()
            self._waiting.clear()
        while self._waiting and len(self._open) < self._pair.num_seqs:
            request = self._waiting.popleft()
            self._open[request.start(reader)] = request

    def _read(self, stream: TokenStream, reader: Reader) -> Step | None:
        """Take a stream's next item; return its step or None; after its last, begin more texts."""
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
        """Cancel the texts that have not ended, on both nodes."""
        for stream in self._open:
            stream.cancel()


def teller(
    loop: asyncio.AbstractEventLoop, put: Callable[[TokenStream], None]
) -> Callable[[TokenStream], None]:
    """Return a function by which another thread passes a stream to `put` in the event loop."""

    def tell(stream: TokenStream) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(put, stream)

    return tell
