"""Which policy is worth what: every row of the table of policies, at its best setting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.rows import TIMED_ROWS
from proto.messages import MAX_WINDOW, Role
from proto.policies import TABLE, Row
from rehearsal.acceptance import Trace
from rehearsal.closed_forms import step_s
from rehearsal.performance import Figures, rehearse
from rehearsal.setting import Forwards, NodeCosts

DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # K
WINDOW, WIDER = 16, (MAX_WINDOW,)
PAYS = 1.02  # times plain decoding; what is less is within what a rehearsal can tell
TARGET_ROWS, DRAFTER_ROWS = TIMED_ROWS[Role.TARGET], TIMED_ROWS[Role.DRAFTER]
FLOPS_PER_PARAMETER = 2  # and row: a multiplication and an addition


@dataclass(frozen=True, slots=True)
class Case:
    """What is given: costs, acceptance, and how many texts are written at once."""

    target: NodeCosts
    drafter: NodeCosts
    trace: Trace
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy with its numbers, and what it comes to.

    k, window  None where the policy has no such number
    """

    policy: str
    k: int | None
    window: int | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was rehearsed.

    plain  decoding without drafts
    best   of each policy that drafts, in the order of the table
    """

    plain: Cell
    best: tuple[Cell, ...]
    cells: tuple[Cell, ...]

    def speedup(self, cell: Cell) -> float:
        """Times plain decoding."""
        return cell.figures.tokens_per_second / self.plain.figures.tokens_per_second

    @property
    def winner(self) -> Cell | None:
        """The fastest cell, if speculation pays at all."""
        cell = max(self.best, key=self.speedup)
        return cell if self.speedup(cell) >= PAYS else None


def make_plan(
    case: Case,
    drafts: Sequence[int] = DRAFTS,
    wider: Sequence[int] = WIDER,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Rehearse every policy: with K up to the best and one beyond, there with wider windows too.

    drafts  ascending
    say     is told what is being rehearsed
    """
    cells: list[Cell] = []
    best: list[Cell] = []
    for row in TABLE:
        if not row.drafts:
            cells.append(_cell(row, case, None, None))
            continue
        say(row.name)
        window = WINDOW if row.runs_ahead else None
        tried = _climbed(row, case, drafts, window)
        if row.runs_ahead:
            so_far = max(tried, key=_speed)
            tried += [_cell(row, case, so_far.k, window) for window in wider]
        cells += tried
        best.append(max(tried, key=_speed))
    plain = next(cell for cell in cells if cell.k is None)
    return Plan(plain, tuple(best), tuple(cells))


def _climbed(row: Row, case: Case, drafts: Sequence[int], window: int | None) -> list[Cell]:
    """From a third of `drafts` on upwards or downwards, for as long as it gets faster."""
    cells: dict[int, Cell] = {}

    def speed(index: int) -> float:
        if index not in cells:
            cells[index] = _cell(row, case, drafts[index], window)
        return _speed(cells[index])

    best = len(drafts) // 3
    for step in (1, -1):
        while 0 <= best + step < len(drafts) and speed(best + step) > speed(best):
            best += step
    return list(cells.values()) or [_cell(row, case, drafts[best], window)]


def _cell(row: Row, case: Case, k: int | None, window: int | None) -> Cell:
    policy = row.make(k or 0, max(k or 0, window or 0))
    figures = rehearse(policy, case.target, case.drafter, case.trace, case.at_once)
    return Cell(row.name, k, window, figures)


def _speed(cell: Cell) -> float:
    return cell.figures.tokens_per_second


def roofline(num_parameters: float, num_bytes: float, bandwidth: float, peak: float) -> Forwards:
    """Forwards of a model whose weights are read once for all rows, which are few.

    num_bytes  of the weights
    bandwidth  bytes a second
    peak       FLOPs a second; infinity: reading the weights is all that it takes
    """
    row_flops = FLOPS_PER_PARAMETER * num_parameters

    def of(num_rows: int) -> float:
        return step_s(num_bytes, bandwidth, num_rows * row_flops, peak)

    free = int(min(1e6, num_bytes / bandwidth * peak / row_flops))  # rows until the weights are in
    knots = sorted({1, max(1, free), max(1, free) + 1})
    return Forwards(tuple((rows, of(rows)) for rows in knots), row_flops / peak)
