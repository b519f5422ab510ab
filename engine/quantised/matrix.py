"""A matrix of small integers with scales, as it is multiplied on CPUs without being dequantised.

    weight[o, i] = scale[o, i // group] * code[o, i] (+ offset[o, i // group])

Codes of 8 bits are signed, those of 4 bits are not. All formats for CPUs (GGUF's blocks, GPTQ, AWQ,
and what `--quantization` makes of plain weights) are read into this one form. Owns the form; knows
no file, no layer and no kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A quantised weight [out, in].

    bits     of a code: 8 or 4
    codes    8 bits: int8 [out, in], from -127 to 127; 4 bits: uint8 [out, in / 2], two codes from
             0 to 15 in each, the earlier input in the lower half
    scales   float32 [out, in / group]
    offsets  float32 [out, in / group]; None: all are 0
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs, number of inputs."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [out, in], computed in float32 and then rounded to `dtype`."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        weight = codes.float().view(len(codes), -1, self.group) * self.scales[..., None]
        if self.offsets is not None:
            weight += self.offsets[..., None]
        return weight.flatten(1).to(dtype)


def stacked(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix | None:
    """Return matrices of the same inputs as one, their outputs one after another.

    None if they differ in bits or groups, or only some have offsets.
    """
    kinds = {(part.bits, part.group, part.offsets is None) for part in parts}
    if len(kinds) > 1:
        return None
    first = parts[0]
    offsets = None
    if first.offsets is not None:
        offsets = torch.cat([part.offsets for part in parts if part.offsets is not None])
    codes, scales = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales")
    )
    return QuantisedMatrix(first.bits, codes, scales, offsets)


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 to 15, uint8 [out, in], two in a byte: [out, in / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def of_integers(
    bits: int, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> QuantisedMatrix | None:
    """Return the matrix scale * (integer - zero point); None if a code of 8 bits would be -128.

    numbers        unsigned integers, float32 [in, out]
    scales, zeros  float32 [groups, out]; the inputs of a group are adjacent
    """
    scales, zeros = scales.t().contiguous(), zeros.t()
    if bits == 4:
        return QuantisedMatrix(4, in_pairs(numbers.t().to(torch.uint8)), scales, -scales * zeros)
    if not numbers.min() > 0:
        return None
    codes = (numbers.t() - 128).to(torch.int8).contiguous()
    offsets = scales * (128 - zeros) if (zeros != 128).any() else None
    return QuantisedMatrix(8, codes, scales, offsets)
