"""Where the files of a model of several modalities have the tensors of its language model.

Needs no torch: the coordinator asks it as well.
"""

import re
from collections.abc import Iterable

from engine.checkpoint.files import Stored

# Older files have `language_model.model.layers`, newer ones `model.language_model.layers`.
_OF_TEXT = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
HEAD = "lm_head."


def stored_text(names: Iterable[str]) -> dict[str, Stored]:
    """Return where a wrapper's files have the tensors of its language model, by the model's name.

    names  names of all tensors in the files
    """
    names = tuple(names)
    has_prefix = any(_OF_TEXT.match(name) for name in names)
    found = {}
    for name in names:
        if has_prefix:
            inner, is_text = _OF_TEXT.subn("", name)
            inner = inner if inner.startswith(HEAD) else f"model.{inner}"
        else:  # the first files of Qwen2-VL name the language model's tensors as if it were alone
            inner, is_text = name, name.startswith("model.")
        if is_text:
            found[inner] = Stored(name)
        elif name.startswith(HEAD):
            found[name] = Stored(name)
    return found
