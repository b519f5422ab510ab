"""What stands in tests for a program of FlexAttention, and for a CUDA graph around a real one."""

from collections.abc import Callable, Sequence

import torch

import engine.forward.flex_attention
from engine.forward.graphs import Compute, Record
from engine.forward.operators import side_by_side
from engine.layout.slots import BLOCK
from engine.timing import Form


def spelt_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    num_blocks: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What `engine.forward.flex_attention._attend` computes, in plain operators over all slots.

    Slots of blocks that are not to be read count for nothing, also where a query would see them.
    """
    slots = torch.arange(keys.shape[2])
    lanes, rows = torch.arange(len(query)), torch.arange(query.shape[2])
    seen = engine.forward.flex_attention.sees(words, lanes[:, None, None], rows[:, None], slots)
    order = torch.arange(blocks.shape[3])
    is_read = (slots // BLOCK)[:, None] == torch.where(order < num_blocks, blocks[:, 0], -1)
    seen = seen & is_read.any(-1)[:, None]
    mask = torch.zeros(seen.shape, dtype=query.dtype)
    mask = mask.masked_fill(~seen, torch.finfo(query.dtype).min)[:, None]
    keys, values = (part.expand(len(query), -1, -1, -1) for part in (keys, values))
    return side_by_side(query, keys, values, mask, scale)


def always(name: str) -> Callable[..., str]:
    """In place of `engine.timing.quickest`."""

    def quickest(forms: Sequence[Form], *_: object, **__: object) -> str:
        names = [form.name for form in forms]
        return name if name in names else names[0]

    return quickest


def counted(made: list[int]) -> Callable[[torch.device], Record]:
    """In place of `graphs.recorder`: passes run as they are; `made` has their rows."""

    def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
        made.append(rows.shape[1])
        return compute

    return lambda _device: record
