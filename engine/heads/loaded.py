"""A loaded head and its properties. `Loaded` stands for a loaded model or a loaded head."""

from dataclasses import dataclass

import torch

from engine.checkpoint.model import DTYPES, LoadedModel
from engine.heads.dflash import DFlash
from engine.heads.eagle_layer import EagleHead
from engine.heads.medusa import Medusa
from engine.heads.mtp import MtpHead
from engine.tensor_parallel.group import Rank
from proto.head_kinds import HeadKind


@dataclass(slots=True)
class LoadedHead:
    """A head on its device, with its properties under the same names as in `LoadedModel`.

    kind          Medusa, EAGLE, EAGLE-3, MTP or DFlash
    name          its name as the user gave it
    layers        target layers whose features (hidden states) it reads; -1: after the last norm
    hidden_size   the target's hidden size
    vocab_size    V, the number of logits of a row: the same for target and head
    max_model_len  number of positions that it can take
    eos_token_ids  the target's end-of-text ids
    num_parameters  number of its own weights, without those that it shares with the target
    feature_dtype  number type in which features arrive: float32, bfloat16 or float16. It may be set
                  until the first pass with features
    rank          always None: a head is never divided among ranks
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
    module: Medusa | EagleHead | MtpHead | DFlash
    feature_dtype: str = "float32"
    rank: Rank | None = None

    @property
    def depth(self) -> int | None:
        """Return the most tokens that the head can draft in a row; None: any number."""
        if isinstance(self.module, DFlash):
            return self.module.config.block - 1
        return self.module.num_heads if isinstance(self.module, Medusa) else None

    @property
    def group(self) -> int:
        """Return how many query heads share a key head; 1 for Medusa, which has none."""
        if isinstance(self.module, Medusa):
            return 1
        if isinstance(self.module, MtpHead):
            return self.module.config.group
        return self.module.config.num_heads // self.module.config.num_kv_heads

    @property
    def feature_size(self) -> int:
        """Return how many numbers the features of one token have."""
        return len(self.layers) * self.hidden_size

    @property
    def feature_bytes(self) -> int:
        """Return how many bytes the features of one token have, in `feature_dtype`."""
        return self.feature_size * DTYPES[self.feature_dtype].itemsize

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of memory for one token of a text: keys, values and state.

        1 for Medusa, which keeps none of them.
        """
        if isinstance(self.module, Medusa):
            return 1
        if isinstance(self.module, MtpHead):
            sizes, num_layers = self.module.config, len(self.module.layers)
            return sizes.slot_bytes + num_layers * sizes.width * self.module.embeddings.itemsize
        if isinstance(self.module, DFlash):
            of = self.module.config
            num_numbers = 2 * len(of.windows) * of.num_kv_heads * of.dim
            return num_numbers * self.module.embeddings.itemsize
        config = self.module.config
        num_numbers = 2 * config.num_kv_heads * config.dim + config.width
        return num_numbers * self.module.embeddings.itemsize

    def features_of(self, data: bytes | bytearray, count: int) -> torch.Tensor:
        """Return received bytes as features [count, feature_size] in their dtype, on the CPU.

        data  a bytearray is not copied; it may not be changed as long as the features are used
        """
        assert len(data) == count * self.feature_bytes, (
            f"features of {len(data)} bytes for {count} rows"
        )
        writable = data if isinstance(data, bytearray) else bytearray(data)  # torch warns of others
        numbers = torch.frombuffer(writable, dtype=DTYPES[self.feature_dtype])
        return numbers.view(count, self.feature_size)


Loaded = LoadedModel | LoadedHead
"""A loaded model or head; both have name, sizes, dtype and device under the same names."""
