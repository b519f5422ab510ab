"""Drafters of another vocabulary for the embedded target, made of the embedded drafter's weights.

Nothing is trained, so that each is there in a second, and what it predicts is still of use. Their
embedding is their output matrix too: one row for each token.
"""

import json
from collections import Counter
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from proto.installation import MODELS, ROOT

DRAFTER = MODELS / "drafter"
EMBEDDING = "model.embed_tokens.weight"
NO_TOKEN = -1  # of the drafter: a row of zeros stands for it
UNKNOWN, UNIGRAM_END = "<unk>", "</s>"
SPACE = "\u2581"  # the sentencepiece space
# A piece lies in one of these: spaces before the last one, which belongs to the next word; a word;
# other signs; spaces. Spaces that end a text are read as if one more and a word followed.
PIECES = Regex(
    rf"[\s{SPACE}]+(?={SPACE}[^\s{SPACE}])|{SPACE}?\w+|{SPACE}?[^\w\s{SPACE}]+|[\s{SPACE}]+"
)
# So unlikely that the text "<0x41>" is read as six characters, and not as the piece of a byte.
BYTE_SCORE = -1000.0


def permuted(folder: Path, seed: int = 0) -> Path:
    """Save the drafter with other numbers for its tokens; return the folder.

    It reads the same tokens and predicts the same as the drafter.
    """
    tokenizer = _read("tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    old = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(seed))
    new = old.argsort().tolist()  # the drafter's token -> the number that it has here
    tokenizer["model"]["vocab"] = {name: new[token] for name, token in vocabulary.items()}
    (end,) = tokenizer["added_tokens"]
    end["id"] = new[end["id"]]
    return _save(folder, old, Tokenizer.from_str(json.dumps(tokenizer)), end["content"])


def smaller(folder: Path, size: int = 2000) -> Path:
    """Save the drafter with the first `size` of its tokens; return the folder.

    Its BPE makes only the merges that lead to these, so that it takes more tokens for a text.
    """
    tokenizer = _read("tokenizer.json")
    model = tokenizer["model"]
    model["vocab"] = {name: token for name, token in model["vocab"].items() if token < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (end,) = tokenizer["added_tokens"]
    return _save(
        folder, torch.arange(size), Tokenizer.from_str(json.dumps(tokenizer)), end["content"]
    )


def unigram(folder: Path) -> Path:
    """Save a drafter with a Unigram of the strings of the drafter's tokens; return the folder.

    A piece has the row of the token with the same string, and a byte that of the token for this
    byte; tokens that are parts of characters have no piece. Scores follow from how often the
    tokens occur in the engine's source.
    """
    tokenizer = Tokenizer.from_file(str(DRAFTER / "tokenizer.json"))
    (end,) = tokenizer.get_added_tokens_decoder()
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "engine").glob("**/*.py"))]
    counts = Counter(token for one in tokenizer.encode_batch(texts) for token in one.ids)
    total = counts.total() + tokenizer.get_vocab_size()
    pieces, tokens = [], []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])  # empty for the end of a text
        if text and not {"\ufffd", SPACE} & set(text):
            pieces.append((text.replace(" ", SPACE), log((counts[token] + 1) / total)))
            tokens.append(token)
    names = bytes_to_unicode()
    bytes_ = [tokenizer.token_to_id(names[byte]) for byte in range(256)]
    rows = torch.tensor([NO_TOKEN, end, *tokens, *bytes_])
    return _save(folder, rows, _unigram_of(pieces), UNIGRAM_END)


def _unigram_of(pieces: Sequence[tuple[str, float]]) -> Tokenizer:
    """A Unigram of these pieces and their scores; its last 256 tokens are the bytes.

    The bytes are last because a model may take the piece "A" and the byte of "A" for equally
    likely: the largest of its logits is then that of the piece.
    """
    ends = [(UNKNOWN, 0.0), (UNIGRAM_END, 0.0)]
    byte_pieces = [(f"<0x{byte:02X}>", BYTE_SCORE) for byte in range(256)]
    model = models.Unigram([*ends, *pieces, *byte_pieces], unk_id=0, byte_fallback=True)
    tokenizer = _sentencepiece(model)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name, _ in ends])
    return tokenizer


def _sentencepiece(model: models.Unigram) -> Tokenizer:
    """A tokenizer that writes spaces as sentencepiece does: as a sign of their own.

    One of them is put before a text and taken away again. Each space and line break of the text is
    kept. A text that holds this sign itself is not given back as it was.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(PIECES, "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _read(name: str) -> dict[str, Any]:
    """A JSON file of the drafter."""
    found: dict[str, Any] = json.loads((DRAFTER / name).read_text(encoding="utf-8"))
    return found


def _save(folder: Path, rows: Tensor, tokenizer: Tokenizer, end: str) -> Path:
    """Save a model whose tokens have these rows of the drafter's embedding.

    rows  int64 [V]: for each token one of the drafter's, or NO_TOKEN
    end   the token that ends a text
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(DRAFTER / "model.safetensors")
    embedding = weights[EMBEDDING][rows.clamp(min=0)]
    embedding[rows == NO_TOKEN] = 0.0
    save_file(
        weights | {EMBEDDING: embedding}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id(end)
    for name, changes in (
        ("config.json", {"vocab_size": len(rows), "eos_token_id": end_id}),
        ("generation_config.json", {"eos_token_id": end_id}),
        ("tokenizer_config.json", {"eos_token": end}),
    ):
        (folder / name).write_text(json.dumps(_read(name) | changes, indent=2) + "\n")
    return folder
