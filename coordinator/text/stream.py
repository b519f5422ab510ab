"""One text's tokens on their way from the service's thread to whoever asked for them."""

import queue
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

from coordinator.text.session import Emit, EmitPrompt, Result
from proto.errors import SlipstreamError

WAIT_S = 1.0  # after which whoever waits looks whether the service is alive


Item = Emit | EmitPrompt | Result


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who waits for texts, of several streams at once and however long the queue is.

    since   when they were asked for (seconds of a monotonic clock): they are queued from then on
    notify  called in the service's thread for each item that one of the streams is given
    """

    since: float
    notify: Callable[["TokenStream"], None]


class TokenStream:
    """Iterate it once, in any thread; then `result` is there.

    cancel       ends the text now; both nodes forget it, and reading on raises ClosedError
    stop         ends it as well, because the reader has found its end; the `result` comes
    check_alive  raises if nothing can come any more
    reader       is told of every item; None: whoever reads waits in `take`
    """

    def __init__(
        self,
        cancel: Callable[[], None],
        stop: Callable[[], None],
        check_alive: Callable[[], None],
        reader: Reader | None = None,
    ) -> None:
        self.cancel = cancel
        self.stop = stop
        self.result: Result | None = None  # set when the text has been read to its end
        self._failure: SlipstreamError | None = None  # set when its failure has been read
        self._check_alive = check_alive
        self._reader = reader
        self._items: queue.SimpleQueue[Item | SlipstreamError] = queue.SimpleQueue()

    def put(self, item: Item | SlipstreamError) -> None:
        """Called by the service."""
        self._items.put(item)
        if self._reader is not None:
            self._reader.notify(self)

    def take(self, timeout_s: float) -> Item | None:
        """The next item; None if none came in time. Raises the error that ended the text."""
        if self._failure is not None:
            raise copy(self._failure) from self._failure
        try:
            item = self._items.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            self._check_alive()
            return None
        if isinstance(item, SlipstreamError):
            self._failure = item
            # A new one: other streams may have the same, and what is raised keeps its traceback.
            raise copy(item) from item
        if isinstance(item, Result):
            self.result = item
        return item

    def __iter__(self) -> Iterator[Emit]:
        """The passes. Raises the error that ended the text, if one did."""
        while self.result is None:
            item = self.take(WAIT_S)
            if isinstance(item, Emit):
                yield item
