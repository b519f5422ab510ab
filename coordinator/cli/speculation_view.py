"""Shows a text with its speculation: which tokens were drafted, and what was rejected (pure).

                        in colour           in plain text (the marks of wdiff)
    accepted drafts                         text
      of the drafter    green
      n-grams           cyan
      earlier texts     yellow
      heads             magenta
    rejected drafts     red, struck out     [-text-]
    target's own        blue                {+text+}
    between passes      │ (not at the ends of lines)

A rejected newline or tab is shown as a sign, so that the layout stays that of the text itself. In
plain text the marks end at every newline for the same reason. Neighbouring tokens of the target
share one pair of marks, also across passes; it closes before another kind of text and at the end.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Protocol

from coordinator.cli.harmless import harmless
from coordinator.text.detokenization import Decoder
from coordinator.text.metrics import (
    EARLIER,
    HEADS,
    MODEL,
    NGRAM,
    TITLES,
    shown_rejected,
    source_names,
)
from coordinator.text.session_events import Emit

RESET = "\x1b[0m"
NEWLINE_SIGN, TAB_SIGN = "⏎", "⇥"
PASS_SIGN = "│"


class Kind(Enum):
    """What became of a piece of text: its colour, and the marks around it without colour.

    Members of an enumeration need different values; here the colours differ.
    """

    ACCEPTED = ("\x1b[32m", "", "")
    COPIED = ("\x1b[36m", "", "")
    REMEMBERED = ("\x1b[33m", "", "")
    FORESEEN = ("\x1b[35m", "", "")
    REJECTED = ("\x1b[31;9m", "[-", "-]")
    OWN = ("\x1b[94m", "{+", "+}")
    BOUNDARY = ("\x1b[2m", "", "")  # between two passes

    def __init__(self, colour: str, before: str, after: str) -> None:
        self.colour = colour
        self.before = before
        self.after = after


BESIDES = (Kind.REJECTED, Kind.BOUNDARY)  # kinds that are shown but are no part of the text
# The kind of accepted drafts, by source; a second drafter has the kind of the first.
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
    """Shows a text pass by pass, with colours or marks for what became of the drafts.

    Text that is held back (the beginning of a stop string, a part of a character) waits here too,
    and so does all that comes after it.
    """

    def __init__(self, decoder: Decoder, *, in_colour: bool, on_terminal: bool = False) -> None:
        self._decoder = decoder
        self._on_terminal = on_terminal or in_colour  # else the text stays as it is
        self._pen: Pen = ColourPen() if in_colour else MarkPen()
        self._last = Kind.OWN  # the kind of the last token, which the decoder may hold back
        self._waiting: deque[Segment] = deque()

    def push(self, emit: Emit, text: str) -> str:
        """Add a pass; return what to show now that it adds `text` to the text."""
        self._waiting.append(Segment(Kind.BOUNDARY, PASS_SIGN))
        self._waiting.extend(self._segments(emit))
        return self._drawn(len(text))

    def finish(self, text: str) -> str:
        """Add held-back `text` that belongs to the text; return what to show at the end."""
        self._waiting.append(Segment(self._last, self._decoder.finish()))
        return self._drawn(len(text)) + self.close()

    def close(self) -> str:
        """End the current mark; return the closing mark that the text needs where it breaks off."""
        return self._pen.close()

    def _drawn(self, room: int) -> str:
        segments = [segment for segment in self._released(room) if segment.text]
        if self._on_terminal:
            segments = [replace(one, text=harmless(one.text)) for one in segments]
        return "".join(map(self._pen.draw, segments))

    def _released(self, room: int) -> list[Segment]:
        """Take and return the waiting segments that the text's next `room` characters cover."""
        released = []
        while self._waiting:
            segment = self._waiting.popleft()
            if segment.kind not in BESIDES:
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
        """Return the accepted drafts as segments, one for each run of tokens of one source."""
        names = source_names(emit.sources, emit.num_accepted)
        pieces = self._decoder.pieces(emit.tokens[: emit.num_accepted])
        kinds = [ACCEPTED.get(name, Kind.ACCEPTED) for name in names]
        runs = groupby(zip(kinds, pieces, strict=True), key=lambda pair: pair[0])
        return [Segment(kind, "".join(piece for _, piece in run)) for kind, run in runs]


class Pen(Protocol):
    """Draws segments one after another, in colour or with marks."""

    def draw(self, segment: Segment) -> str:
        """Return a segment as it is shown; its text is not empty."""

    def close(self) -> str:
        """Return what is shown at the end of the text."""


@dataclass(slots=True)
class ColourPen:
    """Draws in colour for a terminal. A colour ends before a newline, or it might fill the line."""

    _pending: str = ""  # the sign between passes, until text follows in the same line
    _is_in_line: bool = False

    def draw(self, segment: Segment) -> str:
        """Return the segment in colour, after the pass sign if one is due; "" for a new pass."""
        drawn = coloured(segment)
        if segment.kind is Kind.BOUNDARY:
            self._pending = drawn if self._is_in_line else ""
            return ""
        if not segment.text.startswith("\n"):
            drawn = self._pending + drawn
        self._pending = ""
        self._is_in_line = not segment.text.endswith("\n")
        return drawn

    def close(self) -> str:
        """Return "": every colour has ended already."""
        return ""


@dataclass(slots=True)
class MarkPen:
    """Draws with marks for a file: marks end at each line, and a marked newline gets a sign."""

    _open: Kind = field(default=Kind.ACCEPTED)  # the kind whose mark is open; ACCEPTED has none

    def draw(self, segment: Segment) -> str:
        """Return the segment with marks, except those that it shares with its neighbours."""
        if segment.kind is Kind.BOUNDARY:
            return ""
        *lines, last = segment.text.split("\n")
        sign = NEWLINE_SIGN if segment.kind.before else ""
        drawn = "".join(f"{self._turn(segment.kind)}{line}{sign}{self.close()}\n" for line in lines)
        drawn += self._turn(segment.kind) + last if last else ""
        # Close here: drafts of two passes that were rejected at one place are not one draft.
        return drawn + (self.close() if segment.kind is Kind.REJECTED else "")

    def close(self) -> str:
        """Return the closing mark of what is open."""
        return self._turn(Kind.ACCEPTED)

    def _turn(self, kind: Kind) -> str:
        """Return the marks between the last piece of text and one of this kind."""
        if kind is self._open or not (kind.before or self._open.before):
            return ""
        closing, self._open = self._open.after, kind
        return closing + kind.before


def coloured(segment: Segment) -> str:
    """Return a segment in its colour, for a terminal."""
    return "\n".join(
        f"{segment.kind.colour}{line}{RESET}" if line else "" for line in segment.text.split("\n")
    )


def visible(text: str) -> str:
    """Return a text on one line, with signs for newlines, tabs and other control characters."""
    signs = {"\n": NEWLINE_SIGN, "\t": TAB_SIGN}
    return "".join(
        signs.get(sign, sign if sign.isprintable() else "\N{MIDDLE DOT}") for sign in text
    )


def legend(*, in_colour: bool, drafter_only: bool = False) -> str:
    """Return one line of at most 80 columns that explains the colours or marks.

    drafter_only  explain only the drafter's colour for accepted drafts: no other source drafts
    """
    if not in_colour:
        words = {Kind.ACCEPTED: "accepted draft", Kind.REJECTED: "rejected draft"}
        words |= {Kind.OWN: "the target's own"}
        shown = [f"{kind.before}{text}{kind.after}" for kind, text in words.items()]
        return f"marks: {'  '.join(shown)}  ({NEWLINE_SIGN}: newline)"
    sources = [coloured(Segment(kind, TITLES[name])) for name, kind in ACCEPTED.items()]
    accepted = coloured(Segment(Kind.ACCEPTED, "accepted draft"))
    return "  ".join(
        (
            accepted if drafter_only else f"accepted: {', '.join(sources)}",
            coloured(Segment(Kind.REJECTED, "rejected draft")),
            coloured(Segment(Kind.OWN, "target's")),
            f"{coloured(Segment(Kind.BOUNDARY, PASS_SIGN))} pass",
        )
    )
