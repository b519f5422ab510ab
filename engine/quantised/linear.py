"""A linear layer whose weight is a quantised matrix, and models that are made of such layers.

`QuantisedLinear` stands where transformers has a `torch.nn.Linear`. Its own forward dequantises the
whole weight every time: it is slow, and there for the check at load, where the fast forward
(`engine/forward/linears.py`) is compared with it. Knows no file and no kernel.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from engine.quantised.matrix import QuantisedMatrix


class QuantisedLinear(torch.nn.Module):
    """A linear layer with a quantised weight. The weight is no parameter of the module.

    in_features, out_features  the weight's numbers of inputs and outputs
    bias                       parameter [out_features], or None
    """

    def __init__(self, matrix: QuantisedMatrix, *, has_bias: bool) -> None:
        """Hold the matrix; the bias is left uninitialised, for transformers to read."""
        super().__init__()
        self._matrix: QuantisedMatrix | None = matrix
        self.out_features, self.in_features = matrix.shape
        bias = torch.nn.Parameter(torch.empty(self.out_features)) if has_bias else None
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def matrix(self) -> QuantisedMatrix:
        """Return the weight; only before `free`."""
        assert self._matrix is not None, "its weight was freed"
        return self._matrix

    def free(self) -> None:
        """Drop the weight: something else computes with it. `forward` cannot run after."""
        self._matrix = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b, with the weight dequantised to the type of `x`."""
        return F.linear(x, self.matrix.dequantised(x.dtype), self.bias)


def kind_of_quantised(kind: Any, matrices: Mapping[str, QuantisedMatrix]) -> Any:
    """Return a subclass of the transformers model `kind` with quantised layers.

    Transformers constructs the model that it reads weights into, so the class must replace the
    layers when it is constructed. The class keeps its name, by which transformers knows it.

    matrices  path of a linear layer in the model -> its weight
    """

    def begin(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        for path, matrix in matrices.items():
            has_bias = self.get_submodule(path).bias is not None
            self.set_submodule(path, QuantisedLinear(matrix, has_bias=has_bias))

    return type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})


def is_quantised(model: Any) -> bool:
    """True if the model has layers whose weights are quantised matrices."""
    return any(isinstance(part, QuantisedLinear) for part in model.modules())


def kept_bytes(model: Any) -> int:
    """Return the bytes of a model's quantised matrices; call it before any of them is freed."""
    layers = (part for part in model.modules() if isinstance(part, QuantisedLinear))
    return sum(layer.matrix.nbytes for layer in layers)
