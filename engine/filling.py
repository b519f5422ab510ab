"""The rows of a pass as integers, and how they are filled up to a number of rows.

Rows that fill a pass up write to scratch slots behind the cache, which nobody sees.
"""

from typing import Any

import numpy as np

from engine.masks import as_words
from engine.slots import Feed

FEWEST_PROMPT_ROWS = 64


def rows_of(feed: Feed, first_slot: int) -> Any:
    """Return what a backend must know of the rows of one lane, [5, n] int64 (`Backend.forward`).

    first_slot  where the lane begins
    """
    slots = [first_slot + slot for slot in feed.slots] if first_slot else feed.slots
    words = as_words(feed.slots, feed.prefix_len, feed.masks)
    return np.array((feed.tokens, feed.positions, slots, *words), dtype=np.int64)


def filled(rows: Any | None, count: int, scratch: int) -> Any:
    """Fill a lane up to `count` rows: copies of its first that write from slot `scratch` on.

    Those of a lane without rows see its first slot.
    """
    num_rows = 0 if rows is None else rows.shape[1]
    if num_rows == count:
        return rows
    made = np.zeros((5, count), dtype=np.int64)
    made[3] = 1
    if rows is not None:
        made[:, :num_rows] = rows
        made[:, num_rows:] = rows[:, :1]
    made[2, num_rows:] = scratch + np.arange(count - num_rows)
    return made


def filled_prompt(rows: Any, scratch: int) -> Any:
    """Fill a chunk of a prompt up to 64, 128, 256, ... rows; all fillers write to one slot."""
    num_rows = rows.shape[1]
    count = max(FEWEST_PROMPT_ROWS, 1 << (num_rows - 1).bit_length())
    made = rows[:, np.minimum(np.arange(count), num_rows - 1)]
    made[2, num_rows:] = scratch
    return made
