"""The fingerprint of a tokenizer: two models work together only if they mean the same by an id."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engine.checkpoint import find_checkpoint
from engine.errors import ModelError
from engine.model_files import one_line, refuse_odd_file


@dataclass(frozen=True, slots=True)
class TokenizerPrint:
    """What a tokenizer's id -> token map is known by.

    path        of its file, for messages
    num_trained  tokens of its vocabulary proper; those that were added may lie beyond the logits
    vocab_size  of all tokens; 0 without a tokenizer
    digest      hash of the map; empty without a tokenizer
    """

    path: Path
    num_trained: int
    vocab_size: int
    digest: str

    def check_fits(self, logits_size: int) -> None:
        """Raise ModelError if the model cannot say what the tokenizer knows."""
        if self.num_trained > logits_size:
            raise ModelError(
                f"{self.path}: it has {self.num_trained} tokens, but the model {logits_size} "
                "(vocab_size in config.json); one of the two is of another model"
            )


def fingerprint(name: str, revision: str | None = None) -> TokenizerPrint:
    """The fingerprint of a model's tokenizer.

    Raises:
        ModelError: tokenizer.json is there and cannot be read.
    """
    path = find_checkpoint(name, revision) / "tokenizer.json"
    refuse_odd_file(path)
    if not path.exists():
        return TokenizerPrint(path, 0, 0, "")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}; get it again") from error
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
    num_trained = tokenizer.get_vocab_size(with_added_tokens=False)
    return TokenizerPrint(path, num_trained, tokenizer.get_vocab_size(), digest)
