"""Text <-> tokens on the coordinator, with the `tokenizers` package alone (no torch)."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.text.detokenization import TextStream
from proto.errors import ConfigurationError, ModelError
from proto.paths import is_folder, path_of
from proto.system_errors import cannot_read

HUB_TIMEOUT_S = 5.0


def find_file(model: str, revision: str | None, name: str) -> Path | None:
    """A file of a model in a folder or on the hub; None if there is none."""
    folder = path_of(model) if is_folder(model) else _fetched(model, revision, name)
    path = folder and folder / name
    return path if path and path.exists() else None


def _fetched(model: str, revision: str | None, name: str) -> Path | None:
    """The folder of a model on the hub with this file; its library takes a while to load."""
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        # Unlike a download of one file it turns to the local copy at once without a network.
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=[name], etag_timeout=HUB_TIMEOUT_S
            )
        )
    except (OSError, HfHubHTTPError, TransportError, LocalEntryNotFoundError, ValueError):
        return None


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, read once while it does not change. Raises ModelError."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {cannot_read(error)}") from error
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: cannot be read: {line}; get it again") from error


@lru_cache(maxsize=4)
def _read(path: Path, _changed_ns: int) -> Tokenizer:
    return Tokenizer.from_file(str(path))


class Tokenization:
    """The target's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {id_: token.content for id_, token in added.items() if token.special}

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "Tokenization | None":
        """The tokenizer in a folder or on the hub; None if there is none. Raises ModelError."""
        path = find_file(model, revision, "tokenizer.json")
        if path is None:
            return None
        return cls(read_tokenizer(path))

    @property
    def digest(self) -> str:
        """What is known of it to whoever has it too: as `engine.tokenizer.fingerprint` has it."""
        vocabulary = sorted((index, token) for token, index in self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    @property
    def raw(self) -> Tokenizer:
        """As the library has it."""
        return self._tokenizer

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
        """A whole text without special tokens; an answer may read otherwise behind its prompt."""
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

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for the tokens of an answer to this prompt, as they come."""
        return TextStream(
            self._tokenizer, self._special_tokens, prompt, skips_special=skip_special_tokens
        )
