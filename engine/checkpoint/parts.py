"""What one rank of several reads of a checkpoint: its slices of each tensor, and nothing else.

A rank holds its part of the model (`tensor_parallel/split.py`), and besides it one tensor at most,
however large the whole is. Tensors have other names in files than in the model, and experts lie in
files one by one: transformers knows both, and is asked. Owns which slice of a file's tensor belongs
to which cut; knows no packing and no device.
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

from engine.checkpoint.files import Shapes, shapes_in, weight_files
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.split import Cut, split

_MAPPED_BYTES = 1 << 24  # of a file that are read before its pages are given back
_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"
_STACKING = (MergeModulelist, Concatenate)

Cuts = Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class Lazy:
    """Stands for a tensor, which is read when all of it is asked for: `lazy[...]`."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, _everything: object) -> torch.Tensor:
        return self.read()


class Files:
    """The tensors of a checkpoint's files, whole or in slices, by any thread.

    A file is mapped while it is read, and unmapped now and then: its pages would otherwise count as
    memory of this process for as long as it loads. So would what the allocator keeps of the tensors
    that experts are put together of.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._open: dict[Path, tuple[Any, int]] = {}  # and the bytes that it may still hand out

    def slices(self, file: Path, name: str) -> Any:
        """Return what reads slices of a tensor; they lie in the file until they are copied."""
        with self._guard:
            handle, left = self._open.pop(file, (None, 0))
            if left <= 0:
                _give_back()
                handle, left = safe_open(file, framework="pt"), _MAPPED_BYTES
            part = handle.get_slice(name)
            self._open[file] = handle, left - 4 * prod(part.get_shape())
        return part

    def tensor(self, file: Path, name: str) -> torch.Tensor:
        """Return a copy of a whole tensor."""
        whole: torch.Tensor = self.slices(file, name)[...]
        return whole.clone()


def _give_back() -> None:
    """Return to the system what the allocator keeps for later; not every C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cuts_in_files(empty: Any, shapes: Shapes, cuts: Cuts) -> dict[str, Cut] | None:
    """Return what a rank reads of each tensor that it does not read whole, by name in the files.

    empty   the whole model, without memory
    shapes  of the tensors in the files
    cuts    by name in the model, of this rank

    None: something is put together of tensors in a way that slices cannot follow.
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
    """The cut of a tensor in the files, of that of the weight of `size` which it goes into."""
    if converter is None:
        return cut if shape == size else None
    if any(type(operation) not in _STACKING for operation in converter.operations):
        return None
    dim = cut.dim - 1  # the first dimension of the weight are the experts
    if len(shape) != len(size) - 1 or not cut.runs:
        return None
    if shape[dim] == size[cut.dim]:
        return Cut(dim, cut.runs)
    # One of several that are put together along this very dimension, as gate and up are.
    is_one_of_runs = shape[dim] * len(cut.runs) == size[cut.dim]
    return Cut(dim, cut.runs[:1]) if is_one_of_runs else None


def plain_parts(folder: Path, cuts: Cuts) -> dict[str, Lazy]:
    """Return the tensors of a folder as a rank reads them, by their names in the files.

    cuts  by these names (`cuts_in_files`)
    """
    files = Files()
    return {
        name: Lazy(partial(_read, files, path, name, cuts.get(name)))
        for path in weight_files(folder)
        for name in shapes_in(path)
        if name not in cuts or cuts[name].runs
    }


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within it, transformers reads a tensor when it needs it, and not as many as threads can.

    Experts are put together of copies: were all of them read ahead, there would be two of each.
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


def _read(files: Files, path: Path, name: str, cut: Cut | None) -> torch.Tensor:
    return files.tensor(path, name) if cut is None else cut.of(files.slices(path, name))


def kind_of_part(empty: Any, cuts: Cuts, rank: Rank) -> Any:
    """Return the class of models that are this rank's part of the model `empty`.

    Transformers makes the model that it reads weights into itself, and so it must be one that is
    divided from the beginning. It is known by its class's name, which stays.
    """
    whole: Any = type(empty)

    def begin(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        split(self, cuts, rank)

    return type(whole.__name__, (whole,), {"__init__": begin, "__module__": whole.__module__})
