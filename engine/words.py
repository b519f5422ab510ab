"""The bytes that each token of a tokenizer stands for, and the tokens of a text (pure).

Theory of operation
-------------------
Two tokenizers can be compared only by what their tokens say, in bytes. There are two kinds:

    byte-level     each byte is written as one printable character (GPT-2's table)
    sentencepiece  a space is written as U+2581, and `<0xE2>` is a byte of a character that has no
                   token of its own

A text is encoded in one of two ways. `read` encodes a whole text, or its end, and says where each
token ends, so that also tokenizers that change the text (to lower case, say) can be followed.
`following` encodes what follows a token that is there already, so that the first new token begins
exactly there. Tokenizers have no such function: a text that stands alone may get a space before it,
and after a letter it may be joined with that letter. So it is encoded behind an *anchor*: a
character that stays a token of its own.
"""

import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

from tokenizers import Tokenizer

SPACE = "\u2581"  # what sentencepiece writes for a space
ANCHORS = ("\n", ".", "a", "0", "\n\n.")  # one after the other, until one stays alone
NUM_KEPT = 1 << 13  # encoded strings that are kept
MAX_WAITING = 3  # most bytes at the end of a text that may be the beginning of a character


UNTRANSLATABLE = (
    "drafter and target have different tokenizers, and one of them is neither byte-level nor "
    "sentencepiece's; choose a drafter with the target's tokenizer"
)


class UnknownKind(Exception):
    """The tokenizer is of neither kind, so that the bytes of its tokens are unknown."""


class Words(Protocol):
    """What a vocabulary says: `TokenizerWords`, or a toy in its place.

    bytes_of  by token id: the bytes of the token; None: it says nothing (a special token)
    specials  the written form of the special tokens, by id
    starts    tokens that stand before every text
    """

    bytes_of: Sequence[bytes | None]
    specials: dict[int, str]
    starts: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of token ids."""

    def id_of(self, said: bytes) -> int | None:
        """Return the token that stands for exactly these bytes; None: there is none."""

    def following(self, text: bytes) -> tuple[int, ...]:
        """Return the tokens of a text that follows a token, as far as tokens can say it."""

    def read(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the tokens of a text that stands alone, and where each ends, in bytes."""

    def beginning_with(self, said: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (bytes, id) of the tokens that begin with these bytes and are longer."""


class TokenizerWords:
    """The words of a tokenizer of the `tokenizers` package. Raises UnknownKind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.specials = {id_: token.content for id_, token in added.items() if token.special}
        self.starts = tuple(tokenizer.encode("", add_special_tokens=True).ids)
        self.bytes_of: Sequence[bytes | None] = self._all_bytes(
            {id_: token.content for id_, token in added.items() if not token.special}
        )
        named = [(said, id_) for id_, said in enumerate(self.bytes_of) if said]
        named.sort()
        self._sorted = named
        self._ids = dict(reversed(named))  # of several, the lowest id
        self._anchors = [(anchor, tuple(self._encoded(anchor))) for anchor in ANCHORS]
        self._following = lru_cache(maxsize=NUM_KEPT)(self._made)

    def __len__(self) -> int:
        return len(self.bytes_of)

    def _all_bytes(self, added: dict[int, str]) -> list[bytes | None]:
        vocabulary = self._tokenizer.get_vocab()
        has_bytes, has_spaces = kind_of(json.loads(self._tokenizer.to_str()))
        if not has_bytes and not has_spaces:
            raise UnknownKind
        found: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
        for word, id_ in vocabulary.items():
            if id_ in added:
                found[id_] = added[id_].encode()
            elif id_ not in self.specials:
                found[id_] = _of_bytes(word) if has_bytes else _of_spaces(word)
        return found

    def id_of(self, said: bytes) -> int | None:
        """Return the token that stands for exactly these bytes; None: there is none."""
        return self._ids.get(said)

    def beginning_with(self, said: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (bytes, id) of the tokens that begin with these bytes and are longer."""
        for index in range(bisect_left(self._sorted, (said, -1)), len(self._sorted)):
            word, id_ = self._sorted[index]
            if not word.startswith(said):
                return
            if word != said:
                yield word, id_

    def read(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the tokens of a text that stands alone, and where each ends, in bytes.

        Bytes at its end that may begin a character are given by single tokens, if there are such.
        Bytes that are in no character are read as U+FFFD.
        """
        written, ends_of = _characters(text)
        encoded = self._tokenizer.encode(written, add_special_tokens=False)
        ids, ends = list(encoded.ids), [ends_of[end] for _, end in encoded.offsets]
        for index in range(1, len(ends)):
            ends[index] = max(ends[index], ends[index - 1])
        for position in range(ends_of[-1], len(text)):
            if (id_ := self._ids.get(text[position : position + 1])) is None:
                break
            ids.append(id_)
            ends.append(position + 1)
        return ids, ends

    def following(self, text: bytes) -> tuple[int, ...]:
        """Return the tokens of a text that follows a token, as far as tokens can say it."""
        return self._following(text)

    def _made(self, text: bytes) -> tuple[int, ...]:
        start = 0
        while start < min(MAX_WAITING, len(text)) and text[start] & 0xC0 == 0x80:
            start += 1  # the end of a character that has begun in the text before
        try:
            written = text[start:].decode()
            end = len(text)
        except UnicodeDecodeError as error:
            end = start + error.start
            written = text[start:end].decode()
        inner = self._encoded_after(written) if written else ()
        if inner is None:
            return self._longest(text)
        return (*self._longest(text[:start]), *inner, *self._longest(text[end:]))

    def _encoded_after(self, written: str) -> tuple[int, ...] | None:
        """Return the tokens of a text behind an anchor; None: they do not say just this text."""
        wanted = written.encode()
        for anchor, first in self._anchors:
            ids = tuple(self._encoded(anchor + written))
            rest = ids[len(first) :]
            if ids[: len(first)] == first and self._joined(rest) == wanted:
                return rest
        return None

    def _encoded(self, written: str) -> list[int]:
        return list(self._tokenizer.encode(written, add_special_tokens=False).ids)

    def _joined(self, ids: Sequence[int]) -> bytes | None:
        parts = [self.bytes_of[id_] for id_ in ids]
        return None if None in parts else b"".join(part for part in parts if part)

    def _longest(self, text: bytes) -> tuple[int, ...]:
        """Return tokens of a text, each as long as possible, until there is no token for it."""
        found: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + 64), start, -1):
                if (id_ := self._ids.get(text[start:end])) is not None:
                    break
            else:
                break
            found.append(id_)
            start = end
        return tuple(found)


# -- bytes -----------------------------------------------------------------------------------------


class TokenBytes:
    """The bytes of single tokens, as the tokenizer's decoder makes text of them.

    Each token is looked up by itself, so that a large vocabulary is never read as a whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        given = None if decoder is None else json.loads(decoder.__getstate__())
        self._has_bytes, self._has_spaces = kind_of({"decoder": given})
        self._falls_back = any(part["type"] == "ByteFallback" for part in _steps([given]))
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id_: token.content.encode() for id_, token in added.items()}

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None: there is no such token, or its bytes are unknown."""
        if token in self._added:
            return self._added[token]
        word = self._tokenizer.id_to_token(token)
        if word is None:
            return None
        if self._has_bytes:
            said = _of_bytes(word)
            return word.encode() if said is None else said
        if self._falls_back and _BYTE.fullmatch(word):
            return _of_spaces(word)
        return word.replace(SPACE, " ").encode() if self._has_spaces else None


def kind_of(tokenizer: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a tokenizer (its JSON) is byte-level, and whether it is sentencepiece's."""
    parts = [tokenizer.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    has_bytes = any(part["type"] == "ByteLevel" for part in _steps(parts))
    has_spaces = any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and SPACE in json.dumps(part, ensure_ascii=False))
        for part in _steps(parts)
    )
    return has_bytes, has_spaces


def _steps(parts: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of which normalizers, pre-tokenizers and decoders are made."""
    for part in parts:
        if not isinstance(part, dict):
            continue
        yield part
        for name in ("normalizers", "pretokenizers", "decoders"):
            yield from _steps(part.get(name, ()))


def _table() -> dict[str, int]:
    """Return the byte for which each character stands in byte-level tokens.

    Printable characters of Latin-1 stand for themselves, the other bytes for the characters from
    U+0100 on, in ascending order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _table()
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _of_bytes(word: str) -> bytes | None:
    values = [_BYTES.get(character) for character in word]
    return None if None in values else bytes(value for value in values if value is not None)


def _of_spaces(word: str) -> bytes:
    if _BYTE.fullmatch(word):
        return bytes((int(word[3:5], 16),))
    return word.replace(SPACE, " ").encode()


def _characters(text: bytes) -> tuple[str, list[int]]:
    """Return a text as characters, and where they end: [i] is the end of the first i, in bytes.

    Bytes that are in no character become U+FFFD. Bytes at the end that may be the beginning of a
    character are left out.
    """
    if text.isascii():
        return text.decode(), list(range(len(text) + 1))
    written: list[str] = []
    ends = [0]
    start = 0
    while start < len(text):
        try:
            valid, stop, bad = text[start:].decode(), len(text), 0
        except UnicodeDecodeError as error:
            stop, bad = start + error.start, error.end - error.start
            valid = text[start:stop].decode()
        for character in valid:
            written.append(character)
            ends.append(ends[-1] + len(character.encode()))
        if bad and len(text) - stop <= MAX_WAITING and stop + bad == len(text):
            break
        if bad:
            written.append("\ufffd")
            ends.append(stop + bad)
        start = stop + bad
    return "".join(written), ends


# -- sending ---------------------------------------------------------------------------------------

LARGEST = 1 << 28  # bytes of a tokenizer.json that is unpacked
# Before a tokenizer that reads special tokens as any other text: no tokenizer.json can say that.
SPLITS = "splits "


def packed(tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer as bytes for `Welcome.tokenizer`."""
    splits = SPLITS if tokenizer.encode_special_tokens else ""
    return zlib.compress((splits + tokenizer.to_str()).encode())


def unpacked(data: bytes) -> Tokenizer:
    """Return the tokenizer of `Welcome.tokenizer`. Raises UnknownKind if these bytes are none."""
    try:
        written = zlib.decompressobj().decompress(data, LARGEST).decode()
        tokenizer = Tokenizer.from_str(written.removeprefix(SPLITS))
        tokenizer.encode_special_tokens = written.startswith(SPLITS)
        return tokenizer
    except Exception as error:  # the library raises no narrower class
        raise UnknownKind from error


# -- sharing ---------------------------------------------------------------------------------------

# A few lines of several kinds, by which two tokenizers are compared.
SAMPLE = """The river had risen again in the night, and by noon nobody could cross the old bridge.
"How long will it take?" she asked; he didn't know, but he thought of two or three days at most.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

1. Measure the temperature (in 0.5 degree steps).  2. Wait 15 minutes.  3. Repeat until 2027-03-31.
Die Überschrift ist länger; la dernière page n'a pas été traduite.  E-mail: someone@example.org
"""


@dataclass(frozen=True, slots=True)
class Shared:
    """How much two vocabularies have in common.

    vocabulary  share of the target's tokens that are tokens of the drafter too
    sample      share of the target's tokens of SAMPLE that the drafter writes as one token, at the
                same place
    """

    vocabulary: float
    sample: float


def shared(own: Words, target: Words) -> Shared:
    """Compare a drafter's vocabulary with the target's."""
    said = [word for word in target.bytes_of if word]
    num_alike = sum(own.id_of(word) is not None for word in said)
    mine, theirs = (_spans(words.read(SAMPLE.encode())[1]) for words in (own, target))
    return Shared(num_alike / max(1, len(said)), len(mine & theirs) / max(1, len(theirs)))


def _spans(ends: Sequence[int]) -> set[tuple[int, int]]:
    return set(pairwise((0, *ends)))
