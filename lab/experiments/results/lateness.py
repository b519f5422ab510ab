"""Decides which arms are void because the host was late with the devices that it simulates.

Theory of operation
-------------------
On a simulated device a forward ends when the host wakes for its end. Now and then a host wakes too
late: on a virtual machine once in a hundred times, by half a millisecond. That makes an arm look
slower than it is, at most by the share of the time that was lost in this way. So, by that share:

    up to MOST_LATE     the figures are valid: the difference could not be seen
    up to TOO_LATE      the speed-up is computed again as if neither the arm nor its baseline had
                        lost any time. The figures are valid if this speed-up lies within the
                        interval of the measured one
    more than TOO_LATE  the arm is void: other processes used the CPU cores

The limits are in `coordinator/text/metrics.py`, and hold for a single text too. In the middle case
every text says with its figures how much was lost (`Simulated.verdict`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from coordinator.text.metrics import MOST_LATE, TOO_LATE, late_share
from lab.experiments.results.ratios import Cell, paired
from lab.experiments.rows import Row, times_of


class _Arm:
    """The rows of one arm, with their speeds and lost time by cell (prompt, repetition, turn).

    late_share   share of the arm's time by which forwards were late
    speeds       tokens per second
    undisturbed  tokens per second if no time had been lost
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        by_cell: dict[Cell, list[Row]] = defaultdict(list)
        for row in rows:
            by_cell[Cell(row.prompt, row.repetition, row.turn)].append(row)
        # Texts that were generated at the same time have lost the same time: it counts once.
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
    """Return the rows, marked void if the host was too late with the simulated devices of an arm.

    All texts of an arm are judged together: in a single text one or two late forwards mean nothing.

    baselines  for each arm, the name of the arm that it is compared with
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
    """Return the reason why an arm is void; "" if it is valid."""
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
