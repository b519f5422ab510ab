"""Weights as GGUF files store them (llama.cpp), in blocks of adjacent inputs.

    Q8_0  32 weights   d; codes of 8 bits                      weight = d * code
    Q4_0  32 weights   d; codes of 4 bits                      weight = d * (code - 8)
    Q4_1  32 weights   d, m; codes of 4 bits                   weight = d * code + m
    Q5_0  32 weights   d; codes of 5 bits                      weight = d * (code - 16)
    Q5_1  32 weights   d, m; codes of 5 bits                   weight = d * code + m
    Q6_K  256 weights  d, 16 scales of 8 bits;                 weight = d * scale * (code - 32)
                       codes of 6 bits
    Q4_K  256 weights  d, dmin, 8 scales and 8 minima of       weight = d * scale * code
    Q5_K               6 bits each; codes of 4 or 5 bits                - dmin * minimum

d, m and dmin are float16. Scales of 8 and 6 bits stay what they are, d and dmin are their units.
Codes of 5 and 6 bits become codes of 8 bits. These types can be multiplied as they are (`KEPT`).
All others are only dequantised, by the package `gguf`.
"""

import numpy as np
import torch

from engine.checkpoint.gguf_list import BLOCKS
from engine.quantised.matrix import QuantisedMatrix, in_pairs

_NUMBERS_AT_ONCE = 1 << 22


def codes(kind: str, blocks: torch.Tensor) -> QuantisedMatrix:
    """Return the weight that is stored in blocks of a type in `KEPT`.

    blocks  uint8 [out, blocks of a row, bytes of a block]
    """
    assert kind in KEPT, f"no reader for {kind}"
    return _READERS[kind](blocks)


def weight(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the weight in float32, on the device of `blocks`, which are as for `codes`.

    kind  a type in `BLOCKS`, but for the plain ones; if it is none of `KEPT`, `blocks` are on a CPU
    """
    if kind in KEPT:
        return codes(kind, blocks).dequantised()
    return _by_package(kind, blocks.flatten(1))


def _by_package(kind: str, raw: torch.Tensor) -> torch.Tensor:
    """Return rows as the package `gguf` dequantises them, float32 [out, in].

    raw  uint8 [out, bytes of a row], on a CPU
    """
    import gguf  # takes a tenth of a second, and most models need none of it

    numbers, num_bytes = BLOCKS[kind]
    width = raw.shape[1] // num_bytes * numbers
    found = torch.empty(len(raw), width)
    # Some rows at a time: the package takes several times the memory of what it returns.
    step = max(1, _NUMBERS_AT_ONCE // width)
    with np.errstate(all="ignore"):  # whoever asked looks for NaN and infinity
        for first in range(0, len(raw), step):
            part = raw[first : first + step].numpy()
            rows = gguf.quants.dequantize(part, gguf.GGMLQuantizationType[kind])
            found[first : first + step] = torch.from_numpy(rows)
    return found


def _q8_0(blocks: torch.Tensor) -> QuantisedMatrix:
    numbers = blocks[..., 2:].contiguous().view(torch.int8)
    return QuantisedMatrix(8, numbers.flatten(1), _halves(blocks, 0))


def _q6_k(blocks: torch.Tensor) -> QuantisedMatrix:
    low, high, scales = blocks[..., :128], blocks[..., 128:192], blocks[..., 192:208]
    # Each half of a block has the lower four bits of its inputs 0..63 and 64..127 beside each
    # other, and in a byte of `high` the upper two bits of inputs that are 32 apart.
    low = low.reshape(*low.shape[:2], 2, 1, 64) >> _shifts(0, 4)
    high = high.reshape(*high.shape[:2], 2, 1, 32) >> _shifts(0, 2, 4, 6)
    numbers = (low & 15).flatten(1) | (high & 3).flatten(1) << 4
    scales = scales.contiguous().view(torch.int8).flatten(1)
    units = _halves(blocks, 208).float()
    both = torch.stack((units, torch.zeros_like(units)))
    return QuantisedMatrix(8, numbers.to(torch.int8) - 32, scales, None, both)


def _q4_0(blocks: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(4, in_pairs(_nibbles(blocks[..., 2:])), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> QuantisedMatrix:
    numbers = in_pairs(_nibbles(blocks[..., 4:]))
    return QuantisedMatrix(4, numbers, _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(8, _five_bits(blocks[..., 2:]) - 16, _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(8, _five_bits(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> QuantisedMatrix:
    numbers = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32) >> _shifts(0, 4)
    return QuantisedMatrix(4, in_pairs((numbers & 15).flatten(1)), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> QuantisedMatrix:
    numbers = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 1, 32) >> _shifts(0, 4)
    fifth = blocks[..., 16:48].reshape(*blocks.shape[:2], 1, 32) >> _shifts(*range(8))
    numbers = (numbers & 15).flatten(1) | (fifth & 1).flatten(1) << 4
    return QuantisedMatrix(8, numbers.to(torch.int8), *_k_scales(blocks))


_READERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q6_K": _q6_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
KEPT = tuple(_READERS)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales and minima, uint8 [out, 8 * blocks of a row], and their units, of K blocks."""
    # The lower six bits of bytes 0..3 and 4..7 are the scales and minima of the first four groups;
    # those of the others are the halves of bytes 8..11, with the upper two bits of the former.
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    units = torch.stack((_halves(blocks, 0), -_halves(blocks, 2))).float()
    return scales.flatten(1), minima.flatten(1), units


def _five_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks of 32, int8 [out, in]: fifth bits, then the others.

    Four bytes hold the fifth bits of all 32 codes, the earliest in the lowest bit.
    """
    fifth = (blocks[..., :4, None] >> _shifts(*range(8))[:, 0]).flatten(1) & 1
    return (_nibbles(blocks[..., 4:]) | fifth << 4).to(torch.int8)


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks of 32, uint8 [out, in]: the later 16 are in the upper halves."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 number at a byte of each block, [out, blocks of a row]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _shifts(*numbers: int) -> torch.Tensor:
    """Return numbers of bits [len(numbers), 1] by which bytes are shifted."""
    return torch.tensor(numbers, dtype=torch.uint8)[:, None]
