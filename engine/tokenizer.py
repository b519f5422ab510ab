"""The fingerprint of a tokenizer: two models work together only if they mean the same by an id."""

import hashlib
import json

from tokenizers import Tokenizer

from engine.checkpoint import find_checkpoint
from engine.errors import ModelError


def fingerprint(name: str, revision: str | None = None) -> tuple[int, str]:
    """Vocabulary size and a hash of the id -> token map; (0, "") for a model without a tokenizer.

    Raises:
        ModelError: tokenizer.json is there and cannot be read.
    """
    path = find_checkpoint(name, revision) / "tokenizer.json"
    if not path.exists():
        return 0, ""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
    return tokenizer.get_vocab_size(with_added_tokens=True), digest
