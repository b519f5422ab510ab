"""Reads prompts from the command line, standard input and files, and tokenizes them.

A file holds one prompt per line, or JSON Lines: on each line an object with a string under
`prompt`, or a list of strings under `turns`, of which the first is taken. The suffix decides
(.jsonl and .ndjson, or .txt); a file with another suffix is JSON Lines if its first line is such an
object. Empty lines are ignored.
"""

import json
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer

from coordinator.api.fewest_tokens import bytes_per_token
from coordinator.api.long_texts import LongTexts, Read
from coordinator.api.models import folders
from coordinator.text.detokenization import TextStream
from proto.errors import ConfigurationError, shown
from proto.system import cannot_read, is_folder, path_of

# -- tokenization ----------------------------------------------------------------------------------

# Converts text to tokens and back, with the `tokenizers` package alone (no torch).

HUB_TIMEOUT_S = 5.0
# The library's usual call holds Python's interpreter, a few ms for so many characters. Another one,
# of the same ids, does not; still longer texts are read by a process of their own.
AT_ONCE, HERE = 1 << 12, 1 << 17
# The files that add tokens to those of tokenizer.json (`engine/checkpoint/tokenizer_files.py`).
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def find_file(model: str, revision: str | None, name: str, *beside: str) -> Path | None:
    """Return the path of a model's file, downloaded if need be; None if there is none.

    beside  further files to download, if the model has them
    """
    folder = find_folder(model, revision, name, *beside)
    path = folder and folder / name
    return path if path and path.exists() else None


def find_folder(model: str, revision: str | None, *names: str) -> Path | None:
    """Return a model's folder with those of these files that there are; None: it is not known."""
    return path_of(model) if is_folder(model) else _fetched(model, revision, *names)


def find_files(model: str, revision: str | None, pattern: str) -> list[Path]:
    """Return the paths of a model's files of a pattern such as `folder/*.jinja`, by name."""
    folder = find_folder(model, revision, pattern)
    return [] if folder is None else sorted(folder.glob(pattern))


def _fetched(model: str, revision: str | None, *names: str) -> Path | None:
    """Return the model's folder, with the files that the hub has; None: it cannot be asked."""
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        # Unlike a download of one file, this uses the local copy at once where there is no network.
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(names), etag_timeout=HUB_TIMEOUT_S
            )
        )
    except (OSError, HfHubHTTPError, TransportError, LocalEntryNotFoundError, ValueError):
        return None


class TooManyTokensError(ConfigurationError):
    """A text has more tokens than were wanted: `num_tokens`, or so many at least."""

    def __init__(self, num_tokens: int, *, is_least: bool) -> None:
        super().__init__(f"the text has {'at least ' if is_least else ''}{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.is_least = is_least


class Tokenization:
    """The target's tokenizer: encodes prompts and decodes answers.

    digests  returns what a node with the same files says of them (`Fingerprint.digests`)
    """

    def __init__(
        self, tokenizer: Tokenizer, digests: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        self._tokenizer = tokenizer
        self.digests = digests
        added = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {id_: token.content for id_, token in added.items() if token.special}
        self.long_texts = LongTexts(self.packed)

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "Tokenization | None":
        """Read and return a model's tokenizer; None if it has none. Raises ModelError."""
        path = find_file(model, revision, folders.TOKENIZER, *BESIDE)
        if path is None:
            return None
        found = folders.read_tokenizer(path.parent)
        return cls(found.tokenizer, found.digests)

    def packed(self) -> bytes:
        """Return the tokenizer as bytes, for drafters that have another one."""
        return folders.packed(self._tokenizer)

    @property
    def raw(self) -> Tokenizer:
        """Return the tokenizer object of the `tokenizers` package."""
        return self._tokenizer

    def encode(
        self, text: str, *, special_tokens: bool = True, most: int | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a text.

        special_tokens  add the tokens that the tokenizer itself puts around a text
        most            raise TooManyTokensError if there are more; None: any number

        Raises ConfigurationError, also if it is not valid Unicode; for long texts BusyError, too.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"the prompt is not valid Unicode (character {error.start}); give it as UTF-8"
            ) from error
        if most is not None and (least := self.least(num_bytes, most)) > most:
            raise TooManyTokensError(least, is_least=True)
        if len(text) <= HERE:
            ids = self.encode_here(text, special_tokens=special_tokens)
            return ids_of(Read(text, len(ids), ids), most)
        read = self.long_texts.encode(text, special_tokens=special_tokens, most=most)
        return ids_of(read, most)

    def encode_here(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text in this process, however long it is."""
        if len(text) <= AT_ONCE:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return tuple(found.ids)

    def least(self, num_bytes: int, most: int) -> int:
        """Return how many tokens a text of so many bytes has at least; 0: that cannot be told.

        most  what it is compared with: of short texts nothing is asked
        """
        if num_bytes <= most or self._bytes_per_token is None:
            return 0
        return -(-num_bytes // self._bytes_per_token)

    @cached_property
    def _bytes_per_token(self) -> int | None:
        """Return the most bytes of a text that one token can stand for; None: any number."""
        return bytes_per_token(self._tokenizer)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return a whole text, by default without special tokens, as if no prompt were before it.

        The library's usual call would hold Python's interpreter.
        """
        (text,) = self._tokenizer.decode_batch(
            [list(tokens)], skip_special_tokens=skip_special_tokens
        )
        return str(text)

    def bans(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word at the start of a text, and of some also after a space.

        As in vLLM, the form with a space is included only if it has as many tokens and begins with
        a different one.

        Raises ConfigurationError if a word cannot be encoded.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = self.encode(word.lstrip(), special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), special_tokens=False)
            found += [bare] if bare else []
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(found)

    @property
    def special_names(self) -> Collection[str]:
        """Return the names of the special tokens."""
        return self._special_tokens.values()

    def stream(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
    ) -> TextStream:
        """Return a decoder for the tokens of an answer to this prompt, as they come.

        shown  names of special tokens that are part of the text in any case
        """
        hidden = {id_: name for id_, name in self._special_tokens.items() if name not in shown}
        return TextStream(
            self._tokenizer, hidden, prompt, self.bytes_of, skips_special=skip_special_tokens
        )

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes | None]:
        """Return a function that gives the bytes of a token; None where they are unknown."""
        from engine.words import TokenBytes  # the command line starts without the engine

        return TokenBytes(self._tokenizer).of


def ids_of(read: Read, most: int | None) -> tuple[int, ...]:
    """Return the ids of a text. Raises TooManyTokensError."""
    if read.ids is None or (most is not None and read.num_tokens > most):
        raise TooManyTokensError(read.num_tokens, is_least=read.is_least)
    return read.ids


# -- prompts ---------------------------------------------------------------------------------------

KEY, TURNS = "prompt", "turns"
JSON_SUFFIXES = (".jsonl", ".ndjson")
MAX_BYTES = 1 << 28


def from_argument(prompt: str) -> str:
    """Return the prompt, or all of standard input if it is `-`. Raises ConfigurationError."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise ConfigurationError("standard input is closed; it is read because PROMPT is `-`")
    text = _decoded(_read(sys.stdin.buffer, "standard input"), "standard input")
    if not text:
        raise ConfigurationError("standard input is empty; it is read because PROMPT is `-`")
    return text


def from_file(path: Path) -> list[str]:
    """Return the prompts in a file, at least one. Raises ConfigurationError."""
    lines = lines_of(path)
    if is_json(path, lines[0][1]):
        return [_prompt_of(line, f"{path}, line {number}") for number, line in lines]
    return [line for _, line in lines]


def num_with_more_turns(path: Path) -> int:
    """Return how many prompts of a file have turns after the first, which are not read.

    Raises ConfigurationError, as `from_file` does.
    """
    lines = lines_of(path)
    if not is_json(path, lines[0][1]):
        return 0
    records = [json.loads(line) for _, line in lines]
    return sum(KEY not in record and len(record.get(TURNS, ())) > 1 for record in records)


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return (number, text) of the non-empty lines of a file. Raises ConfigurationError if none."""
    numbered = enumerate(text_of(path).split("\n"), start=1)
    lines = [(number, line.rstrip("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigurationError(f"{path} has no prompts: every line is empty")
    return lines


def text_of(path: Path) -> str:
    """Return the text of a file. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            data = _read(file, str(path))
    except ValueError as error:  # the name contains a NUL character
        raise ConfigurationError(
            f"cannot read {shown(str(path))}: no file has such a name"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {cannot_read(error)}") from error
    return _decoded(data, str(path))


def _read(file: BinaryIO, where: str) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"{where} is larger than {MAX_BYTES >> 20} MiB; split it")
    return data


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where} is not UTF-8 (byte {error.start})") from error


def is_json(path: Path, first_line: str) -> bool:
    """True if a file is JSON Lines, by its suffix or else by its first line."""
    if path.suffix in (*JSON_SUFFIXES, ".txt"):
        return path.suffix in JSON_SUFFIXES
    try:
        record = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool({KEY, TURNS} & record.keys())


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON ({error})") from error
    match record:
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]}:
            return prompt
        case {"prompt": _}:
            raise ConfigurationError(f'{where}: "{KEY}" must be a string')
        case {"turns": _}:
            raise ConfigurationError(f'{where}: "{TURNS}" must begin with a string')
    raise ConfigurationError(f'{where}: expected an object with a "{KEY}"')
