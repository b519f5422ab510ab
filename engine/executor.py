"""`Executor`: the interface that runs the passes of a model or of a head, with its cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.choice.coupling_on_gpu import Choice
from engine.forward.forward import Layers, Output
from engine.layout.attention_windows import AttentionWindow
from engine.layout.slots import Feed, LaneLayout, Move
from engine.timing import fewest_seconds

_NUM_TIMED = 3  # passes timed per shape; the quickest counts


class Executor(Protocol):
    """Interface that runs the passes of a model or of a head (`heads/`), with its cache.

    capacity            slots of each lane for tokens (scratch slots not counted)
    lanes               how the cache is divided among texts, one lane each
    num_lanes_per_pass  most lanes (texts) in one pass
    fixed_rows          rows per lane of every pass in reproducible mode; None: normal mode
    windows             the attention windows that the model's layers have, for `SlotMap`
    """

    capacity: int
    lanes: LaneLayout
    num_lanes_per_pass: int
    fixed_rows: int | None = None
    windows: tuple[AttentionWindow, ...] = ()

    @property
    def backend(self) -> str:
        """Return the name of the backend that runs the forward."""

    @property
    def forms(self) -> str:
        """Return in words what computes the passes, for people; "": there is nothing to say."""
        return ""

    @property
    def num_uncaptured(self) -> int:
        """Return how many decode passes had no recording (CUDA graph) and ran kernel by kernel."""
        return 0

    @property
    def num_late(self) -> int:
        """Return how many recordings (CUDA graphs) were made after load, while texts waited."""
        return 0

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """True if `run_chain` may be called: there is a recording of so many steps and `choice`."""
        del feeds, choice
        return False

    def set_total(self, total: int | None) -> None:
        """Let every pass cover `total` slots from now on; None: as needed (heads: None only)."""
        assert total is None, f"{self.backend} has no reproducible mode"

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> Any:
        """Lay out a pass on the host; return it in the form that `forward` takes.

        feeds  rows of different lanes, at most `num_lanes_per_pass` feeds
        asks   per feed, the indices of its rows whose logits are wanted
        """

    def forward(self, step: Any, layers: Layers = ()) -> Output:
        """Run a laid-out pass on the device; return logits and features.

        step    the pass, as returned by `lay_out`
        layers  layers whose hidden states (features) are wanted, of all rows; () for heads

        The logits are float32 [number asked, V], in the order of `asks`, or of some tokens
        (`Output.ids`); the features are those of all rows, feed by feed, or None. Both are valid
        until the next pass.
        """

    def run(self, feed: Feed, ask: Sequence[int]) -> torch.Tensor:
        """Run one pass: write its keys and values, and return the logits of the rows in `ask`.

        Returns [len(ask), V] float32 on the model's device, in the order of `ask`. `ask` may be
        empty; logits that are not asked for are not computed, except in padded passes. The result
        stays valid after later passes.
        """
        return self.run_together((feed,), (ask,))

    def run_together(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run several lanes' rows as one pass; return the logits of each, concatenated."""
        return self.forward(self.lay_out(feeds, asks)).logits

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Run n draft steps of one row, each with the token chosen before; needs `can_chain`.

        feeds   n feeds of one row of the same lane; only the first one's token is used
        choice  how one token is chosen after each step
        inputs  [n + NUM_SETTINGS] int64 on the host: `choice_inputs` of the steps

        Returns [n, 3] float64 on the device (`chosen_there` fetches it), valid until the next call.
        """
        del feeds, choice, inputs
        raise AssertionError(f"{self.backend} has no recordings")

    def move(self, *moves: Move) -> None:
        """Copy cache slots as the moves of `SlotMap.advance` say, for all lanes in one gather."""

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of one lane to another lane, whose text begins alike."""

    def wipe(self, lane: int, start: int) -> None:
        """Write zeros to all slots of a lane from `start` on, its scratch included."""

    def not_finite(self, lane: int) -> int | None:
        """Return the slot of a lane in which NaN or infinity first occurred, or None.

        Only for models, not for heads (`Backend.not_finite`).
        """
        del lane
        raise AssertionError(f"{self.backend} does not look for it")

    def warm_up_prompts(self) -> None:
        """Run prefill chunks before texts come, again where memory was given back (not heads)."""
        return

    def seconds_of(self, feed: Feed) -> float:
        """Return the fewest seconds of some runs of a pass, each until a logit is on the host."""
        ask = range(len(feed.tokens))
        passes = {"": lambda: self.run(feed, ask)[0, 0].item()}
        return fewest_seconds(passes, _NUM_TIMED)[""]
