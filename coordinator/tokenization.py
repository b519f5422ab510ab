"""Text <-> tokens on the coordinator, with the `tokenizers` package alone (no torch)."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Protocol

from httpx2 import TransportError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from proto.errors import ConfigurationError, ModelError

HUB_TIMEOUT_S = 5.0
REPLACEMENT = "\ufffd"  # what bytes that are no character are shown as


def find_file(model: str, revision: str | None, name: str) -> Path | None:
    """A file of a model in a folder or on the hub; None if there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        disable_progress_bars()
        try:
            # Unlike a download of one file it turns to the local copy at once without a network.
            folder = Path(
                snapshot_download(
                    model, revision=revision, allow_patterns=[name], etag_timeout=HUB_TIMEOUT_S
                )
            )
        except (OSError, HfHubHTTPError, TransportError, LocalEntryNotFoundError, ValueError):
            return None
    path = folder / name
    return path if path.exists() else None


class Decoder(Protocol):
    """Turns tokens that come one after another into text."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each of these tokens adds to the text; '' while a character is incomplete."""

    def preview(self, tokens: Sequence[int]) -> str:
        """What these tokens would add, if they came now; nothing is kept."""

    def finish(self) -> str:
        """What was held back, as it is."""

    def single(self, token: int) -> str:
        """The text of a token by itself, special tokens by name."""


class Tokenization:
    """The target's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "Tokenization | None":
        """The tokenizer in a folder or on the hub; None if there is none. Raises ModelError."""
        path = find_file(model, revision, "tokenizer.json")
        if path is None:
            return None
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:
            raise ModelError(f"cannot read {path}: {error}") from error

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids; `special_tokens` adds those that the tokenizer itself puts around a text.

        Raises ConfigurationError.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"the prompt is not valid Unicode (character {error.start}); give it as UTF-8"
            ) from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def bans(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write these words, at the start of a text and after a space.

        As vLLM has it: the form with a space is banned too if it is as long and begins with another
        token.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = self.encode(word.lstrip(), special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), special_tokens=False)
            found += [bare] if bare else []
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(found)

    def stream(self) -> "TextStream":
        """A decoder for tokens that come one after another."""
        return TextStream(self._tokenizer)


class TextStream:
    """Text piece by piece; a character is held back until all of its bytes have come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._sent: list[str] = []

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each of these tokens adds to the text; '' while a character is incomplete."""
        pieces = [self._stream.step(self._tokenizer, token) or "" for token in tokens]
        self._tokens += tokens
        self._sent += pieces
        return pieces

    def push(self, tokens: Sequence[int]) -> str:
        """What can be shown after these tokens."""
        return "".join(self.pieces(tokens))

    def preview(self, tokens: Sequence[int]) -> str:
        """What these tokens would add, if they came now, special tokens by name."""
        stream = deepcopy(self._stream)
        added = self._tokenizer.get_added_tokens_decoder()
        text, incomplete = "", False
        for token in tokens:
            if token in added and added[token].special:
                text += str(added[token].content)
                continue
            piece = stream.step(self._tokenizer, token)
            incomplete = piece is None
            text += piece or ""
        return text + REPLACEMENT if incomplete else text

    def finish(self) -> str:
        """What was held back, as it is."""
        sent = "".join(self._sent)
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        return whole[len(sent) :] if whole.startswith(sent) else ""

    def single(self, token: int) -> str:
        """The text of a token by itself, special tokens by name."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


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
