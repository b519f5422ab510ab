"""Which arms have no figures, because the host was late with the devices that it simulated.

Theory of operation
-------------------
On a simulated device a forward ends when the host wakes for its end. Now and then a host wakes too
late, on a virtual machine once in a hundred times, by half a millisecond. That makes an arm look
slower than it is, by no more than the share of the time that was lost like this. So:

    up to MOST_LATE     the figures stand: nobody could see the difference
    up to TOO_LATE      what the arm's speed-up would be if no time had been lost, neither to it nor
                        to its baseline, is computed as well. The figures stand if that lies within
                        the interval of the speed-up: then they say no more than they know
    more than TOO_LATE  void: others had the cores

The limits are in `coordinator/text/metrics.py`, and hold for a single text too. What is lost in the
middle case is told of every text with its figures (`Simulated.verdict`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from coordinator.text.metrics import MOST_LATE, TOO_LATE, late_share
from lab.experiments.results.ratios import Cell, paired
from lab.experiments.rows import Row, times_of


class _Arm:
    """The texts of an arm."""

    def __init__(self, rows: Sequence[Row]) -> None:
        by_cell: dict[Cell, list[Row]] = defaultdict(list)
        for row in rows:
            by_cell[Cell(row.prompt, row.repetition, row.turn)].append(row)
        # Texts that were written at once have lost the same time: it counts once.
        times = {
            cell: max((found for row in mine if (found := times_of(row))), default=None)
            for cell, mine in by_cell.items()
        }
        self.late_share = late_share([found for found in times.values() if found])
        self.speeds = {
            cell: mine[0].tokens_per_second
            for cell, mine in by_cell.items()
            if mine[0].tokens_per_second > 0
        }
        lost = {cell: late_share([found]) if found else 0.0 for cell, found in times.items()}
        self.undisturbed = {
            cell: speed / max(1 - lost[cell], 1e-9) for cell, speed in self.speeds.items()
        }


def with_void_arms(rows: Sequence[Row], baselines: Mapping[str, str]) -> list[Row]:
    """The rows, void where the host was too late with the devices of an arm.

    Of all texts of an arm together: of a single one a late forward or two say nothing.

    baselines  by arm, the one that it is compared with
    """
    by_arm: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.stage == "main":
            by_arm[row.arm].append(row)
    arms = {name: _Arm(mine) for name, mine in by_arm.items()}
    void = {name: _why(arm, arms.get(baselines.get(name, ""))) for name, arm in arms.items()}
    return [
        dataclasses.replace(row, void=why) if (why := void.get(row.arm, "")) else row
        for row in rows
    ]


def _why(arm: _Arm, base: _Arm | None) -> str:
    """Why an arm is void; empty: it is not."""
    late = f"its forwards were late by {arm.late_share:.0%} of the time"
    if arm.late_share > TOO_LATE:
        return late
    if base is None or max(arm.late_share, base.late_share) <= MOST_LATE:
        return ""
    told = paired(arm.speeds, base.speeds)
    undisturbed = paired(arm.undisturbed, base.undisturbed)
    if told is None or undisturbed is None:
        return ""
    if told.low is None or told.high is None:
        return f"{late}, and of one text nobody knows whether that matters"
    if told.low <= undisturbed.mean <= told.high:
        return ""
    return (
        f"{late}, those of its baseline by {base.late_share:.0%}: "
        f"its speed-up may be {undisturbed.mean:.2f}, outside its interval"
    )
