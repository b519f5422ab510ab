"""One text that is written once and read by several readers: also by those who come later.

The nodes' items of the text come in the service's thread. Each is noted in the journal, and told to
all readers. A reader that comes later first gets what has come before in one piece.
"""

import threading
from collections.abc import Callable
from functools import partial

from coordinator.journal.ledger import KeptText
from coordinator.journal.records import Came, Ended, Record, Scored
from coordinator.text.session_events import Emit, EmitPrompt, EmitRead
from coordinator.text.stream import Item, Reader, TokenStream, WrittenElsewhere
from coordinator.text.timed_session import Result
from proto.errors import ConfigurationError, SlipstreamError, TextError
from proto.messages import FinishReason

Note = Callable[[Record, Callable[[], None] | None], None]
# Starts a text behind tokens that it has already, for a reader.
Begin = Callable[[tuple[int, ...], Reader], TokenStream]

ERROR = "error"  # the finish reason of a text that could not be completed


class SharedText:
    """A text of an answer that is kept.

    name, number  id of the answer, and which of its texts this is
    kept          what it has so far; the text changes it
    note          notes a record in the journal, and then calls what it is given
    is_late       readers are told of tokens once they are on the disk: another run would not write
                  the same ones
    """

    def __init__(
        self,
        name: str,
        number: int,
        kept: KeptText,
        note: Note,
        check_alive: Callable[[], None],
        *,
        is_late: bool = False,
    ) -> None:
        self._name, self._number = name, number
        self._kept = kept
        self._note = note
        self._check_alive = check_alive
        self._is_late = is_late
        self._lock = threading.Lock()
        self._readers: list[TokenStream] = []
        self._result: Result | None = None
        self._num_noted = 0  # tokens that are on their way to the readers
        self._life = 0  # of the stream that writes; those of earlier ones are ignored
        self._live: TokenStream | None = None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens have been told."""
        return len(self._kept.tokens)

    def first(self, number: int) -> tuple[int, ...]:
        """Return the first tokens."""
        return tuple(self._kept.tokens[:number])

    @property
    def is_over(self) -> bool:
        """True if the text has ended."""
        return self._kept.end is not None

    # -- reading ----------------------------------------------------------------------------------

    def read(self, reader: Reader, num_told: int = 0) -> TokenStream:
        """Return a stream of what follows the first `num_told` tokens; these must have come."""
        stream = TokenStream(_nothing, _nothing, self._check_alive, reader)
        stream.cancel = partial(self._forget, stream)
        with self._lock:
            self._tell_all(stream, num_told)
        return stream

    def _tell_all(self, stream: TokenStream, num_told: int) -> None:
        """Give a new reader all that has come, and note it for what follows."""
        kept = self._kept
        if kept.scored is not None:
            stream.put(EmitPrompt(kept.scored))
        if (emit := kept.behind(num_told)) is not None:
            stream.put(emit)
        if kept.end is None:
            self._readers.append(stream)
        else:
            stream.put(self._last(kept.end))

    def _last(self, end: Ended) -> Item | SlipstreamError:
        """Return the last item of a reader that comes when the text has ended."""
        if end.reason == ERROR:
            return TextError(end.error)
        return self._result or WrittenElsewhere(FinishReason(end.reason))

    def _forget(self, stream: TokenStream) -> None:
        with self._lock:
            if stream in self._readers:
                self._readers.remove(stream)

    # -- writing ----------------------------------------------------------------------------------

    def write(self, begin: Begin, reader: Reader) -> TokenStream:
        """Go on writing the text, if it has not ended; return a stream of all of it.

        Cancelling that stream ends the writing; the text keeps its tokens. Raises what `begin`
        raises.
        """
        stream = self.read(reader)
        if self.is_over:
            return stream
        with self._lock:
            self._life += 1
            life, written = self._life, tuple(self._kept.tokens)
            self._num_noted = len(written)
        told = Reader(reader.since, partial(self._came, life), reader.name)
        try:
            live = begin(written, told)
        except SlipstreamError:
            self._forget(stream)
            raise
        self._live = live

        def cancel() -> None:
            self._forget(stream)
            with self._lock:
                self._life += 1
            live.cancel()

        stream.cancel, stream.stop = cancel, live.stop
        return stream

    def _came(self, life: int, live: TokenStream) -> None:
        """Note and tell the next item; called in the service's thread."""
        item: Item | SlipstreamError | None
        try:
            item = live.take(0)
        except SlipstreamError as error:
            item = error
        if item is None:
            return
        with self._lock:
            if life != self._life:
                return
            at = self._num_noted
            record = self._record_of(item, at)
            self._num_noted += len(item.tokens) if isinstance(item, Emit) else 0
        tell = partial(self._tell, life, at, item)
        if record is None:
            tell()
        elif self._is_late:
            self._note(record, tell)
        else:
            self._note(record, None)
            tell()

    def _record_of(self, item: Item | SlipstreamError, at: int) -> Record | None:
        match item:
            case Emit(tokens=tokens, logprobs=logprobs) if tokens:
                return Came(self._name, self._number, at, tokens, logprobs)
            case EmitPrompt(logprobs):
                return Scored(self._name, self._number, logprobs)
            case Result(reason=reason) | WrittenElsewhere(reason):
                return Ended(self._name, self._number, reason.value)
            case TextError():
                return Ended(self._name, self._number, ERROR, str(item))
        return None

    def _tell(self, life: int, at: int, item: Item | SlipstreamError) -> None:
        with self._lock:
            if life != self._life:
                return
            self._keep(at, item)
            for reader in self._readers:
                reader.put(item)
            if self.is_over or isinstance(item, SlipstreamError):
                self._readers.clear()

    def _keep(self, at: int, item: Item | SlipstreamError) -> None:
        kept = self._kept
        match item:
            case Emit(tokens=tokens, logprobs=logprobs):
                kept.add(at, tokens, logprobs)
            case EmitPrompt(logprobs):
                kept.scored = logprobs
            case EmitRead():
                pass
            case _:
                self._result = item if isinstance(item, Result) else None
                record = self._record_of(item, at)
                kept.end = record if isinstance(record, Ended) else None

    # -- without the nodes ------------------------------------------------------------------------

    def end(self, reason: FinishReason) -> None:
        """Note that the text is complete with the tokens that it has."""
        self._end(Ended(self._name, self._number, reason.value))

    def give_up(self, line: str) -> None:
        """Note that the text cannot be completed, and why."""
        self._end(Ended(self._name, self._number, ERROR, line))

    def _end(self, ended: Ended) -> None:
        self._note(ended, None)
        with self._lock:
            self._kept.end = ended

    def fail(self, error: SlipstreamError) -> None:
        """Tell all readers that an error has ended the writing; the text may go on later."""
        with self._lock:
            self._life += 1
            for reader in self._readers:
                reader.put(error)
            self._readers.clear()


def _nothing() -> None:
    """Do nothing: who reads a text cannot stop it."""


def check_told(num_told: int, text: SharedText) -> None:
    """Raise ConfigurationError if a complete text has fewer tokens than its reader says to have."""
    if text.is_over and num_told > text.num_tokens:
        raise ConfigurationError(
            f"the answer has {text.num_tokens} tokens, and the request says that {num_told} came"
        )
