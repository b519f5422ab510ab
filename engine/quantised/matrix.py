"""A matrix of small numbers with scales, as it is multiplied without being dequantised.

    weight[o, i] = scale[o, i // group] * code[o, i] (+ offset[o, i // group])

Codes are integers, or on GPUs alone floats. Integers of 8 bits are signed, those of 4 bits are not;
without offsets their 8 stands for zero. All formats for CPUs (GGUF's blocks, GPTQ, AWQ, and what
`--quantization` makes of plain weights) are read into this one form. Owns the form; knows no file,
no layer and no kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What codes from 0 to 15 stand for in e2m1: a sign, two bits of exponent and one of mantissa.
FLOATS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A quantised weight [out, in].

    bits     of a code: 8 or 4
    codes    8 bits: int8 [out, in]; 4 bits: uint8 [out, in / 2], two codes from 0 to 15 in each,
             the earlier input in the lower half
    scales   [out, in / group] float32 or float16; int8 or uint8 where there are `units`
    offsets  likewise; None: 0 with 8 bits, -8 times the scale with 4 bits
    units    float32 [2, out, in / unit]: what scales and offsets are multiplied with (GGUF's K
             formats); None: 1
    is_float  True: codes of 8 bits are float8 (e4m3), those of 4 bits e2m1 (`FLOATS`), without
             offsets; of these the scales are float8 as well, e4m3 or e8m0
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    units: torch.Tensor | None = None
    is_float: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs, number of inputs."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        parts = (self.codes, self.scales, self.offsets, self.units)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> "QuantisedMatrix":
        """Return the matrix on a device."""
        rest = [
            None if part is None else part.to(device)
            for part in (self.scales, self.offsets, self.units)
        ]
        scales, offsets, units = rest
        assert scales is not None
        codes = self.codes.to(device)
        return QuantisedMatrix(self.bits, codes, scales, offsets, units, self.is_float)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [out, in], computed in float32 and then rounded to `dtype`."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
            if self.is_float:
                codes = FLOATS.to(codes.device)[codes.int()]
            elif self.offsets is None:
                codes = codes.to(torch.int8) - 8
        weight = codes.float().view(len(codes), -1, self.group) * self._wide(0)[..., None]
        if self.offsets is not None:
            weight += self._wide(1)[..., None]
        return weight.flatten(1).to(dtype)

    def _wide(self, which: int) -> torch.Tensor:
        """Return the scales (0) or the offsets (1) in float32, [out, in / group]."""
        small = (self.scales, self.offsets)[which]
        assert small is not None
        if self.units is None:
            return small.float()
        repeats = small.shape[1] // self.units.shape[2]
        return small.float() * self.units[which].repeat_interleave(repeats, dim=1)


def stacked(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix | None:
    """Return matrices of the same inputs as one, their outputs one after another.

    None if they differ in bits, groups or number types, or only some have offsets or units.
    """
    kinds = {_kind(part) for part in parts}
    if len(kinds) > 1:
        return None
    return QuantisedMatrix(
        parts[0].bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        _joined([part.offsets for part in parts]),
        _joined([part.units for part in parts], dim=1),
        parts[0].is_float,
    )


def _kind(one: QuantisedMatrix) -> tuple[object, ...]:
    rest = [
        None if part is None else (part.dtype, part.shape[-1]) for part in (one.offsets, one.units)
    ]
    return one.bits, one.is_float, one.shape[1], one.scales.dtype, one.group, *rest


def _joined(parts: Sequence[torch.Tensor | None], dim: int = 0) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found, dim) if found else None


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 to 15, uint8 [out, in], two in a byte: [out, in / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def of_integers(
    bits: int, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> QuantisedMatrix:
    """Return the matrix scale * (integer - zero point).

    numbers        unsigned integers, float32 [in, out]
    scales, zeros  float32 [groups, out]; the inputs of a group are adjacent
    """
    scales, zeros = scales.t().contiguous(), zeros.t()
    middle = 1 << (bits - 1)
    is_symmetric = bool((zeros == middle).all())
    if bits == 4:
        codes, start = in_pairs(numbers.t().to(torch.uint8)), 0
    else:
        codes, start = (numbers.t() - middle).to(torch.int8).contiguous(), middle
    return QuantisedMatrix(bits, codes, scales, None if is_symmetric else scales * (start - zeros))
