"""One answer on its way, which a person may stop: what has been written by then stays."""

import queue
import time
from collections.abc import Generator

from coordinator.api.pair import Pair
from coordinator.api.request import Request, Step
from coordinator.text.stream import WAIT_S, Reader, Stream


class Answer:
    """The one text of a request. Read its steps once."""

    def __init__(self, pair: Pair, request: Request) -> None:
        assert request.num_texts == 1
        self._pair = pair
        self._request = request
        # None: it is to be stopped. This queue, unlike others, may be given something by the
        # handler of a signal that interrupts whoever waits for it.
        self._news: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._num_tokens = 0  # that were read
        self._was_stopped = False

    @property
    def is_complete(self) -> bool:
        """Whether the end has come: its own, or the one that `stop` made. Then it has metrics."""
        return self._request.is_complete

    @property
    def was_stopped(self) -> bool:
        """Whether `stop` has ended it."""
        return self._was_stopped

    @property
    def num_tokens(self) -> int:
        """Tokens that have come so far."""
        return self._num_tokens

    def stop(self) -> None:
        """End it where it is; from any thread, or from the handler of a signal."""
        self._news.put(None)

    def steps(self) -> Generator[Step, None, None]:
        """What comes. Leaving early ends the text on both nodes; raises what ended it.

        Where it is stopped before its first token it ends without a last step.
        """
        stream = self._request.start(Reader(time.monotonic(), self._news.put))
        try:
            while not self.is_complete:
                try:
                    news = self._news.get(timeout=WAIT_S)
                except queue.Empty:
                    self._pair.service.check_alive()
                    continue
                if news is not None:
                    if step := self._request.read(stream):
                        self._num_tokens += len(step.part.outputs[0].token_ids)
                        yield step
                elif self._num_tokens:
                    self._was_stopped = True
                    stream.stop()
                else:
                    return
        finally:
            if not self.is_complete:
                stream.cancel()
