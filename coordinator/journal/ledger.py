"""What the journal's file must say, and when it is written anew (pure).

Theory of operation
-------------------
The ledger knows every answer that is kept. It is told records and returns what to do with the file:

    note(record)     Append, and Compact where most of the file is about answers that are gone
    failed(now)      the file could not be written: nothing is appended for a while
    tick(now)        Compact, once it is time to try again: the new file has all that was missed
    replay(records)  what a file says, after a restart

Compact replaces the whole file by the head and one record for what each text has so far. So the
file is never larger than twice what it must say, and `least_bytes`. An answer that would make that
more than `most_bytes` is not noted (`has_room`), nor is anything that is said of it later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.journal.records import (
    Asked,
    Came,
    Ended,
    Gone,
    Head,
    Ran,
    Record,
    Scored,
    TakenUp,
    head_line,
    line_of,
)
from coordinator.text.session_events import Emit
from proto.messages import Logprobs

LEAST_BYTES = 1 << 20
AGAIN_S = 10.0  # after a failure, until the file is written again
MOST_STARTS = 3  # an answer that brings nothing new after so many restarts may be what breaks all


@dataclass(slots=True)
class KeptText:
    """What a text of an answer has so far.

    logprobs  of the last tokens; those before have none where they were written elsewhere
    scored    the log-probabilities of its prompt, if they are wanted
    end       why it has ended; None: it has not
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scored: Logprobs | None = None
    end: Ended | None = None

    def add(self, at: int, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Put tokens behind the first `at`."""
        if at < len(self.tokens):
            probs = self.probs()
            if probs is not None:
                num_left = len(probs) - (len(self.tokens) - at)
                self.logprobs = [probs.part(0, max(0, num_left))]
            del self.tokens[at:]
        self.tokens += tokens
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def behind(self, num_told: int) -> Emit | None:
        """Return in one piece what follows the first `num_told` tokens; None: nothing does."""
        probs = self.probs()
        if probs is not None:
            # Tokens that were written elsewhere have none, and their reader has them.
            num_told = max(num_told, len(self.tokens) - len(probs))
            probs = probs.part(num_told - len(self.tokens) + len(probs), len(probs))
        if num_told >= len(self.tokens):
            return None
        return Emit(tuple(self.tokens[num_told:]), 0, 0, (), probs)

    def probs(self) -> Logprobs | None:
        """Return the log-probabilities in one piece."""
        if len(self.logprobs) > 1:
            parts = self.logprobs
            ids = tuple(one for part in parts for one in part.ids)
            values = tuple(one for part in parts for one in part.values)
            ranks = tuple(one for part in parts for one in part.ranks)
            self.logprobs = [Logprobs(ids, values, ranks)]
        return self.logprobs[0] if self.logprobs else None


@dataclass(slots=True)
class KeptAnswer:
    """An answer and its texts.

    is_running  it was written when the last record came
    num_starts  how often a restarted coordinator has gone on with it since its last token
    num_bytes   of its records in the file
    """

    asked: Asked
    texts: list[KeptText]
    is_running: bool = True
    num_starts: int = 0
    num_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        """True if all texts have ended."""
        return all(text.end is not None for text in self.texts)

    @property
    def is_given_up(self) -> bool:
        """True if it may be what ends the coordinator again and again."""
        return self.num_starts >= MOST_STARTS

    def records(self) -> Iterable[Record]:
        """Return the records that say all of it."""
        name = self.asked.name
        yield self.asked
        for number, text in enumerate(self.texts):
            if text.scored is not None:
                yield Scored(name, number, text.scored)
            probs = text.probs()
            num_bare = len(text.tokens) - (0 if probs is None else len(probs))
            if num_bare:
                yield Came(name, number, 0, tuple(text.tokens[:num_bare]))
            if probs is not None and len(probs):
                yield Came(name, number, num_bare, tuple(text.tokens[num_bare:]), probs)
            if text.end is not None:
                yield text.end
        if not self.is_running:
            yield Ran(name, is_running=False)
        for _ in range(self.num_starts):
            yield TakenUp(name)


@dataclass(frozen=True, slots=True)
class Append:
    """Write this behind the end of the file."""

    line: bytes


@dataclass(frozen=True, slots=True)
class Compact:
    """Replace the file by one that holds this."""

    content: bytes


Action = Append | Compact


class Ledger:
    """The answers that are kept; a state machine from records to what is done with the file.

    most_bytes   that the file needs; what would make it more is not noted
    least_bytes  a file that is not larger is not compacted
    """

    def __init__(self, head: Head, most_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self.answers: dict[str, KeptAnswer] = {}  # by name, oldest first
        self._head = head
        self._most, self._least = most_bytes, least_bytes
        self._file_bytes = 0
        self._live_bytes = 0  # that the answers need of it
        self._broken_until: float | None = None  # None: the file can be written

    @property
    def is_broken(self) -> bool:
        """True if the file could not be written, and is not appended to."""
        return self._broken_until is not None

    def has_room(self, asked: Asked) -> bool:
        """True if an answer will be noted."""
        return self._live_bytes + len(line_of(asked)) <= self._most

    def note(self, record: Record) -> list[Action]:
        """Note a record; return what to do with the file."""
        line = line_of(record)
        if isinstance(record, Asked):
            if not self.has_room(record):
                return []
        elif record.name not in self.answers:
            return []
        if isinstance(record, Gone):
            self._live_bytes -= self.answers[record.name].num_bytes
        _apply(self.answers, record)
        if (answer := self.answers.get(record.name)) is not None:
            answer.num_bytes += len(line)
            self._live_bytes += len(line)
        if self.is_broken:
            return []
        self._file_bytes += len(line)
        if self._file_bytes > max(self._least, 2 * self._live_bytes):
            return [self.compact()]
        return [Append(line)]

    def compact(self) -> Compact:
        """Return the whole file, as short as it can be."""
        parts = [head_line(self._head)]
        for answer in self.answers.values():
            lines = [line_of(record) for record in answer.records()]
            answer.num_bytes = sum(map(len, lines))
            parts += lines
        content = b"".join(parts)
        self._file_bytes = len(content)
        self._live_bytes = sum(one.num_bytes for one in self.answers.values())
        self._broken_until = None
        return Compact(content)

    def failed(self, now: float) -> None:
        """Note that the file could not be written."""
        self._broken_until = now + AGAIN_S

    def tick(self, now: float) -> list[Action]:
        """Return what to do with the file because time has passed."""
        if self._broken_until is not None and now >= self._broken_until:
            return [self.compact()]
        return []

    def replay(self, records: Iterable[Record]) -> None:
        """Take over what a file says. Records of answers that are not known are ignored."""
        for record in records:
            if isinstance(record, Asked) or record.name in self.answers:
                _apply(self.answers, record)


def _apply(answers: dict[str, KeptAnswer], record: Record) -> None:
    """Change the answers as a record says; texts that an answer does not have are ignored."""
    if isinstance(record, Asked):
        answers[record.name] = KeptAnswer(record, [KeptText() for _ in range(record.num_texts)])
        return
    answer = answers[record.name]
    match record:
        case Ran(is_running=is_running):
            answer.is_running = is_running
        case TakenUp():
            answer.num_starts += 1
        case Gone(name):
            del answers[name]
        case Came() | Scored() | Ended() if record.text < len(answer.texts):
            _apply_to_text(answer, answer.texts[record.text], record)


def _apply_to_text(answer: KeptAnswer, text: KeptText, record: Came | Scored | Ended) -> None:
    match record:
        case Came(at=at, tokens=tokens, logprobs=logprobs):
            text.add(at, tokens, logprobs)
            answer.num_starts = 0
        case Scored(logprobs=logprobs):
            text.scored = logprobs
        case Ended():
            text.end = record
