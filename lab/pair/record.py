"""The file that `measure` writes, and `plan` reads: what was measured of a pair.

One JSON object. Times are in milliseconds, as a reader of the file wants them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from lab.records import NO_OTHERS
from proto.policies import POLICIES, PolicyName
from rehearsal.acceptance import Position, Trace
from rehearsal.planning import DRAFTER_ROWS, TARGET_ROWS
from rehearsal.setting import Forwards, NodeCosts

FORMAT, VERSION = "slipstream pair", 2
LONGEST_MS = 1e6  # of a forward or a message; a file with more was not measured


@dataclass(frozen=True, slots=True)
class Share:
    """A chance, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SeenText:
    """A text of the target as the drafter saw it; see `lab.pair.requests`."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    seed: int
    overlaps: tuple[float, ...]
    ranks: tuple[int | None, ...]
    scores: tuple[tuple[float, ...], ...]

    @property
    def positions(self) -> tuple[Position, ...]:
        """Return the text as `plan` rehearses it."""
        return tuple(Position(*each) for each in zip(self.ranks, self.scores, strict=True))


@dataclass(frozen=True, slots=True)
class Chances:
    """How often drafts are right on the target's own texts at one temperature.

    alpha  mean of sum over tokens of min(p, q): of the classical rules (`--verify token`)
    ranks  chance that the drafter's first, second ... choice is the target's token: of the coupled
           rule, which is the default
    """

    temperature: float
    num_tokens: int
    alpha: Share
    ranks: tuple[Share, ...]
    texts: tuple[SeenText, ...]


Curve = tuple[tuple[int, float], ...]
"""Pairs of a number of rows and the milliseconds of a forward of so many rows, ascending."""


class Kind(Enum):
    """How the two models take turns under a policy.

    PLAIN   nothing is drafted
    APART   the drafter waits during a pass, and the target waits for the drafts (`sync`)
    BESIDE  the drafter goes on during a pass; how much of it, its own speed and the policy decide
    """

    PLAIN = "plain"
    APART = "apart"
    BESIDE = "beside"


def kind_of(policy: PolicyName) -> Kind:
    """Return how the two models take turns under a policy."""
    row = POLICIES[policy]
    return Kind.BESIDE if row.runs_ahead else Kind.APART if row.drafts else Kind.PLAIN


@dataclass(frozen=True, slots=True)
class Hosts:
    """Microseconds of a host for each forward, by the `Kind` of policy; messages cost it time."""

    plain: float
    apart: float
    beside: float


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """What one of the two models is and costs, where `generate` would put it.

    plain, apart, beside  its forwards under each `Kind` of policy; the drafter has no plain ones
    overlap               share of its `beside` forwards' time in which the other model ran as well
    stalled               share of all its forwards' time that was lost because the machine did
                          other things
    memory_mib            memory of its process, without that of a GPU; None: not known here
    """

    model: str
    dtype: str
    device: str
    backend: str
    num_parameters: int
    plain: Curve
    apart: Curve
    beside: Curve
    overlap: float
    stalled: float
    host_us: Hosts
    memory_mib: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a policy was on the same texts, and how fast `plan` expects it to be.

    temperature      at which the texts were written
    drafts_accepted  share of the drafts in its passes that were accepted; None: there were none
    """

    temperature: float
    policy: str
    tokens_per_second: float
    predicted: float
    tokens_per_pass: float
    drafts_accepted: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """The best policy for some costs. `what` says what is different from what was measured.

    flags  for `generate`; for the policy `ar` if speculation does not pay
    """

    what: str
    flags: str
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured of a pair.

    way_ms  a draft from the drafter to the target
    """

    __pydantic_config__: ClassVar = NO_OTHERS

    format: str
    version: int
    machine: str
    target: MeasuredNode
    drafter: MeasuredNode
    way_ms: float
    chances: tuple[Chances, ...]
    speeds: tuple[Speed, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def nodes(self) -> tuple[MeasuredNode, MeasuredNode]:
        """Return target and drafter."""
        return self.target, self.drafter

    def costs(self, kind: Kind) -> tuple[NodeCosts, NodeCosts]:
        """Return the costs of target and drafter under a kind of policy."""
        return (
            _costs(self.target, 0.0, TARGET_ROWS, kind),
            _costs(self.drafter, self.way_ms / 1e3, DRAFTER_ROWS, kind),
        )

    def trace(self, temperature: float) -> Trace:
        """Return how the drafter ranked the texts of the nearest temperature."""
        near = min(self.chances, key=lambda found: abs(found.temperature - temperature))
        return tuple(text.positions for text in near.texts if text.ranks)


def _costs(node: MeasuredNode, hop_s: float, rows: tuple[int, ...], kind: Kind) -> NodeCosts:
    apart, beside = node.apart or node.beside, node.beside or node.apart
    curve = {Kind.PLAIN: node.plain or apart, Kind.APART: apart, Kind.BESIDE: beside}[kind]
    host_us: float = getattr(node.host_us, kind.value)
    known = tuple((num_rows, ms / 1e3) for num_rows, ms in curve)
    (first, first_s), (last, last_s) = known[0], known[-1]
    row_s = (last_s - first_s) / (last - first) if last > first else 0.0
    return NodeCosts(Forwards(known, row_s), host_us / 1e6, hop_s, rows)


def is_complete(found: Measured) -> bool:
    """True if a file of this version has costs and texts with which `plan` can rehearse."""
    curves = [curve for node in found.nodes for curve in (node.plain, node.apart, node.beside)]
    texts = [text for one in found.chances for text in one.texts]
    return (
        (found.format, found.version) == (FORMAT, VERSION)
        and all(node.apart or node.beside for node in found.nodes)
        and all(map(_is_curve, curves))
        and 0 <= found.way_ms < LONGEST_MS
        and all(any(text.ranks for text in one.texts) for one in found.chances)
        and all(len(text.ranks) == len(text.scores) and all(text.scores) for text in texts)
        and bool(texts)
    )


def _is_curve(curve: Curve) -> bool:
    """True if rows ascend from 1 on, and times are positive and do not fall."""
    rows, times = [rows for rows, _ in curve], [ms for _, ms in curve]
    return (
        all(0 < ms < LONGEST_MS for ms in times)
        and times == sorted(times)
        and rows == sorted(set(rows))
        and all(number > 0 for number in rows)
    )
