"""Turns the tokens of an answer into text, piece by piece, as the answer reads after its prompt.

Theory of operation
-------------------
The text of an answer is what decoding prompt and answer together gives beyond the decoded prompt.
Decoded alone, an answer may differ: decoders of the sentencepiece kind remove the first space of
their input, and those of WordPiece put a space before every word but the first.

Decoding everything again for every token would cost more with each token, so only a window of the
last tokens is decoded. The result is the same as long as only the beginning of the window can
decode differently from the whole text. Therefore:

    the window begins outside of a run of byte tokens (`<0xF0>`), or with a character in a run that
    is valid, because one invalid byte turns a whole run into U+FFFD
    the window begins with some text, so that a removed first space is not one of the new tokens'
    how much text has been returned is known as a prefix of the window's own text (`_told`)

A text that ends with U+FFFD is held back if the bytes of its last tokens are the beginning of a
character. A character has at most four bytes, and a token at least one, so that at most three
tokens wait.

Text that was returned is never returned again. Where later tokens change it (an invalid byte after
valid ones of one run), the tokens that have not been returned are decoded alone. For the same
reason transformers' rewriting of complete texts (`clean_up_tokenization_spaces`, off unless a model
asks for it) is not done. Where a prompt ends within a character that the answer completes, the
answer begins with that character.

Where a token begins in the text (`Piece.begin`) is known when the token comes, although its own
text may come later: it begins behind the text of the tokens before it. If these end within a
character that the token's first byte continues, it begins where that character does.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from tokenizers import Tokenizer

# -- detokenization --------------------------------------------------------------------------------

REPLACEMENT = "\ufffd"  # what invalid bytes are decoded to
MAX_WAITING = 3  # most tokens, and bytes, that are held back as an incomplete character
TAIL = 8  # tokens that a window keeps at least: a cut character, some text, and what is held back
WINDOW = 2 * TAIL  # the window is cut each time that it has grown to a multiple of this length
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token adds to a text.

    text   the text that is complete with the token; '' while a character is incomplete
    begin  where the token begins in the text, in characters; a token that begins within a character
           begins where that character does
    """

    text: str
    begin: int


class Decoder(Protocol):
    """Turns tokens that come one after another into text; `TextStream` and `IdStream` do."""

    def placed(self, tokens: Sequence[int]) -> list[Piece]:
        """Return the text that each of these tokens adds, and where each begins."""

    @property
    def end(self) -> int:
        """Return the length of the text so far in characters, with the text that is held back."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each of these tokens adds; '' while a character is incomplete."""

    def preview(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens would add now; the state does not change."""

    def finish(self) -> str:
        """Return the text that was held back, as it is: no more tokens come."""

    def single(self, token: int) -> str:
        """Return the text of one token as it reads after another token; special tokens by name."""


class TextStream:
    """Decodes an answer's tokens piece by piece; holds back a character until all its bytes came.

    special_tokens  the names of the special tokens by id
    prompt          the tokens before the answer, which decide how its first tokens read
    bytes_of        gives the bytes of a token; None: it is no part of a character
    skips_special   special tokens are left out of the text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: Mapping[int, str],
        prompt: Sequence[int],
        bytes_of: Callable[[int], bytes | None],
        *,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._bytes_of = bytes_of
        self._num_told = 0  # characters that were returned
        self._skips_special = skips_special
        self._window = self._end_of(prompt)  # the last tokens that are text
        whole = self._whole(self._window)
        self._told = self._text(whole)  # the beginning of the window's text that was returned
        self._num_waiting = len(self._window) - len(whole)  # tokens whose text was not yet
        self._prompt = self._text(self._window)  # the prompt's end; empty once `_told` covers it

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each of these tokens adds; '' while a character is incomplete."""
        return [self._step(token) if self._is_text(token) else "" for token in tokens]

    def placed(self, tokens: Sequence[int]) -> list[Piece]:
        """Return the text that each of these tokens adds, and where each begins."""
        placed = []
        for token in tokens:
            is_text = self._is_text(token)
            begin = self._begin(token if is_text else None)
            placed.append(Piece(self._step(token) if is_text else "", begin))
        return placed

    @property
    def end(self) -> int:
        """Return the length of the text so far in characters, with the text that is held back."""
        return self._num_told + len(self._untold())

    def preview(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens would add if they came now, special tokens by name."""
        stream = copy(self)
        stream._window = self._window.copy()
        text = ""
        for token in tokens:
            text += self._hidden(token) or "".join(stream.pieces([token]))
        return text + stream.finish() if any(map(self._is_text, tokens)) else text

    def finish(self) -> str:
        """Release and return the text that was held back, as it is: no more tokens come."""
        return self._tell(self._text(self._window))

    def single(self, token: int) -> str:
        """Return the text of one token as it reads after another token; special tokens by name."""
        if token in self._special_tokens:
            return self._special_tokens[token]
        once, twice = self._text([token]), self._text([token, token])
        return twice[len(once) :] if twice.startswith(once) else once

    def _step(self, token: int) -> str:
        self._window.append(token)
        self._num_waiting += 1
        text = self._text(self._window)
        if not self._is_whole(self._window, text):
            return ""
        told = self._tell(text)
        if len(self._window) % WINDOW == 0 and not self._prompt:
            self._cut()
        return told

    def _begin(self, token: int | None) -> int:
        """Return where the next token begins in the text; None: a token that is left out of it."""
        if not self._num_waiting:
            return self._num_told
        untold = self._untold()
        cut = _cut_character(self._said(self._window))
        said = b"" if token is None else self._bytes_of(token)
        if cut and said is not None and (not said or _continues(cut, said[0])):
            num_signs = len(cut) if self._is_byte(self._window[-1]) else 1
            untold = untold[:-num_signs]
        return self._num_told + len(untold)

    def _untold(self) -> str:
        """Return the text that is held back, as it would be if no more tokens came."""
        text = self._text(self._window)
        num_alike = _num_alike(text, self._prompt)
        if num_alike <= len(self._told) and self._is_changed(text):
            return self._text(self._window[-self._num_waiting :])
        return text[max(num_alike, len(self._told)) :]

    def _tell(self, text: str) -> str:
        """Return the part of the window's text that is new; note that nothing waits any more."""
        num_alike = _num_alike(text, self._prompt)
        if num_alike > len(self._told):
            self._told = text[:num_alike]
        elif self._is_changed(text):
            self._window = self._window[-self._num_waiting :]
            self._told = ""
            text = self._text(self._window)
        self._prompt = ""
        new = text[len(self._told) :]
        self._told = text
        self._num_told += len(new)
        self._num_waiting = 0
        return new

    def _is_changed(self, text: str) -> bool:
        """True if later tokens changed text that was returned: a bad byte changes its whole run."""
        if not text.startswith(self._told):
            return True
        if REPLACEMENT not in text[len(self._told) :]:
            return False
        # Signs of replacement may look like the text that was returned, so bytes are compared.
        begin = len(self._window) - self._num_waiting
        before = list(takewhile(self._is_byte, reversed(self._window[:begin])))
        run = self._joined(before[::-1])
        more = self._joined(takewhile(self._is_byte, self._window[begin:]))
        return bool(run and more) and _is_valid(run) and not _is_valid(run + more)

    def _cut(self) -> None:
        """Drop the beginning of the window."""
        num_untold = len(self._text(self._window)) - len(self._told)
        self._window = self._window[self._beginning(self._window) :]
        text = self._text(self._window)
        self._told = text[: len(text) - num_untold]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last text tokens of a prompt, with which the window begins."""
        size = WINDOW
        while True:
            last = [token for token in prompt[-size:] if self._is_text(token)]
            begin = self._beginning(last)
            if begin > 0 or size >= len(prompt):
                return last[begin:]
            size *= 2

    def _beginning(self, tokens: Sequence[int]) -> int:
        """Return the last index from which the tokens decode alone as before; else 0."""
        whole = self._whole(tokens)
        text = self._text(whole)
        last = len(tokens) - TAIL
        for begin in range(last, 0, -1):
            is_byte = self._is_byte(tokens[begin])
            if is_byte and last - begin > MAX_WAITING:
                continue  # too far from the end: an unfinished character cannot be this long
            tail = self._text(whole[begin:])
            if tail and (not is_byte or (REPLACEMENT not in tail and text.endswith(tail))):
                return begin
        return 0

    def _whole(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens without those at the end that may be an incomplete character."""
        for num_waiting in range(MAX_WAITING + 1):
            whole = tokens[: max(0, len(tokens) - num_waiting)]
            if self._is_whole(whole, self._text(whole)):
                break
        return whole

    def _is_whole(self, tokens: Sequence[int], text: str) -> bool:
        """True if no character is incomplete at the end of the tokens, whose text is `text`."""
        return not text.endswith(REPLACEMENT) or not _cut_character(self._said(tokens))

    def _said(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the last tokens, as many as may wait."""
        return self._joined(tokens[-MAX_WAITING:])

    def _joined(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self._bytes_of(token) or b"" for token in tokens)

    def _is_text(self, token: int) -> bool:
        """True if the token is part of the text; the last ids of a model may stand for no token."""
        return not self._hidden(token) and self._tokenizer.id_to_token(token) is not None

    def _hidden(self, token: int) -> str:
        """Return the name of a special token that is left out of the text; "" for other tokens."""
        return self._special_tokens.get(token, "") if self._skips_special else ""

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def _text(self, tokens: Sequence[int]) -> str:
        # Special tokens that are left out of the text never come here.
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _is_valid(said: bytes) -> bool:
    """True if the bytes are whole characters."""
    try:
        said.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut_character(said: bytes) -> bytes:
    """Return the bytes at the end that may be the beginning of a character; b"": there are none."""
    for size in range(1, min(MAX_WAITING, len(said)) + 1):
        try:
            said[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return said[-size:]
    return b""


def _continues(cut: bytes, byte: int) -> bool:
    """True if the byte can follow `cut`, which begins a character."""
    try:
        (cut + bytes((byte,))).decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return True


def _num_alike(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class IdStream:
    """Decoder for a model without a tokenizer: its text is the token ids, `5,6,7`."""

    def __init__(self) -> None:
        self._num_told = 0  # characters of the text so far

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return each id as text, with a comma before all but the first of the answer."""
        pieces = [f",{token}" for token in tokens]
        if pieces and self._num_told == 0:
            pieces[0] = pieces[0].removeprefix(",")
        self._num_told += sum(map(len, pieces))
        return pieces

    def placed(self, tokens: Sequence[int]) -> list[Piece]:
        """Return each id as text, and where it begins."""
        placed = []
        for token in tokens:
            begin = self._num_told
            placed.append(Piece("".join(self.pieces([token])), begin))
        return placed

    @property
    def end(self) -> int:
        """Return the length of the text so far in characters."""
        return self._num_told

    def preview(self, tokens: Sequence[int]) -> str:
        """Return the ids as text, as if they came now; the state does not change."""
        return "".join(deepcopy(self).pieces(tokens))

    def finish(self) -> str:
        """Return "": no text is ever held back."""
        return ""

    def single(self, token: int) -> str:
        """Return the token id as text, in decimal."""
        return str(token)


# -- stops -----------------------------------------------------------------------------------------

# Finds where an answer ends: at the first stop string, which may extend over tokens and pieces.


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a text ends (stop strings and stop tokens), and whether that part is shown.

    strings     stop strings, none of them empty
    stop_ids    every token that ends the text, the model's end-of-text tokens included
    named_ids   the stop ids that the user gave; they are reported as the reason for the end
    is_shown    the text shows the stop string or stop token that ended it
    min_tokens  stop strings that are complete within this many tokens are ignored
    """

    strings: tuple[str, ...] = ()
    stop_ids: Collection[int] = ()
    named_ids: Collection[int] = ()
    is_shown: bool = False
    min_tokens: int = 0


class StopStrings:
    """Passes text on piece by piece, up to the first stop string.

    Text that may be the beginning of a stop string is held back until that is known. The stop
    string that ends first counts, and of two that end together the longer one: so the result does
    not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str], *, is_shown: bool) -> None:
        assert all(strings), "an empty string is everywhere"
        self.found: str | None = None  # the stop string; once it is set, no text is passed on
        self._strings = tuple(strings)
        self._is_shown = is_shown
        self._held = ""  # the longest end of the text that a stop string may begin with
        self._num_exempt = 0  # characters of _held in which no stop string may end

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add `text`; return the text that can be shown now.

        may_stop  False: no stop string ends in `text`
        """
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
        """Return the text that was held back: no more text comes."""
        return "" if self.found is not None else self._release(len(self._held))

    def _end(self, stop: str) -> int:
        """Return where `stop` first ends in the text that is held; 0 if it does not."""
        start = max(0, self._num_exempt + 1 - len(stop))
        return self._held.find(stop, start) + len(stop) if stop in self._held[start:] else 0

    def _num_open(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string, or 0."""
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
