"""Predicts which policy is fastest: rehearses each policy of the table, and finds its best K."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node.rows import TIMED_ROWS
from proto.messages import MAX_WINDOW, Limits, Message, Policy, Role, Verdict
from proto.policies import TABLE, PolicyRow
from rehearsal.acceptance import Ranked, Trace
from rehearsal.node import SimulatedNode
from rehearsal.setting import Forwards, NodeCosts, Setting, Text
from rehearsal.timeline import Mixed, Timeline
from rehearsal.world import World

# -- performance -----------------------------------------------------------------------------------

# The speed of a policy for given costs and acceptance: the real state machines in virtual time.

PROMPT_LEN = 8  # short, because the speed of decoding is wanted, not that of prefilling
NUM_TO_SETTLE = 24  # tokens at the start of a text that do not count: the nodes learn their costs
NUM_AT_END = 12  # tokens at the end that do not count: the last passes have no room for drafts
LEAST_LEN = NUM_TO_SETTLE + NUM_AT_END + 8
LIMIT_S = 1e6  # limit of virtual time


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured speed of some texts, mostly without the first and last tokens of each.

    tokens_per_second  of all texts together that are generated at once
    num_passes, num_drafted, num_accepted  target passes, verified drafts, accepted drafts
    target_busy        share of the time in which the target's device was computing
    drafter_busy       the same for the drafter's device
    """

    tokens_per_second: float
    num_tokens: int
    num_passes: int
    num_drafted: int
    num_accepted: int
    target_busy: float
    drafter_busy: float

    @property
    def tokens_per_pass(self) -> float:
        """Return the mean number of tokens of a pass, the target's own included."""
        return self.num_tokens / self.num_passes


@dataclass(slots=True)
class _Written:
    """The counts of one text, from one verdict (not included) to another."""

    began: float = 0.0
    ended: float = 0.0
    length: int = 0  # length of the text by the newest verdict
    num_before: int = 0  # tokens before those that count
    num_tokens: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class _Device:
    """Adds up how long a device has computed; its forwards never overlap."""

    def __init__(self) -> None:
        self._ended_s = 0.0  # seconds of all forwards but the newest
        self._began = self._until = 0.0  # beginning and end of the newest

    def occupy(self, began: float, until: float) -> None:
        """Add one forward from `began` to `until` (seconds)."""
        assert began >= self._until, "a device computes two forwards at once"
        self._ended_s += self._until - self._began
        self._began, self._until = began, until

    def busy_s(self, now: float) -> float:
        """Return the seconds of computing until `now`.

        The rest of the newest forward does not count.
        """
        return self._ended_s + max(0.0, min(now, self._until) - self._began)


class Ledger:
    """Counts the tokens and passes of all texts, and the busy time of both devices.

    It is a `world.Watcher`.

    is_whole  True: all of a text counts from its first verdict on
    """

    def __init__(self, timeline: Timeline, *, is_whole: bool) -> None:
        self._timeline = timeline
        self._num_to_settle = 1 if is_whole else NUM_TO_SETTLE
        self._num_at_end = 0 if is_whole else NUM_AT_END
        self._texts: dict[int, _Written] = defaultdict(_Written)  # by session
        self._devices = {role: _Device() for role in Role}
        self._before_s: dict[Role, float] = {}  # busy seconds of each device until `_began`
        self._counted_s: dict[Role, float] = {}  # the same until the last verdict that counts
        self._began = 0.0  # when the first text began to count

    def sent(self, node: SimulatedNode, message: Message) -> None:
        """Count a verdict: it is one pass of a text."""
        if not isinstance(message, Verdict):
            return
        text, now = self._texts[message.session], self._timeline.now
        max_len = node.world.setting.texts[message.session - 1].limits.max_len
        if message.base_len + len(message.tokens) <= text.length:
            return  # a repeated verdict, which stands for no pass
        text.length = message.base_len + len(message.tokens)
        if message.base_len >= max_len - self._num_at_end:
            return
        if text.num_before < self._num_to_settle:
            text.num_before += len(message.tokens)
            text.began = now
            if not self._began:
                self._began, self._before_s = now, self._busy_s(now)
            return
        text.ended, self._counted_s = now, self._busy_s(now)
        text.num_tokens += len(message.tokens)
        text.num_passes += 1
        text.num_drafted += message.num_drafted
        text.num_accepted += message.num_accepted

    def occupied(self, node: SimulatedNode, began: float, until: float) -> None:
        """Count a forward on a node's device."""
        self._devices[node.role].occupy(began, until)

    def _busy_s(self, now: float) -> dict[Role, float]:
        return {role: device.busy_s(now) for role, device in self._devices.items()}

    def watch_clock(self) -> None:
        """Fail if the virtual time exceeds the limit: a text hangs."""
        assert self._timeline.now < LIMIT_S, "a text does not end"

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    begun = disturbed = told = passed_on = routed = delivered = completed = _ignore
    launched = heard = handled = rested = ended = _ignore

    def figures(self, at_once: int) -> Figures:
        """Return the figures of all texts, of which `at_once` were generated at once."""
        texts = self._texts.values()
        num_tokens = sum(text.num_tokens for text in texts)
        elapsed_s = sum(text.ended - text.began for text in texts)
        whole_s = max(text.ended for text in texts) - self._began
        return Figures(
            tokens_per_second=at_once * num_tokens / elapsed_s,
            num_tokens=num_tokens,
            num_passes=sum(text.num_passes for text in texts),
            num_drafted=sum(text.num_drafted for text in texts),
            num_accepted=sum(text.num_accepted for text in texts),
            target_busy=self._counted_share(Role.TARGET, whole_s),
            drafter_busy=self._counted_share(Role.DRAFTER, whole_s),
        )

    def _counted_share(self, role: Role, whole_s: float) -> float:
        return (self._counted_s[role] - self._before_s[role]) / whole_s


def rehearse(
    policy: Policy,
    target_costs: NodeCosts,
    drafter_costs: NodeCosts,
    trace: Trace,
    at_once: int = 1,
    *,
    is_whole: bool = False,
) -> Figures:
    """Generate the texts of a trace in virtual time, `at_once` at a time; returns the figures.

    target_costs, drafter_costs  how long things take at each node
    is_whole                     True: each whole text counts, except its first token
    """
    assert all(len(positions) > LEAST_LEN for positions in trace), "texts are too short"
    texts = tuple(
        Text((index, *range(1, PROMPT_LEN)), Limits(PROMPT_LEN + len(positions), ()))
        for index, positions in enumerate(trace)
    )
    setting = Setting(
        # No trials without the drafter: they cost a few of very many passes, and a rehearsal is so
        # short that one would count too much.
        policy=replace(policy, rest_after=0),
        texts=texts,
        target=target_costs,
        drafter=drafter_costs,
        max_num_seqs=at_once,
        drafter_lanes=at_once,
        submit_every_s=None if at_once == 1 else 0.0,
    )
    timeline = Timeline()
    ledger = Ledger(timeline, is_whole=is_whole)
    world = World(setting, Ranked(texts, trace), timeline, ledger, Mixed(0))
    world.begin()
    world.run()
    return ledger.figures(at_once)


# -- planning --------------------------------------------------------------------------------------

DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # values of K that are tried
WINDOW, WIDER = 16, (MAX_WINDOW,)
PAYS = 1.02  # least speed-up over plain decoding that a rehearsal can tell from none
TARGET_ROWS, DRAFTER_ROWS = TIMED_ROWS[Role.TARGET], TIMED_ROWS[Role.DRAFTER]
FLOPS_PER_PARAMETER = 2  # for each row: a multiplication and an addition


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a plan: costs, acceptance, and how many texts are generated at once.

    apart  costs of target and drafter under policies where the two never compute at once; None: the
           same costs
    plain  costs of a target that decodes without a drafter; None: the same costs
    """

    target: NodeCosts
    drafter: NodeCosts
    trace: Trace
    at_once: int = 1
    apart: tuple[NodeCosts, NodeCosts] | None = None
    plain: NodeCosts | None = None

    def costs(self, row: PolicyRow) -> tuple[NodeCosts, NodeCosts]:
        """Return the costs of target and drafter under a policy."""
        if not row.drafts:
            return self.plain or self.target, self.drafter
        both = self.target, self.drafter
        return both if row.runs_ahead or self.apart is None else self.apart

    def changed(self, target: "Change", drafter: "Change") -> "Case":
        """Return the case with other costs, whatever the policy; each is made of its old ones."""
        return replace(
            self,
            target=target(self.target),
            drafter=drafter(self.drafter),
            apart=self.apart and (target(self.apart[0]), drafter(self.apart[1])),
            plain=self.plain and target(self.plain),
        )

    def over(self, hop_s: float) -> "Case":
        """Return the case with messages from drafter to target that take `hop_s` seconds."""
        return self.changed(lambda costs: costs, lambda costs: replace(costs, hop_s=hop_s))


Change = Callable[[NodeCosts], NodeCosts]


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy with its numbers, and the figures of its rehearsal.

    k, window  None if the policy has no such number
    """

    policy: str
    k: int | None
    window: int | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of planning: all rehearsals, and the best one of each policy.

    plain  decoding without drafts
    best   the fastest cell of each policy that drafts, in the order of the table
    cells  all cells
    """

    plain: Cell
    best: tuple[Cell, ...]
    cells: tuple[Cell, ...]

    def speedup(self, cell: Cell) -> float:
        """Return how many times faster a cell is than plain decoding."""
        return cell.figures.tokens_per_second / self.plain.figures.tokens_per_second

    @property
    def winner(self) -> Cell | None:
        """Return the fastest cell; None if it is less than PAYS times as fast as plain decoding."""
        cell = max(self.best, key=self.speedup)
        return cell if self.speedup(cell) >= PAYS else None


def make_plan(
    case: Case,
    drafts: Sequence[int] = DRAFTS,
    wider: Sequence[int] = WIDER,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Rehearse every policy with several K, and its best K with wider windows; return all.

    drafts  values of K, ascending; K is raised or lowered as long as that makes the policy faster
    wider   further windows
    say     is told which policy is being rehearsed
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


def _climbed(row: PolicyRow, case: Case, drafts: Sequence[int], window: int | None) -> list[Cell]:
    """Climb from the K at a third of `drafts` while it gets faster; return all rehearsed cells."""
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


def _cell(row: PolicyRow, case: Case, k: int | None, window: int | None) -> Cell:
    policy = row.make(k or 0, max(k or 0, window or 0))
    figures = rehearse(policy, *case.costs(row), case.trace, case.at_once)
    return Cell(row.name, k, window, figures)


def _speed(cell: Cell) -> float:
    return cell.figures.tokens_per_second


def step_s(num_bytes: float, bandwidth: float, flops: float, peak: float) -> float:
    """Return the seconds of a forward on the roofline: max(bytes / bandwidth, FLOPs / peak).

    (Williams, Waterman and Patterson, "Roofline", CACM 2009.) Decoding reads every weight once for
    each forward, whatever its rows, and multiplies each weight with every row.

    num_bytes  bytes moved; bandwidth in bytes a second
    flops      floating-point operations; peak in FLOPs a second
    """
    return max(num_bytes / bandwidth, flops / peak)


def roofline(num_parameters: float, num_bytes: float, bandwidth: float, peak: float) -> Forwards:
    """Return the costs of forwards of a model whose weights are read once for all (few) rows.

    num_bytes  of the weights
    bandwidth  bytes a second
    peak       FLOPs a second; infinity: only reading the weights takes time
    """
    row_flops = FLOPS_PER_PARAMETER * num_parameters

    def of(num_rows: int) -> float:
        return step_s(num_bytes, bandwidth, num_rows * row_flops, peak)

    # Rows that can be computed in the time in which the weights are read.
    free = int(min(1e6, num_bytes / bandwidth * peak / row_flops))
    knots = sorted({1, max(1, free), max(1, free) + 1})
    return Forwards(tuple((rows, of(rows)) for rows in knots), row_flops / peak)
