"""One answer on its way, which a person may stop: what has been written by then stays."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from coordinator.api.pair import Pair
from coordinator.api.requests import Request, Step
from coordinator.text.stream import WAIT_S, Reader, TokenStream
from proto.errors import SlipstreamError

# -- interrupts ------------------------------------------------------------------------------------

# Ctrl-C in a conversation: it stops an answer, or empties the line that is being typed.
#
# It never ends the program by itself, and nothing else is ever cut in two by it: elsewhere it waits
# until an answer or a line begins. Who stops an answer often presses several times: for a second
# after such an answer Ctrl-C on an empty line does nothing. While a line is typed the nodes may
# die; that is noticed as well.
#
# Python calls the handler of a signal when C code gives it a chance. `input` does so when a signal
# interrupts its wait for a key, not for one that came just before: it shows the prompt first, so a
# quick Ctrl-C can come in between, and was heard at the next key. So that wait is interrupted at
# every look, by a signal that means nothing.

WATCH_S = 0.25
WAKE = signal.SIGURG  # ignored by default: sent too late, it harms nobody
GRACE_S = 1.0
now_s = time.monotonic
PATIENCE_S = 3.0  # an answer that goes on for so long after Ctrl-C does not stop any more


class LineInterruptedError(Exception):
    """Ctrl-C while a line was typed.

    line  what had been typed of it
    """

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


class Interrupts:
    """Has Ctrl-C while it is entered, in the main thread.

    check_alive  raises a SlipstreamError when the nodes can do nothing any more
    typed        what has been typed of the line that is read
    """

    def __init__(self, check_alive: Callable[[], None], typed: Callable[[], str]) -> None:
        self._typed = typed
        self._check_alive = check_alive
        self._failure: SlipstreamError | None = None  # what check_alive has raised
        self._is_reading = False
        self._stop: Callable[[], None] | None = None  # of the answer that is being written
        self._pressed_at: float | None = None  # while this answer is written, or before it
        self._deaf_until = float("-inf")  # on an empty line Ctrl-C does nothing before that
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, name="watch", daemon=True)
        self._main = threading.main_thread().ident

    def __enter__(self) -> "Interrupts":
        self._before = signal.getsignal(signal.SIGINT)
        self._wake_before = signal.signal(WAKE, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, self._on_signal)
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watch.join()
        signal.signal(signal.SIGINT, self._before)
        signal.signal(WAKE, self._wake_before)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A line is typed. Raises LineInterruptedError; what has ended the nodes."""
        self._pressed_at = None
        try:
            self._is_reading = True
            if self._failure is not None:
                raise self._failure
            yield
        finally:
            self._is_reading = False

    @contextmanager
    def answering(self, stop: Callable[[], None]) -> Iterator[None]:
        """An answer is written, and `stop` ends it."""
        self._stop = stop
        try:
            if self._pressed_at is not None:
                stop()
            yield
        finally:
            if self._pressed_at is not None:
                self._deaf_until = now_s() + GRACE_S
            self._stop = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        now = now_s()
        if self._is_reading:
            line = self._typed()
            if self._failure is None and not line and now < self._deaf_until:
                return
            self._is_reading = False  # what is raised is not raised twice
            raise self._failure or LineInterruptedError(line)
        if self._failure is not None:
            return  # nobody pressed anything, and whoever reads the answer hears of it
        if self._pressed_at is None:
            self._pressed_at = now
            if self._stop is not None:
                self._stop()
        elif now - self._pressed_at > PATIENCE_S:
            raise KeyboardInterrupt

    def _look(self) -> None:
        """Wake whoever waits for a line: to hear a Ctrl-C, or that the nodes have ended."""
        while not self._ended.wait(WATCH_S):
            if self._failure is None:
                try:
                    self._check_alive()
                except SlipstreamError as error:
                    self._failure = error
            if self._is_reading and self._main is not None:
                number = WAKE if self._failure is None else signal.SIGINT
                signal.pthread_kill(self._main, number)


# -- answer ----------------------------------------------------------------------------------------


class Answer:
    """The one text of a request. Read its steps once."""

    def __init__(self, pair: Pair, request: Request) -> None:
        assert request.num_texts == 1
        self._pair = pair
        self._request = request
        # None: it is to be stopped. This queue, unlike others, may be given something by the
        # handler of a signal that interrupts whoever waits for it.
        self._news: queue.SimpleQueue[TokenStream | None] = queue.SimpleQueue()
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
