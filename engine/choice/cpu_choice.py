"""The parts of a choice that look at a whole vocabulary, by our C++ on a CPU.

Of 49,152 tokens numpy takes 0.5 to 0.8 ms for a row that is sampled, most of it for hashes and for
the search of the likeliest; ours takes 0.05 (docs/LOG.md). Ours finds a few tokens among which the
choice must be; their scores are then computed as they are without it, so that a choice is the same
(cpu_choice.cpp names the one case in which it may not be).

Owns the calls of cpu_choice.cpp.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cpu_library import library

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SPAN = 12.0  # tokens whose scores are further below the largest hold 6e-6 of it each
MOST = 4096  # tokens of a row that are handed over; of a flatter row numpy chooses
# Of larger scores the errors of float32 numbers would be larger than what C++ allows for.
LARGEST_SCORE = 1e6

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ROWS = (_POINTER, _SIZE, _SIZE, _SIZE)


class CpuChoice:
    """The calls. Logits are float32 [n, V], of which the numbers of a row lie side by side."""

    def __init__(self, found: ctypes.CDLL) -> None:
        """Take the library."""
        self._best = found.slipstream_best
        self._best.argtypes = (*_ROWS, _POINTER)
        self._may_win = found.slipstream_may_win
        self._may_win.argtypes = (*_ROWS, _POINTER, _FLOAT, _POINTER, _POINTER, _SIZE, _POINTER)
        self._likely = found.slipstream_likely
        self._likely.argtypes = (
            *_ROWS,
            _POINTER,
            *(_FLOAT,) * 2,
            _POINTER,
            _SIZE,
            *(_POINTER,) * 2,
        )
        self._rank = found.slipstream_rank
        self._rank.argtypes = (
            *(*_ROWS, _FLOAT, ctypes.c_int, _POINTER, _POINTER, _FLOAT, _SIZE),
            *(_POINTER,) * 3,
        )
        for function in (self._best, self._may_win, self._likely, self._rank):
            function.restype = None

    def best(self, rows: Floats) -> Ids:
        """Return the id of the largest logit of each row [n], of equals the lowest.

        It is -1 if a row has no finite logit, or one that is NaN or +inf.
        """
        best = np.empty(len(rows), dtype=np.int64)
        self._best(*_addresses(rows), best.ctypes.data)
        return best

    def may_win(
        self, rows: Floats, best: Ids, temperature: float, keys: Sequence[int]
    ) -> list[Ids] | None:
        """Return of each row the few tokens that may have the largest sum of score and noise.

        best  what the method `best` returns
        keys  [n]: of the noise (`coupling.row_keys`)

        None: there are too many, or a score is too large.
        """
        if not _are_small(rows, best, temperature):
            return None
        ids, counts, words = _ids(rows), np.empty_like(best), np.array(keys, dtype=np.uint64)
        self._may_win(
            *(*_addresses(rows), best.ctypes.data, 1 / temperature),
            *(words.ctypes.data, ids.ctypes.data, MOST, counts.ctypes.data),
        )
        return _found(ids, counts)

    def likely(
        self, rows: Floats, best: Ids, temperature: float
    ) -> tuple[list[Ids], list[float]] | None:
        """Return of each row the tokens whose scores are at most SPAN below its largest.

        With them comes the sum of exp(score - largest score) of all others. `best` is what the
        method `best` returns. None: there are too many, or a score is too large.
        """
        if not _are_small(rows, best, temperature):
            return None
        ids, counts, rests = _ids(rows), np.empty_like(best), np.empty(len(rows))
        self._likely(
            *(*_addresses(rows), best.ctypes.data, 1 / temperature, SPAN),
            *(ids.ctypes.data, MOST, counts.ctypes.data, rests.ctypes.data),
        )
        found = _found(ids, counts)
        return None if found is None else (found, rests.tolist())

    def rank(
        self,
        rows: Floats,
        temperature: float,
        keys: Sequence[int],
        known: Ids | None,
        num_ranked: int,
        beta: float,
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Return what `coupling.rank_later` ranks by, as columns; without cuts.

        temperature  0: greedy
        known        [columns] ascending: the token of each column; None: its index

        Scores have errors of up to 1e-4. None: the logits are not finite, or some are too large.
        """
        wanted = min(num_ranked, rows.shape[1])
        words, counts = np.array(keys, dtype=np.uint64), np.empty(len(rows), dtype=np.int64)
        columns = np.empty((len(rows), wanted), dtype=np.int64)
        scores = np.empty((len(rows), wanted))
        self._rank(
            *(*_addresses(rows), temperature or 1.0, temperature == 0.0, words.ctypes.data),
            *(None if known is None else known.ctypes.data, beta, wanted),
            *(columns.ctypes.data, scores.ctypes.data, counts.ctypes.data),
        )
        numbers = counts.tolist()
        if min(numbers, default=0) < 0 or not _are_small(rows, columns[:, 0], temperature or 1.0):
            return None
        return _lists(columns, numbers), _lists(scores, numbers)


def _lists(table: npt.NDArray[Any], numbers: Sequence[int]) -> list[list[Any]]:
    """Return the first numbers of each row of a table."""
    return [row[:number] for row, number in zip(table.tolist(), numbers, strict=True)]


def _addresses(rows: Floats) -> tuple[int, int, int, int]:
    """Return where the rows are, and their sizes, for the C++ code."""
    return rows.ctypes.data, len(rows), rows.strides[0] // rows.itemsize, rows.shape[1]


def _are_small(rows: Floats, best: Ids, temperature: float) -> bool:
    """True if the largest score of each row is of a size for which the C++ code is exact."""
    largest = rows[np.arange(len(rows)), best]
    return bool((np.abs(largest) <= LARGEST_SCORE * temperature).all())


def _ids(rows: Floats) -> Ids:
    return np.empty((len(rows), MOST), dtype=np.int64)


def _found(ids: Ids, counts: Ids) -> list[Ids] | None:
    """Return of each row the ids that were found; None if there are too many of one."""
    numbers = counts.tolist()
    if min(numbers) < 0:
        return None
    return [row[:number] for row, number in zip(ids, numbers, strict=True)]


@cache
def cpu_choice() -> CpuChoice | None:
    """Return the calls; None: our C++ is not compiled by an earlier start, or not for this CPU."""
    found = library(compiles=False)
    return None if found is None else CpuChoice(found)


def for_rows(rows: Floats) -> CpuChoice | None:
    """Return the calls if there are some, and rows that they can read."""
    lies_so = rows.dtype == np.float32 and rows.strides[1] == rows.itemsize
    return cpu_choice() if lies_so and rows.shape[1] else None
