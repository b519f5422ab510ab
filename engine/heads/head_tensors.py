"""The tensors of a head's checkpoint: safetensors or PyTorch's own format, numbers alone.

Owns the names of the files, and that each tensor is taken once and with the size that it must have.
Knows no kind of head.
"""

import math
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.checkpoint.files import (
    THETAS,
    Object,
    one_line,
    refuse_number,
    refuse_odd_dim,
    refuse_odd_file,
    shown,
    weight_files,
)
from engine.errors import ModelError, remedy
from proto.head_kinds import HeadKind

# -- tensors ---------------------------------------------------------------------------------------

# In this order: what is safe to read first. No other name is looked for.
_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# Number types that are read; of all others (FP8, integers) a head would need more than a tensor.
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16)
_WHOLE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


class HeadTensors:
    """The tensors of a checkpoint by name, without the prefix `model.` of some.

    path  of the file that they are named after in messages
    """

    def __init__(self, folder: Path, target: str) -> None:
        """Read the files of a folder; `target` is who has to fit, for messages.

        Raises:
            ModelError: there is none, or it cannot be read, or holds code.
        """
        self.path, self._target = _file_of(folder), target
        self._tensors = {
            name.removeprefix("model."): tensor for name, tensor in _read(folder, self.path)
        }
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def num_taken(self) -> int:
        """Parameters in the tensors that were taken."""
        taken = (self._tensors[name] for name in self._taken)
        return sum(tensor.numel() for tensor in taken if tensor.is_floating_point())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor of floating point."""
        types = (t.dtype for t in self._tensors.values() if t.dtype in _PLAIN)
        return next(types, torch.float32)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of this shape.

        Raises:
            ModelError: it is missing, or has another shape or type, or holds NaN or infinity.
        """
        tensor = self._taken_as(name, shape)
        if tensor.dtype not in _PLAIN:
            self._refuse_type(name, tensor, "float32, bfloat16 or float16")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{self.path}: {name} holds NaN or infinity; get it again")
        return tensor

    def take_whole(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of whole numbers as int64. Raises as `take`."""
        tensor = self._taken_as(name, shape)
        if tensor.dtype not in _WHOLE_NUMBERS:
            self._refuse_type(name, tensor, "whole numbers (int64, int32 or int16)")
        return tensor.long()

    def _refuse_type(self, name: str, tensor: torch.Tensor, wanted: str) -> NoReturn:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"{self.path}: {name} holds numbers of type {kind}, and they must be {wanted}; get the "
            "checkpoint again, or one with plain weights"
        )

    def _taken_as(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of this shape. Raises ModelError."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self.path}: it lacks the tensor {name}; it is incomplete, or a head of another "
                "kind: get it again"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.path}: {name} is {list(tensor.shape)}, but by config.json and for the "
                f"target {self._target} it must be {list(shape)}; use a head made for this target"
            )
        self._taken.add(name)
        return tensor

    def linear(self, name: str, rows: int, columns: int) -> torch.nn.Linear:
        """Return the linear layer `name`, with a bias if there is one. Raises as `take`."""
        weight = self.take(f"{name}.weight", rows, columns)
        bias = self.take(f"{name}.bias", rows) if f"{name}.bias" in self else None
        return linear(weight, bias)

    def refuse_rest(self, *unused: str) -> None:
        """Raise ModelError if there are tensors that nobody took: it would be another model.

        unused  how the names of those end that are known to be of no use
        """
        rest = [n for n in self if n not in self._taken and not n.endswith(unused)]
        if rest:
            raise ModelError(
                f"{self.path}: nobody here knows its tensor {min(rest)}; heads of this form are "
                "not covered, use another"
            )


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """Return the linear layer with this weight [rows, columns] and bias [rows]."""
    rows, columns = weight.shape
    made = torch.nn.Linear(columns, rows, bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = torch.nn.Parameter(bias, requires_grad=False)
    return made


def _file_of(folder: Path) -> Path:
    for name in (*_MEDUSA, _WHOLE, _INDEX, _PICKLED):
        path = folder / name
        if path.exists() or path.is_symlink():
            refuse_odd_file(path)
            return path
    raise ModelError(
        f"{folder}: no weights of a head; name them {_WHOLE} or {_PICKLED}, of Medusa {_MEDUSA[0]} "
        f"or {_MEDUSA[1]}"
    )


def _read(folder: Path, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all files of a checkpoint."""
    if path.suffix in (".pt", ".bin"):
        yield from _unpickled(path).items()
        return
    for file in weight_files(folder) if path.name == _INDEX else [path]:
        try:
            yield from load_file(file).items()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read: {remedy(error)}") from error


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """Return what a file of PyTorch's own format holds; what is no tensor is never run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of files that are refused below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: it holds code or objects besides tensors, which is never run; get the head "
            "as safetensors"
        ) from error
    except Exception as error:  # it follows what it reads, so anything may come of it
        raise ModelError(f"{path}: cannot be read: {one_line(error)}; get it again") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise ModelError(f"{path}: it must hold tensors by name and nothing else; get it again")
    return found


# -- stated ----------------------------------------------------------------------------------------

# What the config.json of a head may state, whatever its target: numbers, and their ranges.
#
# Without torch: whoever starts a node holds a head to this before he does, and the node again.

# What a configuration of the llama family means that does not say.
EPSILON, POSITIONS = 1e-6, 2048
MOST_MEDUSA = 1024
_EPSILONS = (1e-12, 0.1)
_ROPES = ("rope_scaling", "rope_parameters")
# The numbers that a kind of rotary embedding cannot do without; of the others transformers knows.
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (),
}


def refuse_odd_config(path: Path, stated: Object, kind: HeadKind) -> None:
    """Raise ModelError if a number that a head of this kind needs is missing or out of range.

    path    of config.json, for messages
    stated  what it holds
    """
    if kind is HeadKind.MEDUSA:
        medusa_counts(path, stated)
        return
    part = layer_config(path, stated)
    _refuse_other_forms(path, part)
    width, num_heads = count(path, part, "hidden_size"), count(path, part, "num_attention_heads")
    num_kv_heads = count(path, part, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_key_value_heads, {num_kv_heads}, does not divide num_attention_heads, "
            f"{num_heads}; one of them is wrong"
        )
    dim = count(path, part, "head_dim", width // num_heads or 1)
    of = "head_dim" if part.get("head_dim") else "hidden_size / num_attention_heads"
    refuse_odd_dim(path, of, dim)
    count(path, part, "intermediate_size")
    count(path, part, "max_position_embeddings", POSITIONS)
    refuse_number(path, part, "rms_norm_eps", _EPSILONS)
    _refuse_rope(path, part)
    if kind is HeadKind.EAGLE3:
        count(path, stated, "draft_vocab_size", 1)
        if not isinstance(found := stated.get("norm_before_residual"), bool | None):
            raise ModelError(
                f"{path}: norm_before_residual is {shown(found)}; it must be true or false"
            )


def medusa_counts(path: Path, stated: Object) -> tuple[int, int]:
    """Return how many Medusa heads there are, and layers of each. Raises ModelError."""
    num_heads = _in_range(path, stated, "medusa_num_heads", 1, (1, MOST_MEDUSA))
    return num_heads, _in_range(path, stated, "medusa_num_layers", 1, (0, MOST_MEDUSA))


def layer_config(path: Path, stated: Object) -> Object:
    """Return what describes the head's layer. Raises ModelError."""
    part = stated.get("transformer_layer_config", stated)
    if not isinstance(part, dict):
        raise ModelError(f"{path}: transformer_layer_config must be an object; get it again")
    return part


def count(path: Path, part: Object, field: str, default: int | None = None) -> int:
    """Return a number from 1 on that config.json states. Raises ModelError."""
    return _in_range(path, part, field, default, (1, (1 << 31) - 1))


def _in_range(
    path: Path, part: Object, field: str, default: int | None, between: tuple[int, int]
) -> int:
    found, (least, most) = part.get(field), between
    if found is None:
        found = default
    if type(found) is not int or not least <= found <= most:
        to = f"to {most}" if most == MOST_MEDUSA else "on"
        raise ModelError(
            f"{path}: {field} is {shown(part.get(field))}; it must be a whole number from {least} "
            f"{to}"
        )
    return found


def _refuse_other_forms(path: Path, part: Object) -> None:
    num_layers = count(path, part, "num_hidden_layers", 1)
    if num_layers != 1:
        raise ModelError(f"{path}: the head has {num_layers} layers; use one with a single layer")
    if part.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{path}: hidden_act is {shown(part['hidden_act'])}; only heads with silu are covered"
        )
    for stated in (part, *(rope for _, rope in _ropes(part))):
        if stated.get("partial_rotary_factor", 1) != 1:
            raise ModelError(f"{path}: partial_rotary_factor is not covered; use another head")


def _refuse_rope(path: Path, part: Object) -> None:
    refuse_number(path, part, "rope_theta", THETAS)
    for field in _ROPES:
        if part.get(field) is not None and not isinstance(part[field], dict):
            raise ModelError(
                f"{path}: its rotary embedding cannot be used: {field} is {shown(part[field])}, "
                "and it must be an object"
            )
    for field, rope in _ropes(part):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _NUMBERS:
            raise ModelError(
                f"{path}: its rotary embedding cannot be used: rope_type is {shown(kind)} in "
                f"{field}; there are {', '.join(_NUMBERS)}"
            )
        refuse_number(path, rope, "rope_theta", THETAS)
        for number in _NUMBERS[kind]:
            found = rope.get(number)
            if number == "original_max_position_embeddings":
                found = found or part.get(number)
            is_number = isinstance(found, int | float) and not isinstance(found, bool)
            if not is_number or not 0 < float(found or 0) < math.inf:
                raise ModelError(
                    f"{path}: its rotary embedding cannot be used: {number} is {shown(found)} in "
                    f"{field}, and {kind} needs a number above 0"
                )


def _ropes(part: Object) -> Iterator[tuple[str, Object]]:
    for field in _ROPES:
        if isinstance(rope := part.get(field), dict) and rope:
            yield field, rope
