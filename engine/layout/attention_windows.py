"""What the layers of a model see of a text: all of it, its last tokens, or a chunk of it.

In many models some layers, or all, see only the last `size` tokens (a sliding window), or only the
tokens of their own chunk of `size`. Every such layer has a *lowest visible position* for a row; it
sees nothing of the row's path below that. Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The part of a text that some layers see.

    size      number of tokens; the last one is the row's own
    is_chunk  False: the row sees the last `size` tokens. True: the text is divided into chunks of
              `size` tokens, and the row sees those of its own chunk up to itself
    """

    size: int
    is_chunk: bool = False

    @property
    def layer_type(self) -> str:
        """Return the name of such layers in transformers' `layer_types`."""
        return "chunked_attention" if self.is_chunk else "sliding_attention"

    def lowest(self, position: int) -> int:
        """Return the lowest position that a row at `position` sees."""
        if self.is_chunk:
            return position // self.size * self.size
        return max(0, position - self.size + 1)


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of attention of a model's layers.

    seen       the different kinds: None is full attention, and comes first if there is any
    of_layers  per layer, the index of its kind in `seen`
    """

    seen: tuple[AttentionWindow | None, ...] = (None,)
    of_layers: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, layers: Sequence[AttentionWindow | None]) -> "LayerKinds":
        """Return the kinds of a model whose layers see so much; None is full attention."""
        windows = {one for one in layers if one is not None}
        full = (None,) if None in layers else ()
        seen = (*full, *sorted(windows, key=lambda window: (window.size, window.is_chunk)))
        return cls(seen, of_layers=tuple(seen.index(one) for one in layers))

    @cached_property
    def windows(self) -> tuple[AttentionWindow, ...]:
        """The windows among the kinds; () if all layers see the whole text."""
        return tuple(one for one in self.seen if one is not None)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Return the name of each kind in transformers' `layer_types`."""
        return tuple("full_attention" if one is None else one.layer_type for one in self.seen)

    @cached_property
    def numbers(self) -> tuple[int | None, ...]:
        """Per kind, its index in `windows`; None for full attention."""
        return tuple(None if one is None else self.windows.index(one) for one in self.seen)

    @property
    def is_uniform(self) -> bool:
        """True if all layers are of one kind."""
        return len(self.seen) == 1

    def within(self, num_slots: int) -> "LayerKinds":
        """Return the kinds for texts of at most `num_slots` tokens.

        A window that no text is longer than is full attention.
        """
        if all(window.size < num_slots for window in self.windows):
            return self
        kept = [None if one is None or one.size >= num_slots else one for one in self.seen]
        return self.of([kept[kind] for kind in self.of_layers])


FULL = LayerKinds()
"""A model whose layers all see the whole text"""
