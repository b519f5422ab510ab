"""The text with its speculation in sight: which tokens were drafted, and what was rejected (pure).

                        in colour           in plain text (the marks of wdiff)
    accepted drafts                         text
      of the drafter    green
      n-grams           cyan
      earlier texts     yellow
      heads             magenta
    rejected drafts     red, struck out     [-text-]
    target's own        blue                {+text+}

A rejected newline or tab shows as a sign, so that the layout stays that of the text itself. In
plain text the marks end at every newline for the same reason.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from coordinator.text.detokenization import Decoder
from coordinator.text.origins import (
    EARLIER,
    HEADS,
    MODEL,
    NGRAM,
    TITLES,
    shown_rejected,
    source_names,
)
from coordinator.text.session import Emit

RESET = "\x1b[0m"
NEWLINE_SIGN, TAB_SIGN = "⏎", "⇥"


class Kind(Enum):
    """What became of a piece of text: its colour, and its marks without colour.

    An enumeration tells its members apart by their values; so do the colours of sources.
    """

    ACCEPTED = ("\x1b[32m", "", "")
    COPIED = ("\x1b[36m", "", "")
    REMEMBERED = ("\x1b[33m", "", "")
    FORESEEN = ("\x1b[35m", "", "")
    REJECTED = ("\x1b[31;9m", "[-", "-]")
    OWN = ("\x1b[94m", "{+", "+}")

    def __init__(self, colour: str, before: str, after: str) -> None:
        self.colour = colour
        self.before = before
        self.after = after


# Of accepted drafts, by source; those of a second drafter are a draft model's as well.
ACCEPTED = {
    MODEL: Kind.ACCEPTED,
    NGRAM: Kind.COPIED,
    EARLIER: Kind.REMEMBERED,
    HEADS: Kind.FORESEEN,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text of one kind."""

    kind: Kind
    text: str


class SpeculationView:
    """Shows a text pass by pass.

    What the text holds back (a beginning of a stop string, a part of a character) waits here too,
    and so does what comes behind it.
    """

    def __init__(self, decoder: Decoder, *, in_colour: bool) -> None:
        self._decoder = decoder
        self._in_colour = in_colour
        self._last = Kind.OWN  # of the last token: whose text the decoder holds back
        self._waiting: deque[Segment] = deque()

    def push(self, emit: Emit, text: str) -> str:
        """What a pass shows, given what it adds to the text."""
        self._waiting.extend(self._segments(emit))
        return self._rendered(self._released(len(text)))

    def finish(self, text: str) -> str:
        """What the end shows, given what was held back and belongs to the text."""
        self._waiting.append(Segment(self._last, self._decoder.finish()))
        return self._rendered(self._released(len(text)))

    def _released(self, room: int) -> list[Segment]:
        """The segments that wait, as far as the text has come: `room` characters more."""
        released = []
        while self._waiting:
            segment = self._waiting.popleft()
            if segment.kind is not Kind.REJECTED:
                released.append(replace(segment, text=segment.text[:room]))
                if len(segment.text) > room:
                    self._waiting.appendleft(replace(segment, text=segment.text[room:]))
                    break
                room -= len(segment.text)
            else:
                released.append(segment)
        return released

    def _segments(self, emit: Emit) -> list[Segment]:
        accepted = self._accepted(emit)
        rejected = self._decoder.preview(shown_rejected(emit))
        own = "".join(self._decoder.pieces(emit.tokens[emit.num_accepted :]))
        if len(emit.tokens) > emit.num_accepted:
            self._last = Kind.OWN
        elif accepted:
            self._last = accepted[-1].kind
        return [
            *accepted,
            Segment(Kind.REJECTED, visible(rejected)),
            Segment(Kind.OWN, own),
        ]

    def _accepted(self, emit: Emit) -> list[Segment]:
        """The accepted drafts, a segment for those of one source in a row."""
        names = source_names(emit.sources, emit.num_accepted)
        pieces = self._decoder.pieces(emit.tokens[: emit.num_accepted])
        kinds = [ACCEPTED.get(name, Kind.ACCEPTED) for name in names]
        runs = groupby(zip(kinds, pieces, strict=True), key=lambda pair: pair[0])
        return [Segment(kind, "".join(piece for _, piece in run)) for kind, run in runs]

    def _rendered(self, segments: list[Segment]) -> str:
        render = coloured if self._in_colour else marked
        return "".join(render(segment) for segment in segments if segment.text)


def coloured(segment: Segment) -> str:
    """A segment for a terminal. Colours end before a newline, lest a terminal fill the line."""
    return "\n".join(
        f"{segment.kind.colour}{line}{RESET}" if line else "" for line in segment.text.split("\n")
    )


def marked(segment: Segment) -> str:
    """A segment for a file: marks around every line, a sign for a newline that is marked."""
    kind = segment.kind
    if not kind.before:
        return segment.text
    *lines, last = segment.text.split("\n")
    shown = [f"{kind.before}{line}{NEWLINE_SIGN}{kind.after}\n" for line in lines]
    if last:
        shown.append(f"{kind.before}{last}{kind.after}")
    return "".join(shown)


def visible(text: str) -> str:
    """A text on one line: signs for newlines, tabs and other control characters."""
    signs = {"\n": NEWLINE_SIGN, "\t": TAB_SIGN}
    return "".join(
        signs.get(sign, sign if sign.isprintable() else "\N{MIDDLE DOT}") for sign in text
    )


def legend(*, in_colour: bool) -> str:
    """One line of at most 80 columns that explains the colours or marks."""
    words = [(Kind.REJECTED, "rejected draft"), (Kind.OWN, "the target's own")]
    if in_colour:
        sources = [coloured(Segment(kind, TITLES[name])) for name, kind in ACCEPTED.items()]
        others = [coloured(Segment(kind, text)) for kind, text in words]
        return "  ".join((f"accepted: {', '.join(sources)}", *others))
    words = [(Kind.ACCEPTED, "accepted draft"), *words]
    shown = [f"{marked(Segment(kind, text))}" for kind, text in words]
    return f"marks: {'  '.join(shown)}  ({NEWLINE_SIGN}: newline)"
