"""The texts of one call on their way: as many at once as there is room for.

One thread or one task reads them all: the service says of which text there is news.
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress

from coordinator.api.pair import Pair
from coordinator.api.request import Request, Step
from coordinator.text.stream import WAIT_S, Reader, Stream
from proto.errors import TextError


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
        self._open: dict[Stream, Request] = {}
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
        news: queue.SimpleQueue[Stream] = queue.SimpleQueue()
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
        news: asyncio.Queue[Stream] = asyncio.Queue()
        reader = Reader(self._since, _teller(asyncio.get_running_loop(), news))
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

    def _read(self, stream: Stream, reader: Reader) -> Step | None:
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


def _teller(
    loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Stream]
) -> Callable[[Stream], None]:
    """What the service's thread calls. An event loop that has ended needs no news."""

    def tell(stream: Stream) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(news.put_nowait, stream)

    return tell
