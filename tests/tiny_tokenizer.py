"""A tokenizer for the small random models: a token for each byte."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = "<|end|>"
VOCAB_SIZE = 257  # 256 bytes and SPECIAL


def save_bytewise_tokenizer(folder: Path) -> None:
    """Save it where a model of at least VOCAB_SIZE tokens lies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
