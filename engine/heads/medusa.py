"""Medusa heads: each says of a feature of the target what comes so many tokens later.

    x + SiLU(W x + b), as often as it has layers, and then an output matrix (arXiv 2401.10774)

The feature is the state after the target's last norm. The target itself says what comes next, so
head i says what comes i + 2 tokens after the feature's own token. Owns the weights.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.errors import ModelError
from engine.forward.operators import Packer, Product
from engine.heads.head_tensors import HeadTensors
from engine.heads.target import Target

_PREFIXES = ("medusa_head.", "medusa_heads.")


@dataclass(frozen=True, slots=True)
class Medusa:
    """All heads of a checkpoint on their device.

    layers   of each head, in their order: W x + b
    outputs  of each head: its logits
    dtype    of the weights; features are brought to it
    """

    layers: Sequence[Sequence[Product]]
    outputs: Sequence[Product]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        """How many tokens ahead they say something, beside the next."""
        return len(self.outputs)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return [num_heads, n, V] float32, on the heads' device.

        features  [n, hidden_size] after the target's last norm, on the same device
        """
        if not len(features):  # packed weights take no empty rows
            shape = self.num_heads, 0, self.vocab_size
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        with torch.inference_mode():
            features = features.to(self.dtype)
            made = []
            for layers, output in zip(self.layers, self.outputs, strict=True):
                hidden = features
                for layer in layers:
                    hidden = hidden + F.silu(layer(hidden))
                made.append(output(hidden))
            return torch.stack(made).float()


def read_medusa(
    num_heads: int,
    num_layers: int,
    tensors: HeadTensors,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
) -> Medusa:
    """Take the heads of a checkpoint; one without an output matrix has its target's.

    num_heads  as config.json says; there may be more, as of some well-known heads, and all are used

    Raises:
        ModelError: a tensor is missing, has another size, or nobody knows what it is for.
    """
    prefix = next((p for p in _PREFIXES if any(n.startswith(p) for n in tensors)), "")
    of_head = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    numbers = {int(found[1]) for name in tensors if (found := of_head.match(name))}
    num_heads = max(num_heads, len(numbers))
    packer, size, shared = Packer(), target.hidden_size, None
    layers: list[list[Product]] = []
    outputs: list[Product] = []
    for head in range(num_heads):
        name = f"{prefix}{head}"
        parts = [tensors.linear(f"{name}.{i}.linear", size, size) for i in range(num_layers)]
        layers.append([packer.take([part.to(device, dtype)]) for part in parts])
        if f"{name}.{num_layers}.weight" in tensors:
            own = tensors.linear(f"{name}.{num_layers}", target.vocab_size, size)
            outputs.append(packer.take([own.to(device, dtype)]))
            continue
        if shared is None:
            shared = packer.take([target.output().to(device, dtype)])
        outputs.append(shared)
    tensors.refuse_rest()
    if not outputs:
        raise ModelError(f"{tensors.path}: it has no Medusa heads; get it again")
    return Medusa(layers, outputs, target.vocab_size, dtype, device)
