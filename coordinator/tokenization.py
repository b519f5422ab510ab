"""Text <-> tokens on the coordinator, with the `tokenizers` package alone (no torch)."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from proto.errors import ModelError


class Tokenization:
    """The target's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "Tokenization | None":
        """The tokenizer in a folder or on the hub; None if the model has none. Raises ModelError."""
        if Path(model).is_dir():
            path = Path(model) / "tokenizer.json"
            if not path.exists():
                return None
        else:
            try:
                path = Path(hf_hub_download(model, "tokenizer.json", revision=revision))
            except (OSError, HfHubHTTPError, LocalEntryNotFoundError, ValueError):
                return None
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:
            raise ModelError(f"cannot read {path}: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids, with the special tokens that the tokenizer itself adds."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> "TextStream":
        """A decoder for tokens that come one after another."""
        return TextStream(self._tokenizer)


class TextStream:
    """Text piece by piece; a character is held back until all of its bytes have come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._sent = ""

    def push(self, tokens: tuple[int, ...]) -> str:
        """What can be shown after these tokens."""
        pieces = []
        for token in tokens:
            self._tokens.append(token)
            pieces.append(self._stream.step(self._tokenizer, token) or "")
        piece = "".join(pieces)
        self._sent += piece
        return piece

    def finish(self) -> str:
        """What was held back, as it is."""
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""
