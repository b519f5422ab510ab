"""Passes as every measurement here runs them: a chain of rows behind a text that was read."""

from engine.executor import Executor
from engine.layout.slots import Feed

CHUNK = 1024  # rows of a pass that reads


def token(position: int) -> int:
    """Some text that does not repeat itself."""
    return position * position % 4093


def chain(num_rows: int, start: int, lane: int = 0) -> Feed:
    """A chain behind a text of `start` tokens."""
    where = tuple(range(start, start + num_rows))
    masks = tuple((2 << i) - 1 for i in range(num_rows))
    return Feed(tuple(map(token, where)), where, where, start, masks, lane)


def read_up_to(executor: Executor, start: int, end: int, lane: int = 0) -> int:
    """Put the tokens [start, end) of a text into a lane, in chunks; returns `end`."""
    for first in range(start, end, CHUNK):
        where = tuple(range(first, min(end, first + CHUNK)))
        executor.run(Feed(tuple(map(token, where)), where, where, first, None, lane), ())
    return end
