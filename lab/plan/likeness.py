"""Costs of a forward of a model that is named: its published shape on as many H100 as hold it.

Only the time to read the weights and to multiply with them counts (`rehearsal/planning.py`,
`roofline`). Left out are keys and values, communication between devices, and how far kernels stay
below the device's peaks: a real pass takes longer.
"""

import math
from dataclasses import dataclass

from lab.testbeds.shapes import Published, num_held, num_read
from rehearsal.planning import roofline
from rehearsal.setting import Forwards

BYTES_PER_PARAMETER = 2.0  # bfloat16
MEMORY_SHARE = 0.9  # share of a device's memory for weights; the rest is for keys and values


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU with its maker's figures: bytes, bytes a second, FLOPs a second (bfloat16, dense)."""

    name: str
    memory: float
    bandwidth: float
    flops: float


H100 = Device("H100 SXM", 80e9, 3.35e12, 9.89e14)


def num_devices(num_bytes: float) -> int:
    """Return the smallest power of two of H100 GPUs that hold so many bytes of weights."""
    return 1 << max(0, math.ceil(math.log2(num_bytes / (MEMORY_SHARE * H100.memory))))


def forwards_like(
    like: Published, num_bytes: float | None, bandwidth: float | None, flops: float | None
) -> Forwards:
    """Return the time of a forward, by its rows, of a model of this shape.

    num_bytes         bytes of the weights that a pass reads; None: two for each parameter
    bandwidth, flops  bytes and FLOPs per second of all devices together; None: those of H100. If
                      only a bandwidth is given, FLOPs are unlimited.
    """
    number = num_devices(num_held(like) * BYTES_PER_PARAMETER)
    unlimited = math.inf if bandwidth is not None else number * H100.flops
    return roofline(
        num_read(like),
        num_bytes or BYTES_PER_PARAMETER * num_read(like),
        bandwidth or number * H100.bandwidth,
        flops or unlimited,
    )


def words_of(role: str, like: Published, bandwidth: float | None) -> str:
    """Return a line of at most 80 columns: which model's shape, how large, and on which devices."""
    number = num_devices(num_held(like) * BYTES_PER_PARAMETER)
    place = f"{number} {H100.name}" if bandwidth is None else f"{bandwidth:.3g} bytes/s"
    return f"{role}: the shape of {like}, {num_held(like) / 1e9:.3g} B parameters, on {place}"
