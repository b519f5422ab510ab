"""Which rank has which heads, columns and words (pure)."""

import math

UNIT = 16  # columns that kernels like to have together: one register of float32, two of bfloat16


def shares(count: int, num_ranks: int, unit: int = 1) -> tuple[range, ...]:
    """Divide [0, count) into a run for each rank, as even as whole units allow.

    unit  a power of two; a smaller one is taken where `count` is no multiple of it, or where not
          every rank would have any

    Earlier ranks have the larger runs; none is empty.
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
    """Return the columns of a run of heads, or of groups of heads, that are so wide each."""
    return range(run.start * width, run.stop * width)
