"""How long texts may get so that a model reads all of each text in one way. Needs no torch.

Some models change at a certain length how they read *all* tokens of a text:

    longrope   rotary embeddings have a short set of factors and a long one. Transformers takes the
               long one as soon as a pass goes past the original length; keys that were cached
               before would then be wrong.
    dynamic    the frequencies follow the length, from the original one on.

Here longrope has one set for all texts: the long one if longer texts than the original length were
asked for, else the short one (`settled.py`). `dynamic` is used up to the original length.
"""

from collections.abc import Mapping
from typing import Any

from engine.room import LONGEST as LONGEST

Stated = Mapping[str, Any]

LONG_ROPES = ("longrope", "su")  # the second is its first name
_ORIGINAL = "original_max_position_embeddings"
# In these transformers mixes both sets: the short factors, with the scale of the long ones.
_MIXED = {"phimoe"}


def limited(kind: str, text: Stated, limit: int, asked: int) -> int:
    """Return how many tokens a text may have so that all of it is read in one way.

    kind   model type of the language model, which `text` describes: its part of config.json, or
           transformers' configuration as a dictionary
    limit  number of positions that the model has
    asked  maximum length of a text that the user asked for; 0: none
    """
    original = original_length(text)
    if original is None or (has_sets(kind, text) and asked > original):
        return limit
    return min(limit, original)


def original_length(text: Stated) -> int | None:
    """Return the length (tokens) at which the rotary embedding changes; None: it does not."""
    if _rope_type(text) not in (*LONG_ROPES, "dynamic"):
        return None
    found = text.get(_ORIGINAL) or _rope(text).get(_ORIGINAL)
    return found if type(found) is int else None


def has_sets(kind: str, text: Stated) -> bool:
    """True if the rotary embedding has two sets of factors, one of which is for all texts."""
    return _rope_type(text) in LONG_ROPES and kind not in _MIXED


def _rope(text: Stated) -> Stated:
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def _rope_type(text: Stated) -> object:
    return _rope(text).get("rope_type", _rope(text).get("type"))
