"""The messages from rank 0 to its followers: each call of a backend, sent before rank 0 runs it.

They are pickled and sent through a pipe from a process to its own child. Nothing here imports
torch, because a follower reads the first message before it imports torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.layout.slots import LaneLayout, Span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.choice.coupling_on_gpu import Choice

    Int64s = npt.NDArray[np.int64]

FAILED, UNUSABLE = 1, 2  # exit statuses of a follower, the same as a node's


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: which model to load, and which rank the follower is.

    model, revision, dtype, device, max_len  as for `load_model`
    rank, num_ranks, store  as for `group.meet`
    parent_pid  process id of rank 0
    """

    model: str
    revision: str | None
    dtype: str
    device: str
    rank: int
    num_ranks: int
    store: str
    parent_pid: int
    max_len: int = 0


@dataclass(frozen=True, slots=True)
class Plain:
    """Run the model's own forward, without a cache; ids [1, n]."""

    ids: "Int64s"


@dataclass(frozen=True, slots=True)
class FindFree:
    """Find the free bytes of every rank's device; all ranks get the lowest number."""


@dataclass(frozen=True, slots=True)
class MakeBackend:
    """Make a backend (`engine.forward.backends.make_backend`); it replaces any earlier one."""

    name: str
    lanes: LaneLayout
    row_counts: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Call `Backend.take_over`."""

    timed: bool


@dataclass(frozen=True, slots=True)
class Loading:
    """Set `Backend.is_loading`."""

    is_loading: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """Call `Backend.forward`; rows [5 + 2 * number of windows, n] and keep [k] are int64."""

    rows: "Int64s"
    spans: tuple[Span, ...]
    num_visible: int
    keep: "Int64s | None"
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Call `Backend.chain`; every rank chooses the tokens itself, from the same logits."""

    steps: "Int64s"
    num_visible: int
    choice: "Choice"


@dataclass(frozen=True, slots=True)
class MoveSlots:
    """Call `Backend.move`."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Call `Backend.copy`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class WipeSlots:
    """Call `Backend.wipe`."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class FindNotFinite:
    """Call `Backend.not_finite` for every rank's own heads; all ranks get the lowest result."""

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
