"""Tokens into the text of an answer, piece by piece, as it reads behind its prompt.

Theory of operation
-------------------
The text of an answer is what decoding prompt and answer together says beyond decoding the prompt.
By itself an answer may read otherwise: decoders of the sentencepiece kind take the first space of
whatever they are given, those of WordPiece put one before every word but the first.

Decoding everything for every token would cost ever more, so a window of the last tokens stands for
it. Nothing is lost by that if only the beginning of the window reads otherwise than in the whole:

    it begins outside of a run of byte tokens (`<0xF0>`), or with a character in a good one, because
    one bad byte spoils a whole run
    it begins with some text, so that the space that is taken is not one of the new tokens' own
    how far the text has been told is known as a beginning of the window's own text

A text that ends with U+FFFD may end within a character, and waits. No character has more than four
bytes, and no token less than one: what has waited for longer than three tokens is no character.

What has been told is never told again. Where later tokens change it (a bad byte behind good ones of
one run) those that have not been told are read by themselves; and so transformers' rewriting of
complete texts (`clean_up_tokenization_spaces`, off unless a model asks for it) is not done. Where a
prompt ends within a character that the answer completes, the answer begins with that character.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from tokenizers import Tokenizer

# -- detokenization --------------------------------------------------------------------------------

REPLACEMENT = "\ufffd"  # what bytes that are no character are shown as
MAX_WAITING = 3  # tokens of which a character may still lack its end
TAIL = 8  # tokens that a window keeps at least: a cut character, some text, and what waits
WINDOW = 2 * TAIL  # every so many tokens it is cut, if it can be
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Decoder(Protocol):
    """Turns tokens that come one after another into text."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each of these tokens adds to the text; '' while a character is incomplete."""

    def preview(self, tokens: Sequence[int]) -> str:
        """What these tokens would add, if they came now; nothing is kept."""

    def finish(self) -> str:
        """What was held back, as it is."""

    def single(self, token: int) -> str:
        """The text of a token as it reads behind another one, special tokens by name."""


class TextStream:
    """Text piece by piece; a character is held back until all of its bytes have come.

    special_tokens  their names by id
    skips_special   they are no part of the text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: Mapping[int, str],
        prompt: Sequence[int],
        *,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._skips_special = skips_special
        self._window = self._end_of(prompt)  # the last tokens that are text
        whole = self._whole(self._window)
        self._told = self._text(whole)  # the beginning of the window's text that has been told
        self._num_waiting = len(self._window) - len(whole)  # tokens whose text has not
        self._prompt = self._text(self._window)  # its end, until all of it has been told

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each of these tokens adds to the text; '' while a character is incomplete."""
        return [self._step(token) if self._is_text(token) else "" for token in tokens]

    def preview(self, tokens: Sequence[int]) -> str:
        """What these tokens would add, if they came now, special tokens by name."""
        stream = copy(self)
        stream._window = self._window.copy()
        text = ""
        for token in tokens:
            text += self._hidden(token) or "".join(stream.pieces([token]))
        return text + stream.finish() if any(map(self._is_text, tokens)) else text

    def finish(self) -> str:
        """What was held back, as it is."""
        told = self._tell(self._text(self._window), num_kept=0)
        self._num_waiting = 0
        return told

    def single(self, token: int) -> str:
        """The text of a token as it reads behind another one, special tokens by name."""
        if token in self._special_tokens:
            return self._special_tokens[token]
        once, twice = self._text([token]), self._text([token, token])
        return twice[len(once) :] if twice.startswith(once) else once

    def _step(self, token: int) -> str:
        self._window.append(token)
        self._num_waiting += 1
        text = self._text(self._window)
        is_whole = not text.endswith(REPLACEMENT)
        if not is_whole and self._num_waiting <= MAX_WAITING:
            return ""
        told = self._tell(text, num_kept=0 if is_whole else MAX_WAITING)
        if is_whole:
            self._num_waiting = 0
        if len(self._window) % WINDOW == 0 and not self._prompt:
            self._cut()
        return told

    def _tell(self, text: str, *, num_kept: int) -> str:
        """What is new in the window's text; that of its last `num_kept` tokens is kept back."""
        text = self._without(num_kept, text)
        num_alike = _num_alike(text, self._prompt)
        if num_alike > len(self._told):
            self._told = text[:num_alike]
        elif not text.startswith(self._told):  # a bad byte has spoilt its whole run
            self._window = self._window[-self._num_waiting :]
            self._told = self._prompt = ""
            text = self._without(num_kept, self._text(self._window))
        if not num_kept or len(text) >= len(self._prompt):
            self._prompt = ""
        new = text[len(self._told) :]
        self._told = text
        return new

    def _without(self, num_kept: int, text: str) -> str:
        """As many characters of the window's text as the tokens before its last ones have."""
        return text[: len(self._text(self._window[:-num_kept]))] if num_kept else text

    def _cut(self) -> None:
        """Forget the beginning of the window."""
        num_untold = len(self._text(self._window)) - len(self._told)
        self._window = self._window[self._beginning(self._window) :]
        text = self._text(self._window)
        self._told = text[: len(text) - num_untold]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt that the window begins with, all of them text."""
        size = WINDOW
        while True:
            last = [token for token in prompt[-size:] if self._is_text(token)]
            begin = self._beginning(last)
            if begin > 0 or size >= len(prompt):
                return last[begin:]
            size *= 2

    def _beginning(self, tokens: Sequence[int]) -> int:
        """The last place from which these tokens can be read alone; 0 if there is none."""
        whole = self._whole(tokens)
        text = self._text(whole)
        last = len(tokens) - TAIL
        for begin in range(last, 0, -1):
            is_byte = self._is_byte(tokens[begin])
            if is_byte and last - begin > MAX_WAITING:
                continue  # where no character of a run begins, it is a bad one
            tail = self._text(whole[begin:])
            if tail and (not is_byte or (REPLACEMENT not in tail and text.endswith(tail))):
                return begin
        return 0

    def _whole(self, tokens: Sequence[int]) -> Sequence[int]:
        """Those before a character that may be incomplete."""
        for num_waiting in range(MAX_WAITING + 1):
            whole = tokens[: max(0, len(tokens) - num_waiting)]
            if not self._text(whole).endswith(REPLACEMENT):
                break
        return whole

    def _is_text(self, token: int) -> bool:
        """Whether a token is any text; the last ids of a model may stand for nothing."""
        return not self._hidden(token) and self._tokenizer.id_to_token(token) is not None

    def _hidden(self, token: int) -> str:
        """The name of a token that is no part of the text; else nothing."""
        return self._special_tokens.get(token, "") if self._skips_special else ""

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special))


def _num_alike(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class IdStream:
    """Stands in for the text of a model without a tokenizer: its token ids, `5,6,7`."""

    def __init__(self) -> None:
        self._is_first = True

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One id a piece, with a comma before all but the first."""
        pieces = [f",{token}" for token in tokens]
        if pieces and self._is_first:
            self._is_first = False
            pieces[0] = pieces[0].removeprefix(",")
        return pieces

    def preview(self, tokens: Sequence[int]) -> str:
        """The ids, as if they came now."""
        return "".join(deepcopy(self).pieces(tokens))

    def finish(self) -> str:
        """Nothing is ever held back."""
        return ""

    def single(self, token: int) -> str:
        """The id."""
        return str(token)


# -- stops -----------------------------------------------------------------------------------------

# Where the text of an answer ends: the first stop string, across tokens and pieces.


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
