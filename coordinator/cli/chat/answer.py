"""One answer of a conversation, which the user may stop; the text written until then is kept."""

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
# One Ctrl-C never ends the program, and it interrupts nothing else: at other times it takes effect
# when the next answer or line begins. Users often press it several times to stop an answer, so for
# a second after such an answer Ctrl-C on an empty line does nothing. If the nodes die while a line
# is typed, that is noticed as well.
#
# Python calls a signal handler only when C code lets it. `input` does so when a signal interrupts
# its wait for a key, but not for a signal that came just before, for example while it showed the
# prompt: a quick Ctrl-C had an effect only at the next key. So a thread interrupts that wait
# regularly with a signal that has no other effect (WAKE).

WATCH_S = 0.25
WAKE = signal.SIGURG  # ignored by default, so it does no harm if it comes late
GRACE_S = 1.0
now_s = time.monotonic
PATIENCE_S = 3.0  # if an answer goes on for this long after Ctrl-C, the next one ends the program


class LineInterruptedError(Exception):
    """Raised by Ctrl-C while a line was typed.

    line  the part of the line that had been typed
    """

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


class Interrupts:
    """Handles Ctrl-C inside its `with` block, in the main thread.

    check_alive  raises a SlipstreamError when the nodes cannot work any more
    typed        returns the part that has been typed of the line that is being read
    """

    def __init__(self, check_alive: Callable[[], None], typed: Callable[[], str]) -> None:
        self._typed = typed
        self._check_alive = check_alive
        self._failure: SlipstreamError | None = None  # the error that check_alive has raised
        self._is_reading = False
        self._stop: Callable[[], None] | None = None  # stops the answer that is being written
        self._pressed_at: float | None = None  # the first Ctrl-C during or before this answer
        self._deaf_until = float("-inf")  # until then Ctrl-C on an empty line does nothing
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
        """While inside, a line is read, and Ctrl-C raises LineInterruptedError.

        Also raises the error that has ended the nodes.
        """
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
        """While inside, an answer is written, and Ctrl-C calls `stop` to end it."""
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
            self._is_reading = False  # so that it is raised only once
            raise self._failure or LineInterruptedError(line)
        if self._failure is not None:
            return  # sent by `_look`; the reader of the answer gets the error itself
        if self._pressed_at is None:
            self._pressed_at = now
            if self._stop is not None:
                self._stop()
        elif now - self._pressed_at > PATIENCE_S:
            raise KeyboardInterrupt

    def _look(self) -> None:
        """Wake the wait for a line regularly, so that Ctrl-C and dead nodes are noticed."""
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
    """The one text of a request, which can be stopped. Read its steps once."""

    def __init__(self, pair: Pair, request: Request) -> None:
        assert request.num_texts == 1
        self._pair = pair
        self._request = request
        # None means stop. Unlike other queues, a SimpleQueue may be filled by a signal handler that
        # interrupts the thread which waits for it.
        self._news: queue.SimpleQueue[TokenStream | None] = queue.SimpleQueue()
        self._num_tokens = 0  # tokens that were read
        self._was_stopped = False

    @property
    def is_complete(self) -> bool:
        """True once the text has ended, by itself or by `stop`. Then it has metrics."""
        return self._request.is_complete

    @property
    def was_stopped(self) -> bool:
        """True if `stop` has ended the text."""
        return self._was_stopped

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the answer has so far."""
        return self._num_tokens

    def stop(self) -> None:
        """End the text where it is; may be called from any thread or a signal handler."""
        self._news.put(None)

    def steps(self) -> Generator[Step, None, None]:
        """Yield the steps as they come. Leaving early ends the text on both nodes.

        If it is stopped before its first token, there is no last step. Raises the error that ended
        the text.

        Raises SlipstreamError if the text or the pair has ended with an error.
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
