"""Ranks that are threads of this process: the same arithmetic, without a group."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import torch

from engine.checkpoint.model import LoadedModel, load_model
from engine.tensor_parallel.group import Rank

T = TypeVar("T")
LIMIT_S = 60.0


class Threads:
    """A model that is divided among so many ranks."""

    def __init__(self, folder: Path, count: int, dtype: str = "float32") -> None:
        self._barrier = Barrier(count, timeout=LIMIT_S)
        self._parts = [torch.empty(0)] * count
        self.num_sums = 0
        self.loaded = [
            load_model(
                str(folder), dtype=dtype, rank=Rank(index, count, partial(self._add_up, index))
            )
            for index in range(count)
        ]

    def _add_up(self, index: int, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self._parts[index] = tensor.clone()
        if self._barrier.wait() == 0:
            self.num_sums += 1
        total = sum(self._parts[1:], self._parts[0])
        self._barrier.wait()
        tensor.copy_(total)

    def run(self, work: Callable[[LoadedModel], T]) -> list[T]:
        """What each rank makes of its part, in their order."""

        def inferred(loaded: LoadedModel) -> T:
            with torch.inference_mode():
                return work(loaded)

        with ThreadPoolExecutor(len(self.loaded)) as pool:
            return list(pool.map(inferred, self.loaded))
