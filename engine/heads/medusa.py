"""Medusa heads: each predicts, from a hidden state of the target, the token some places ahead.

    x + SiLU(W x + b), once for each layer, and then an output matrix (arXiv 2401.10774)

The hidden state (feature) x is the one after the target's last norm. The target itself predicts the
next token, so head i predicts the token i + 2 places after the feature's own token. Owns the
weights.
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
    """All Medusa heads of a checkpoint on their device.

    layers   per head, its layers in order: functions x -> W x + b, [n, hidden_size] each
    outputs  per head, its output matrix: [n, hidden_size] -> logits [n, V]
    vocab_size  V
    dtype    number type of the weights; features are converted to it
    """

    layers: Sequence[Sequence[Product]]
    outputs: Sequence[Product]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        """Return the number of heads: each predicts one more token, after the target's next one."""
        return len(self.outputs)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits of all heads, [num_heads, n, V] float32, on the heads' device.

        features  [n, hidden_size]: the target's hidden states after its last norm, same device
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
    """Return the Medusa heads of a checkpoint; a head without an output matrix uses the target's.

    num_heads   number of heads in config.json; if the checkpoint has more (as some well-known ones
                do), all are used
    num_layers  number of layers of each head

    Raises:
        ModelError: a tensor is missing, has another shape, or is unknown.
    """
    prefix = next((p for p in _PREFIXES if any(n.startswith(p) for n in tensors)), "")
    of_head = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    numbers = {int(found[1]) for name in tensors if (found := of_head.match(name))}
    num_heads = max(num_heads, len(numbers))
    packer, size, shared = Packer(tiles=True), target.hidden_size, None
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
