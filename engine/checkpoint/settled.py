"""Change a loaded model so that a token is read in the same way whatever the length of its text.

Transformers chooses a longrope's factors anew in each pass, by the highest position in it. Here
they are chosen once. Reads no checkpoint.
"""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoint import long_texts


def settle(model: Any, config: Any, longest: int) -> None:
    """Settle the factors of a model's longrope; other models stay as they are.

    config   transformers' configuration of the language model
    longest  number of tokens that a text may have, from `long_texts.limited`: it says which of a
             longrope's two sets of factors is taken
    """
    stated = config.to_dict()
    original = long_texts.original_length(stated)
    if original is None or not long_texts.has_sets(str(config.model_type), stated):
        return
    for part in model.modules():
        if getattr(part, "rope_type", None) not in long_texts.LONG_ROPES:
            continue
        if longest > original:
            frequencies, _ = ROPE_INIT_FUNCTIONS[part.rope_type](
                part.config, part.inv_freq.device, seq_len=original + 1
            )
            part.inv_freq.copy_(frequencies)
        part.rope_type = "default"  # transformers now leaves the factors as they are
