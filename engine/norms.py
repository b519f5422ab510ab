"""Forms of the root-mean-square norm; which is fastest is timed, for processors differ.

x -> weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32. Owns the forms.
Knows no layer and no model.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from engine.linear import Product

Form = Callable[[torch.Tensor | None, int, float], Product]
"""(weight [dim], or None for ones; dim; epsilon) -> the norm"""


def of_pairs(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """The layer norm of [x, -x]: their mean is zero and their variance mean(x^2).

    Three operators, where torch on a CPU may spell the norm out in six.
    """
    both, shape = None if weight is None else torch.cat((weight, weight)), (2 * dim,)

    def norm(x: torch.Tensor) -> torch.Tensor:
        pair = torch.cat((x, x.neg()), -1)
        return torch.layer_norm(pair, shape, both, None, epsilon).narrow(-1, 0, dim)

    return norm


def at_once(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """Torch's own."""
    return lambda x: F.rms_norm(x, (dim,), weight, epsilon)


FORMS: Mapping[str, Form] = {"of pairs": of_pairs, "at once": at_once}


def rms_norm(weight: torch.Tensor, epsilon: float, form: Form) -> Product:
    """Return the norm with `weight` [dim] for each row, or [heads, dim] for each of its heads."""
    dim = weight.shape[-1]
    if weight.dim() == 1:
        return form(weight, dim, epsilon)
    norm = form(None, dim, epsilon)
    return lambda x: norm(x).mul_(weight)
