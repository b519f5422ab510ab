"""What rank 0 tells its followers: each call of a backend, before it runs its own part.

They cross a pipe between a process and its own child, pickled. Nothing here imports torch: a
follower reads the first before it does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.layout.slots import LaneLayout, Span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.choice.coupling_on_gpu import Choice

    Int64s = npt.NDArray[np.int64]

FAILED, UNUSABLE = 1, 2  # exit statuses of a follower, as those of a node


@dataclass(frozen=True, slots=True)
class Start:
    """The first: which rank of which model. As `load_model` and `group.meet` take them.

    parent_pid  the process that is rank 0
    """

    model: str
    revision: str | None
    dtype: str
    device: str
    rank: int
    num_ranks: int
    store: str
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Plain:
    """Run the model's own forward, without a cache; ids [1, n]."""

    ids: "Int64s"


@dataclass(frozen=True, slots=True)
class FindFree:
    """Every rank looks how many bytes of its device are free, and all get the lowest number."""


@dataclass(frozen=True, slots=True)
class MakeBackend:
    """Make a backend, in the place of any before: as `engine.forward.backends.make_backend`."""

    name: str
    lanes: LaneLayout
    row_counts: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """As `Backend.take_over`."""

    timed: bool


@dataclass(frozen=True, slots=True)
class Loading:
    """Set `Backend.is_loading`."""

    is_loading: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """As `Backend.forward`."""

    rows: "Int64s"
    spans: tuple[Span, ...]
    num_visible: int
    keep: "Int64s | None"
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """As `Backend.chain`. Every rank chooses, and all choose the same: of the same logits."""

    steps: "Int64s"
    num_visible: int
    choice: "Choice"


@dataclass(frozen=True, slots=True)
class MoveSlots:
    """As `Backend.move`."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopySlots:
    """As `Backend.copy`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class WipeSlots:
    """As `Backend.wipe`."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class FindNotFinite:
    """As `Backend.not_finite`. Every rank looks at its own heads, and all get the lowest result."""

    first: int
    length: int


Call = (
    Plain
    | FindFree
    | MakeBackend
    | TakeOver
    | Loading
    | Forward
    | Chain
    | MoveSlots
    | CopySlots
    | WipeSlots
    | FindNotFinite
)
