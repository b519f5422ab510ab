"""Round plain weights to 8 or 4 bits (`--quantization`): weights only, to the nearest code.

    int8  the number of a group's largest size is code 127 or -127
    int4  the number of a group's largest size is code 0, and 8 stands for zero; the output matrix
          is rounded to 8 bits

A group of 128 inputs shares a scale in 8 bits, of 64 in 4 bits (fewer if these do not come out
even: 64, 32). Scales are rounded to float16 before the codes are chosen. Embeddings, norms and
biases stay as they are. docs/quantised.md has what each choice costs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from engine.checkpoint.parts import Lazy
from engine.errors import ModelError
from engine.quantised.matrix import QuantisedMatrix, in_pairs

BITS = {"int8": 8, "int4": 4}
GROUP = 32
_GROUPS = {8: (128, 64, GROUP), 4: (64, GROUP)}  # an instruction of AMX takes 64 at once
_AT_ONCE = 1 << 22  # weights rounded at a time, because float32 takes twice or four times as much


def quantised(weight: torch.Tensor, bits: int) -> QuantisedMatrix:
    """Return a plain weight [out, in] rounded to 8 or 4 bits; `in` is a multiple of `GROUP`."""
    assert weight.shape[1] % GROUP == 0, "no whole groups"
    step = max(1, _AT_ONCE // weight.shape[1])
    parts = [_rounded(weight[i : i + step].float(), bits) for i in range(0, len(weight), step)]
    return QuantisedMatrix(
        bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
    )


def _group(num_inputs: int, bits: int) -> int:
    """Return how many inputs share a scale."""
    return next(group for group in _GROUPS[bits] if num_inputs % group == 0)


def _rounded(weight: torch.Tensor, bits: int) -> QuantisedMatrix:
    """Return some rows of a weight, float32, rounded."""
    groups = weight.view(len(weight), -1, _group(weight.shape[1], bits))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half()
    codes = (groups / torch.where(scales == 0, 1.0, scales.float())[..., None]).round_()
    if bits == 8:
        return QuantisedMatrix(8, codes.clamp_(-127, 127).to(torch.int8).flatten(1), scales)
    pairs = (codes + 8).clamp_(0, 15).to(torch.uint8).flatten(1)
    return QuantisedMatrix(4, in_pairs(pairs), scales)


def num_bytes(model: Any, method: str) -> int:
    """Return the bytes that a model's quantised matrices will take."""
    return sum(
        weight.numel() * bits // 8 + 2 * weight.numel() // _group(weight.shape[1], bits)
        for _, weight, bits in _linears(model, method)
    )


def matrices(
    name: str, model: Any, tensors: Mapping[str, Lazy], method: str
) -> Iterator[tuple[str, QuantisedMatrix]]:
    """Yield (path in the model, quantised weight) of every linear layer, reading one at a time.

    name     the model's name, for messages
    model    the model on `meta` (without memory)
    tensors  its plain tensors by name, read when used

    Raises:
        ModelError: a matrix cannot be divided into groups, or holds NaN or infinity.
    """
    shared = f"{_path_of(model, model.get_input_embeddings())}.weight"
    prefix = f"{model.base_model_prefix}."
    for path, weight, bits in _linears(model, method):
        if weight.shape[1] % GROUP:
            raise ModelError(
                f"{name}: {path} has {weight.shape[1]} inputs, which are no whole groups of "
                f"{GROUP}; leave --quantization out"
            )
        own = f"{path}.weight"
        # The output matrix may be that of the embeddings.
        names = (own, own.removeprefix(prefix), shared, shared.removeprefix(prefix))
        read = tensors[next(one for one in names if one in tensors)][...]
        if not torch.isfinite(read.sum(dtype=torch.float32)) and not torch.isfinite(read).all():
            raise ModelError(
                f"{name}: the weight {own} holds NaN or infinity; get the checkpoint again"
            )
        yield path, quantised(read, bits)


def _linears(model: Any, method: str) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield (path, weight on `meta`, bits) of every linear layer of a model."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield path, module.weight, 8 if module is head else BITS[method]


def _path_of(model: Any, wanted: Any) -> str:
    """Return the path of a module in a model."""
    return next(str(path) for path, module in model.named_modules() if module is wanted)
