"""Carries one text's tokens from the service's thread to the thread that asked for them."""

import queue
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

from coordinator.text.session_events import Emit, EmitPrompt, EmitRead
from coordinator.text.timed_session import Result
from proto.errors import SlipstreamError
from proto.messages import FinishReason

WAIT_S = 1.0  # how long a reader waits before it checks that the service is alive


@dataclass(frozen=True, slots=True)
class WrittenElsewhere:
    """All that comes of a text that was complete when it was asked for: why it has ended."""

    reason: FinishReason


Item = Emit | EmitPrompt | EmitRead | Result | WrittenElsewhere


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of several streams at once: it is notified of every item.

    since   when the texts were asked for (monotonic seconds); their queueing time counts from here
    notify  called in the service's thread with the stream that has just got an item
    name    id of the request, for the log; "": it has none
    """

    since: float
    notify: Callable[["TokenStream"], None]
    name: str = ""


class TokenStream:
    """The tokens of one text. Iterate over it once, in any thread; then `result` is set.

    cancel       ends the text now; both nodes forget it, and reading on raises ClosedError
    stop         ends the text because the reader has found its end; a `result` still comes
    check_alive  raises an error if no item can come any more
    reader       is notified of every item; None: the reading thread waits in `take`
    name         id of the request, for the log; "": it has none
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
        self._failure: SlipstreamError | None = None  # the error of the text, once it has been read
        self._check_alive = check_alive
        self._reader = reader
        self.name = "" if reader is None else reader.name
        self._items: queue.SimpleQueue[Item | SlipstreamError] = queue.SimpleQueue()

    def put(self, item: Item | SlipstreamError) -> None:
        """Add an item or the error that ends the text; called in the service's thread."""
        self._items.put(item)
        if self._reader is not None:
            self._reader.notify(self)

    def take(self, timeout_s: float) -> Item | None:
        """Take and return the next item; None: none came in time. Raises what ended the text."""
        if self._failure is not None:
            raise copy(self._failure) from self._failure
        try:
            item = self._items.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            self._check_alive()
            return None
        if isinstance(item, SlipstreamError):
            self._failure = item
            # Raise a copy: other streams may have the same error, and raising adds a traceback.
            raise copy(item) from item
        if isinstance(item, Result):
            self.result = item
        return item

    def __iter__(self) -> Iterator[Emit]:
        """Yield an Emit for each target pass. Raises the error that ended the text, if one did."""
        while self.result is None:
            item = self.take(WAIT_S)
            if isinstance(item, Emit):
                yield item
