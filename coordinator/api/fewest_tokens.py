"""Tells how many tokens a text has at least, by its bytes alone: without encoding it.

Each token stands for at most so many bytes of a text as its own spelling has. So a text whose
bytes are many times those of the longest token is too long for a model whatever it says, and is
refused before hundreds of megabytes are spent on it.

This only holds where a tokenizer cannot shorten a text. Where it may (spaces that are taken away,
letters that are simplified, a run of unknown words that becomes one token), nothing is said.
"""

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

# Normalizers that shorten nothing, and those that do by a factor that Unicode limits: a Kelvin sign
# of three bytes becomes a K, and a Greek letter with two accents, of seven bytes, one of two.
KEEP = ("Prepend", "ByteLevel")
COMPOSED = {"NFC": 4, "NFD": 3}
# Steps that cut a text and take nothing away.
CUT = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
CUT_AND_MAY_REMOVE = ("Split", "Punctuation")
MOST_OF_A_CHARACTER = 4  # bytes
PROBE = "a b"


def bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of a text that one token can stand for; None: any number."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    factor = _factor(_state(tokenizer.normalizer))
    if factor is None or not _keeps_all(_state(tokenizer.pre_tokenizer)):
        return None
    if not _knows_all(tokenizer) or not _shows_all(tokenizer):
        return None
    spelled = list(tokenizer.get_vocab())
    if tokenizer.normalizer is not None:
        spelled += [tokenizer.normalizer.normalize_str(token.content) for token in added]
    longest = max((len(one.encode(errors="replace")) for one in spelled), default=0)
    return factor * max(longest, MOST_OF_A_CHARACTER)


def _state(part: Any) -> dict[str, Any] | None:
    """Return the settings of a normalizer or a pre-tokenizer; None: there is none."""
    if part is None:
        return None
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _factor(state: dict[str, Any] | None) -> int | None:
    """Return how many times shorter a normalizer makes a text at most; None: any number."""
    if state is None or state["type"] in KEEP:
        return 1
    if state["type"] == "Replace":
        old = state["pattern"].get("String")
        return 1 if old and len(state["content"].encode()) >= len(old.encode()) else None
    if state["type"] != "Sequence":
        return COMPOSED.get(state["type"])
    factor = 1
    for one in state["normalizers"]:
        found = _factor(one)
        if found is None:
            return None
        factor *= found
    return factor


def _keeps_all(state: dict[str, Any] | None) -> bool:
    """True if a pre-tokenizer takes nothing away."""
    if state is None or state["type"] in CUT:
        return True
    if state["type"] == "Sequence":
        return all(map(_keeps_all, state["pretokenizers"]))
    return state["type"] in CUT_AND_MAY_REMOVE and state["behavior"] != "Removed"


def _knows_all(tokenizer: Tokenizer) -> bool:
    """True if no character is left out, and unknown ones do not become one token together."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    if model.unk_token in vocabulary and not model.fuse_unk:
        return True
    is_plain = not model.continuing_subword_prefix and not model.end_of_word_suffix
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return is_plain and _is_bytewise(tokenizer) and all(sign in vocabulary for sign in alphabet)


def _is_bytewise(tokenizer: Tokenizer) -> bool:
    """True if the model gets a text's bytes as 256 signs."""
    states = [_state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)]
    while states:
        state = states.pop() or {"type": ""}
        if state["type"] == "ByteLevel":
            return True
        states += state.get("pretokenizers", state.get("normalizers", []))
    return False


def _shows_all(tokenizer: Tokenizer) -> bool:
    """True if what puts tokens around a text leaves the text itself there."""
    bare = tokenizer.encode(PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(PROBE, add_special_tokens=True).ids
    return 0 < len(bare) <= len(whole)
