"""The layers that are no attention and keep what they need of a token in the token's slot."""

from typing import Any

from engine.forward import delta_rule, short_conv


def more_in_slots(model: Any) -> int:
    """Let such layers of a model use slots; return how many tokens before a row they read.

    0: the model has none. It is done once, and before the model's cache is measured.
    """
    short_conv.keep_in_slots(model)
    delta_rule.keep_in_slots(model)
    return max(short_conv.num_before(model), delta_rule.num_before(model))
