"""A head that was loaded, and what its users must know of it. `Loaded`: a model or a head."""

from dataclasses import dataclass

import torch

from engine.checkpoint.model import DTYPES, LoadedModel
from engine.heads.eagle_layer import EagleHead
from engine.heads.medusa import Medusa
from engine.tensor_parallel.group import Rank
from proto.head_kinds import HeadKind


@dataclass(slots=True)
class LoadedHead:
    """A head on its device. What it has in common with a `LoadedModel` has the same name.

    kind          how it drafts
    layers        of the target, whose features it needs (-1: the state after the last norm)
    hidden_size   of the target
    vocab_size    columns of the target's logits, and of the head's
    max_model_len  positions that it can take
    eos_token_ids  the target's
    num_parameters  its own; what it shares with the target is not counted
    feature_dtype  the number type of features as they come: float32, bfloat16 or float16. Whoever
                  knows the target sets it, before the first pass that is given any
    rank          None: a head is never divided among ranks
    """

    kind: HeadKind
    name: str
    layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    module: Medusa | EagleHead
    feature_dtype: str = "float32"
    rank: Rank | None = None

    @property
    def depth(self) -> int | None:
        """Most tokens in a row that it drafts; None: any number."""
        return self.module.num_heads if isinstance(self.module, Medusa) else None

    @property
    def feature_size(self) -> int:
        """Numbers in the features that it is given of a token."""
        return len(self.layers) * self.hidden_size

    @property
    def feature_bytes(self) -> int:
        """How long those are, as they come."""
        return self.feature_size * DTYPES[self.feature_dtype].itemsize

    @property
    def slot_bytes(self) -> int:
        """How much memory one token of a text takes: keys, values and state; Medusa has none."""
        if isinstance(self.module, Medusa):
            return 1
        config = self.module.config
        num_numbers = 2 * config.num_kv_heads * config.dim + config.width
        return num_numbers * self.module.embeddings.itemsize

    def features_of(self, data: bytes, count: int) -> torch.Tensor:
        """Return features [count, feature_size] of what has come, in its type, on the CPU."""
        assert len(data) == count * self.feature_bytes, (
            f"features of {len(data)} bytes for {count} rows"
        )
        numbers = torch.frombuffer(bytearray(data), dtype=DTYPES[self.feature_dtype])
        return numbers.view(count, self.feature_size)


Loaded = LoadedModel | LoadedHead
"""What is on a device; both have the name, sizes, types and device under the same names."""
