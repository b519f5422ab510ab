"""Read the tensors of a head's checkpoint, from safetensors or PyTorch's own format.

Code in such files is never run. Quantised weights are dequantised. Owns the checks that each tensor
has its expected shape and that none is left over. Knows no kind of head.
"""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.checkpoint.files import one_line, read_config, weight_files
from engine.errors import GET_AGAIN, ModelError
from engine.heads.stated import INDEX, WHOLE, head_file
from engine.quantised.formats import GgufFile, Packing, read_format
from engine.quantised.packed_checkpoint import PackedCheckpoint
from proto.system import cannot_read

# Number types that are read; others would need further tensors (scales), as in a quantised head.
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16)


class HeadTensors:
    """The tensors of a head's checkpoint by name; remembers which were taken.

    A prefix `model.` of a name is removed.

    path  path of the file that messages name
    """

    def __init__(self, folder: Path, target: str) -> None:
        """Read all tensors of a folder; `target` is the target's name, for messages.

        Raises:
            ModelError: there is no file of tensors, or it cannot be read, or it holds code.
        """
        self.path, self._target = head_file(folder), target
        self._tensors = {
            name.removeprefix("model."): tensor for name, tensor in _read(folder, self.path)
        }
        self._are_packed = _packing(folder, self.path) is not None
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def num_taken(self) -> int:
        """Return the number of weights in the tensors taken so far, integers not counted."""
        taken = (self._tensors[name] for name in self._taken)
        return sum(tensor.numel() for tensor in taken if tensor.is_floating_point())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor; float32 if there is none.

        Of a quantised head the first one that is no matrix, because matrices were dequantised.
        """
        types = (
            t.dtype
            for t in self._tensors.values()
            if t.dtype in _PLAIN and (t.dim() == 1 or not self._are_packed)
        )
        return next(types, torch.float32)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the floating-point tensor `name`, which must have this shape.

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
        """Return the tensor of integers `name`, which must have this shape, as int64.

        Raises:
            ModelError: it is missing, or has another shape or type.
        """
        tensor = self._taken_as(name, shape)
        if tensor.dtype not in _WHOLE_NUMBERS:
            self._refuse_type(name, tensor, "whole numbers (int64, int32 or int16)")
        return tensor.long()

    def _refuse_type(self, name: str, tensor: torch.Tensor, wanted: str) -> NoReturn:
        """Raise ModelError that says which number types the tensor may have."""
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"{self.path}: {name} holds numbers of type {kind}, and they must be {wanted}; get a "
            "head with plain weights"
        )

    def _taken_as(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name` and note it as taken. Raises ModelError for another shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self.path}: it lacks the tensor {name}; it is incomplete, or a head of another "
                "kind: get it again"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.path}: {name} is {list(tensor.shape)}, but for the target {self._target} "
                f"it must be {list(shape)}; use a head made for this target"
            )
        self._taken.add(name)
        return tensor

    def linear(self, name: str, rows: int, columns: int) -> torch.nn.Linear:
        """Return the linear layer `name` [rows, columns], with its bias if it has one.

        Raises:
            ModelError: as `take`.
        """
        weight = self.take(f"{name}.weight", rows, columns)
        bias = self.take(f"{name}.bias", rows) if f"{name}.bias" in self else None
        return linear(weight, bias)

    def targets(self, draft_vocab: int, vocab_size: int) -> torch.Tensor | None:
        """Return the target's token i + d2t[i] of each draft token i, int64; None: equal ids.

        draft_vocab  number of tokens that the head can draft
        vocab_size   number of tokens of the target

        Raises:
            ModelError: d2t names tokens that the target lacks, or names a token twice.
        """
        if draft_vocab == vocab_size and "d2t" not in self:
            return None
        own = torch.arange(draft_vocab)
        found = own + self.take_whole("d2t", draft_vocab)
        if int(found.min()) < 0 or int(found.max()) >= vocab_size:
            raise ModelError(
                f"{self.path}: d2t leads to the tokens {int(found.min())} to {int(found.max())}, "
                f"but {self._target} has 0 to {vocab_size - 1}; use a head made for this target"
            )
        if len(set(found.tolist())) < draft_vocab:
            raise ModelError(f"{self.path}: d2t leads to a token twice; get the head again")
        return None if draft_vocab == vocab_size and torch.equal(found, own) else found

    def refuse_rest(self, *unused: str) -> None:
        """Raise ModelError if a tensor was not taken: without it, it would be another model.

        unused  endings of the names of tensors that may be left over
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


def _read(folder: Path, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all files of a checkpoint, dequantised where they are packed."""
    if (form := _packing(folder, path)) is not None:
        for name, lazy in PackedCheckpoint(folder, form).whole().items():
            yield name, lazy[...]
        return
    if path.suffix in (".pt", ".bin"):
        yield from _unpickled(path).items()
        return
    for file in weight_files(folder) if path.name == INDEX else [path]:
        try:
            yield from load_file(file).items()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read: {cannot_read(error, GET_AGAIN)}") from error


def _packing(folder: Path, path: Path) -> Packing | None:
    """Return how a head's weights are quantised; None: they are plain. Raises ModelError."""
    if path.name not in (WHOLE, INDEX):
        return None
    form = read_format(folder / "config.json", read_config(folder))
    return None if isinstance(form, GgufFile) else form


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in PyTorch's own format, by name; never runs code in it.

    Raises:
        ModelError: the file cannot be read, or holds anything but tensors by name.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of files that are refused below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: it holds code or objects besides tensors, which is never run; get the head "
            "as safetensors"
        ) from error
    except Exception as error:  # torch follows what it reads: any error is possible
        raise ModelError(f"{path}: cannot be read: {one_line(error)}; get it again") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise ModelError(f"{path}: it must hold tensors by name and nothing else; get it again")
    return found
