"""What a streamed text tells of its speculation, if it was asked for: tokens and spans (pure)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.text.metrics import origins
from coordinator.text.session_events import Emit
from coordinator.text.watching import DeviceSpan


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of a text with its part of the text, its origin, and what was rejected there.

    token_id  None: text that a decoder held back until the end, after the last token
    origin    as in `CompletionOutput.token_origins`
    rejected  the drafts that the target rejected in the place of this token, as text
    """

    token_id: int | None
    text: str
    origin: str
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationPart:
    """What one output tells of the speculation: its tokens and what both devices did meanwhile.

    tokens  those whose text is complete with this output; over all outputs each token comes once,
            and their texts together are the text
    spans   that ended since the output before, in the order in which their messages came
    """

    tokens: tuple[ShownToken, ...] = ()
    spans: tuple[DeviceSpan, ...] = ()


class TokenTexts:
    """Gives each token its part of a text of which the end may be held back (stop strings)."""

    def __init__(self) -> None:
        self._waiting: deque[ShownToken] = deque()  # not returned yet, in the order of the text
        self._room = 0  # characters of the text that were shown and belong to no returned token
        self._last = "plain"  # origin of the text's last token

    def push(self, emit: Emit, pieces: Sequence[str], rejected: str, text: str) -> SpeculationPart:
        """Add a pass; return what the output tells that shows `text`.

        pieces    the text that each token adds
        rejected  the rejected drafts, which stood in the place of the first token of the target's
        """
        names = origins(emit)
        rows = zip(emit.tokens, pieces, names, strict=True)
        for place, (token, piece, name) in enumerate(rows):
            before = rejected if place == emit.num_accepted else ""
            self._waiting.append(ShownToken(token, piece, name, before))
        self._last = names[-1] if names else self._last
        self._room += len(text)
        shown: list[ShownToken] = []
        while self._waiting and len(self._waiting[0].text) <= self._room:
            shown.append(self._waiting.popleft())
            self._room -= len(shown[-1].text)
        return SpeculationPart(tuple(shown), emit.spans)

    def finish(self, text: str) -> SpeculationPart:
        """Return what the last output tells, which shows `text`: all that is left, cut to it."""
        self._room += len(text)
        shown: list[ShownToken] = []
        for token in self._waiting:
            part = token.text[: self._room]
            self._room -= len(part)
            shown.append(replace(token, text=part))
        self._waiting.clear()
        if self._room:
            shown.append(ShownToken(None, text[len(text) - self._room :], self._last))
        return SpeculationPart(tuple(shown))
