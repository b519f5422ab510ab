"""Read only one rank's slices of a checkpoint's tensors (tensor parallelism).

While it loads, a rank holds its part of the model (`tensor_parallel/split.py`) and at most one
tensor more, however large the whole model is. Tensors may have other names in the files than in the
model, and experts are stored one by one; transformers' own conversion tables say how they
correspond. Owns which slice of a file's tensor belongs to which cut of a weight; knows no
quantisation and no device.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from engine.checkpoint.files import Names, Shapes, Stored, shapes_in, weight_files
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.split import Cut, split

_MAPPED_BYTES = 1 << 24  # bytes read through one mapping of a file before it is unmapped
_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"
_STACKING = (MergeModulelist, Concatenate)

Cuts = Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is read from its file only when it is used: `lazy[...]` calls `read`."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, _everything: object) -> torch.Tensor:
        """Read and return the whole tensor; the index is ignored."""
        return self.read()


class Files:
    """Reads tensors from a checkpoint's files, whole or in slices; usable from any thread.

    A file is mapped into memory while it is read. Every few megabytes it is mapped anew and the
    allocator's free memory is returned to the system, so that neither counts as memory of this
    process while it loads.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._open: dict[Path, tuple[Any, int]] = {}  # mapped file, bytes until it is mapped anew

    def slices(self, file: Path, name: str) -> Any:
        """Return a safetensors slice object of tensor `name`; indexing it reads from the file."""
        with self._guard:
            handle, left = self._open.pop(file, (None, 0))
            if left <= 0:
                _give_back()
                handle, left = safe_open(file, framework="pt"), _MAPPED_BYTES
            part = handle.get_slice(name)
            self._open[file] = handle, left - 4 * prod(part.get_shape())
        return part

    def tensor(self, file: Path, name: str) -> torch.Tensor:
        """Return a copy of the whole tensor `name` of a file."""
        whole: torch.Tensor = self.slices(file, name)[...]
        return whole.clone()


def _give_back() -> None:
    """Give the allocator's free memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cuts_in_files(empty: Any, shapes: Shapes, cuts: Cuts) -> dict[str, Cut] | None:
    """Return the rank's cut of each divided tensor, by the tensor's name in the files.

    empty   the whole model, on `meta` (without memory)
    shapes  name in the files -> shape of the tensor
    cuts    name in the model -> this rank's cut of the weight

    Returns None if a weight is assembled from file tensors in a way that cuts cannot be translated.
    """
    transforms = get_model_conversion_mapping(empty)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, whole = empty.base_model_prefix, empty.state_dict()
    found: dict[str, Cut] = {}
    for name, shape in shapes.items():
        target, pattern = rename_source_key(name, renamings, converters, prefix, whole)
        if target not in whole and name in whole:
            target, pattern = rename_source_key(name, [], [], prefix, whole)
        if target not in cuts:
            continue
        size = tuple(whole[target].shape)
        converter = None if pattern is None else by_pattern[pattern]
        cut = _cut_of_source(cuts[target], shape, size, converter)
        if cut is None:
            return None
        found[name] = cut
    return found


def _cut_of_source(
    cut: Cut, shape: tuple[int, ...], size: tuple[int, ...], converter: Any | None
) -> Cut | None:
    """Return the cut of a file's tensor that gives the cut of the weight it goes into, or None.

    cut        the cut of the weight, whose shape is `size`
    shape      shape of the tensor in the file
    converter  how transformers assembles the weight from such tensors; None: they are the same

    Returns None if the weight is assembled in a way that cannot be cut.
    """
    if converter is None:
        return cut if shape == size else None
    if any(type(operation) not in _STACKING for operation in converter.operations):
        return None
    dim = cut.dim - 1  # the weight's first dimension counts experts, which the tensor lacks
    if len(shape) != len(size) - 1 or not cut.runs:
        return None
    if shape[dim] == size[cut.dim]:
        return Cut(dim, cut.runs)
    # The tensor is one of several that are joined along the cut dimension, as gate and up are.
    is_one_of_runs = shape[dim] * len(cut.runs) == size[cut.dim]
    return Cut(dim, cut.runs[:1]) if is_one_of_runs else None


def plain_parts(folder: Path, cuts: Cuts, names: Names | None = None) -> dict[str, Lazy]:
    """Return a rank's part of each tensor of a folder, read when used, by its name.

    cuts   name -> the rank's cut (`cuts_in_files`); other tensors are read whole
    names  which tensors of the folder; None: all, by their names in the files
    """
    files = Files()
    paths = {name: path for path in weight_files(folder) for name in shapes_in(path)}
    wanted = {name: Stored(name) for name in paths} if names is None else names
    return {
        name: Lazy(partial(_read, files, paths[stored.name], stored, cuts.get(name)))
        for name, stored in wanted.items()
        if name not in cuts or cuts[name].runs
    }


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """While inside, transformers reads tensors one at a time instead of ahead in threads.

    Experts are assembled from copies; if all were read ahead, each would be in memory twice.
    """
    before = os.environ.get(_NO_READING_AHEAD)
    os.environ[_NO_READING_AHEAD] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_READING_AHEAD]
        else:
            os.environ[_NO_READING_AHEAD] = before


def _read(files: Files, path: Path, stored: Stored, cut: Cut | None) -> torch.Tensor:
    """Return a copy of a file's tensor, or if `cut` is given of that part of it."""
    if stored.is_swapped:
        whole = files.tensor(path, stored.name).transpose(-2, -1)
        return whole.contiguous() if cut is None else cut.of(whole)
    return (
        files.tensor(path, stored.name) if cut is None else cut.of(files.slices(path, stored.name))
    )


def kind_of_part(empty: Any, cuts: Cuts, rank: Rank) -> Any:
    """Return a subclass of `empty`'s class whose instances are this rank's part of the model.

    Transformers constructs the model that it reads weights into, so the class must divide the model
    when it is constructed. The class keeps its name, by which transformers knows it.
    """
    whole: Any = type(empty)

    def begin(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        split(self, cuts, rank)

    return type(whole.__name__, (whole,), {"__init__": begin, "__module__": whole.__module__})
