"""One prompt on its way: its texts are asked for one after another and put together as they come.

The `n` continuations of a prompt share its cached keys and values, so each but the first begins at
once. Text is made here, in the thread or task of whoever asked, and never in the service's.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from coordinator.api.config import (
    SpeculationConfig,
)
from coordinator.api.outputs import Assembly, RequestOutput, merged
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.running import Result
from coordinator.text.session import Emit, EmitPrompt
from coordinator.text.stream import WAIT_S, Item, Stream


@dataclass(frozen=True, slots=True)
class Step:
    """A pass as far as it belongs to the text, and what it adds; None: how the text ended."""

    emit: Emit | None
    part: RequestOutput


class Request:
    """A prompt and how to continue it. Read its steps once; then `whole` is there.

    Raises ConfigurationError, when the first step is asked for, if it cannot work.
    """

    def __init__(
        self,
        pair: Pair,
        speculation: SpeculationConfig,
        prompt: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
    ) -> None:
        self._pair = pair
        self._speculation = speculation
        self._prompt = prompt
        self._ids = ids
        self._params = params
        self._texts: list[RequestOutput] = []  # those that are complete

    def steps(self) -> Generator[Step, None, None]:
        """What comes, waited for in this thread. Leaving early ends the text on both nodes."""
        for index in range(self._params.n):
            text = self._start(index)
            try:
                while text.is_open:
                    if (item := text.stream.take(WAIT_S)) and (step := text.step(item)):
                        yield step
            finally:
                text.leave()
            self._texts.append(text.assembly.whole())

    async def steps_async(self) -> AsyncGenerator[Step, None]:
        """The same, waited for without a thread: the service wakes the event loop."""
        for index in range(self._params.n):
            text = self._start(index)
            news = asyncio.Event()
            text.stream.notify = partial(_tell, asyncio.get_running_loop(), news)
            try:
                while text.is_open:
                    news.clear()
                    if item := text.stream.take(0):
                        if step := text.step(item):
                            yield step
                    else:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(news.wait(), WAIT_S)
            finally:
                text.stream.notify = None
                text.leave()
            self._texts.append(text.assembly.whole())

    def whole(self) -> RequestOutput:
        """All texts, at their end."""
        assert len(self._texts) == self._params.n
        return merged(self._texts)

    def _start(self, index: int) -> "_Text":
        pair, params = self._pair, self._params
        stream, seed = pair.generate(self._ids, self._speculation, params, sample_index=index)
        self._params = params.model_copy(update={"seed": seed})
        assembly = Assembly(
            self._prompt,
            self._ids,
            seed,
            pair.decoder(self._ids),
            ending=pair.ending(params),
            index=index,
            is_last=index == params.n - 1,
        )
        return _Text(stream, assembly)


@dataclass(frozen=True, slots=True)
class _Text:
    """One continuation."""

    stream: Stream
    assembly: Assembly

    @property
    def is_open(self) -> bool:
        """Whether more is to come."""
        return self.stream.result is None

    def step(self, item: Item) -> Step | None:
        """What an item adds. At a stop string both nodes are freed; what follows it is dropped."""
        assembly = self.assembly
        match item:
            case EmitPrompt(logprobs):
                assembly.scored(logprobs)
            case Emit() if not assembly.is_stopped:
                emit, part = assembly.cut(item)
                if assembly.is_stopped:
                    self.stream.stop()
                return Step(emit, part)
            case Result(reason, metrics, until):
                if assembly.is_stopped:
                    metrics = until(assembly.num_tokens)
                return Step(None, assembly.finish(str(reason), metrics))
        return None

    def leave(self) -> None:
        """End it on both nodes, if it has not ended."""
        if self.is_open:
            self.stream.cancel()


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    """Called in the service's thread. An event loop that has ended needs no news."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(news.set)
