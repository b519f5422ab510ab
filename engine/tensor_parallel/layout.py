"""Divide heads, columns and vocabulary among ranks (pure)."""

import math

UNIT = 16  # ranks get multiples of 16 columns if possible, a size that kernels handle well


def shares(count: int, num_ranks: int, unit: int = 1) -> tuple[range, ...]:
    """Return one range of [0, count) per rank, as evenly as whole units allow.

    unit  a power of two: ranges are multiples of it. A smaller unit is used if `count` is no
          multiple of it, or if a rank would get nothing

    Earlier ranks have the larger ranges; no range is empty.
    """
    assert 0 < num_ranks <= count, f"{count} cannot be divided among {num_ranks} ranks"
    unit = math.gcd(count, unit)
    while count // unit < num_ranks:
        unit //= 2
    each, more = divmod(count // unit, num_ranks)
    runs, start = [], 0
    for rank in range(num_ranks):
        stop = start + unit * (each + (rank < more))
        runs.append(range(start, stop))
        start = stop
    return tuple(runs)


def scaled(run: range, width: int) -> range:
    """Return the columns of a range of heads (or groups of heads) of `width` columns each."""
    return range(run.start * width, run.stop * width)
