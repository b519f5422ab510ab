"""Whether a CPU reads the tiles of a quantised matrix one by one, or several together, by timing.

It changes no number. Where the memory delivers one stream of bytes faster than several, a matrix
of 4 bits is read up to 1.5 times as fast one by one (docs/LOG.md); where a processor hides the
latency of its sums only by several tiles, those are faster.
"""

import ctypes
from functools import cache, partial

import torch

from engine.cpu_library import library
from engine.kept import Kept
from engine.quantised.cpu_products import TiledProduct, four_bits_in_tiles
from engine.timing import Form, as_timed, quickest

ONE_BY_ONE, TOGETHER = "one by one", "together"
_reading = TOGETHER  # as the library begins

# Together larger than a core has caches, as a model is: 4 bits, scales and offsets of 32 inputs.
_NUM_MATRICES, _OUTPUTS, _INPUTS, _GROUP = 4, 4096, 2048, 32


def choose_reading(kept: Kept) -> None:
    """Let products of this process read tiles as is fastest here, as found now or before."""
    global _reading  # as in the library, of which a process has one
    found = library(compiles=False)
    if found is not None:
        _reading = _chosen(found, kept)
        found.slipstream_read_tiles(_reading == ONE_BY_ONE)


def reading() -> str:
    """Return how tiles are read in this process."""
    return _reading


@cache  # where the machine is too busy to keep what was found, it is not timed for each model
def _chosen(found: ctypes.CDLL, kept: Kept) -> str:
    """Return how tiles are read here."""
    return kept.found("reading", (), partial(_quickest, found), is_reading)


def is_reading(found: object) -> bool:
    """True for what is kept as the way of reading."""
    return found in (ONE_BY_ONE, TOGETHER)


def _quickest(found: ctypes.CDLL) -> str:
    """Return how a plain step reads a model's matrices in the least time."""
    row = torch.ones(1, _INPUTS, dtype=torch.bfloat16)
    products = [_product(found) for _ in range(_NUM_MATRICES)]

    def read(name: str) -> None:
        found.slipstream_read_tiles(name == ONE_BY_ONE)
        for product in products:
            product(row)

    forms = [Form(name, "in tiles", partial(read, name)) for name in (TOGETHER, ONE_BY_ONE)]
    return quickest(forms, as_timed)


def _product(found: ctypes.CDLL) -> TiledProduct:
    """Return the product with a matrix of 4 bits; its numbers do not matter."""
    codes = torch.ones(_OUTPUTS * _INPUTS // 2, dtype=torch.uint8)
    scales, offsets = torch.ones(2, _OUTPUTS * _INPUTS // _GROUP, dtype=torch.float16).unbind()
    sizes = _OUTPUTS, _INPUTS, _GROUP, _INPUTS
    return four_bits_in_tiles(found, (codes, scales, offsets), sizes)
