"""Where the text of an answer ends: the first stop string, across tokens and pieces (pure)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a text, and whether that is shown.

    strings     stop strings, none of them empty
    stop_ids    every token that ends the text, the model's end-of-text tokens included
    named_ids   those of them that were asked for, and are told as the reason
    is_shown    whether the text shows the stop string or stop token
    min_tokens  a stop string ends the text only if later tokens complete it
    """

    strings: tuple[str, ...] = ()
    stop_ids: Collection[int] = ()
    named_ids: Collection[int] = ()
    is_shown: bool = False
    min_tokens: int = 0


class StopStrings:
    """Passes a text on piece by piece, up to the first stop string.

    Text that may be the beginning of one is held back until it is known. The stop string that ends
    first counts, and of two that end together the longer: so what comes out does not depend on how
    the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str], *, is_shown: bool) -> None:
        assert all(strings), "an empty string is everywhere"
        self.found: str | None = None  # nothing is passed on any more once it is set
        self._strings = tuple(strings)
        self._is_shown = is_shown
        self._held = ""  # the longest end of the text that a stop string may begin with
        self._num_exempt = 0  # characters of _held in which no stop string may end

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What can be shown after `text`. Without `may_stop` no stop string ends in it."""
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        self._held += text
        if not may_stop:
            self._num_exempt = len(self._held)
        if ends := [(end, -len(stop), stop) for stop in self._strings if (end := self._end(stop))]:
            end, _, self.found = min(ends)
            return self._held[: end if self._is_shown else end - len(self.found)]
        return self._release(len(self._held) - self._num_open())

    def finish(self) -> str:
        """What was held back: no more text comes."""
        return "" if self.found is not None else self._release(len(self._held))

    def _end(self, stop: str) -> int:
        """Where `stop` first ends in what is held; 0: nowhere."""
        start = max(0, self._num_exempt + 1 - len(stop))
        return self._held.find(stop, start) + len(stop) if stop in self._held[start:] else 0

    def _num_open(self) -> int:
        """Length of the longest end of what is held that some stop string goes on from."""
        longest = max((len(stop) for stop in self._strings), default=0) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._strings):
                return size
        return 0

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._num_exempt = max(0, self._num_exempt - count)
        return text
