"""Makes the passes that the GPU kit times: a chain of rows after a text that was read."""

from engine.executor import Executor
from engine.layout.slots import Feed

CHUNK = 1024  # most rows of a pass that reads a text


def token(position: int) -> int:
    """Return the token at this position of a text that does not repeat itself."""
    return position * position % 4093


def chain(num_rows: int, start: int) -> Feed:
    """Return the rows of a chain of `num_rows` tokens after a text of `start` tokens."""
    where = tuple(range(start, start + num_rows))
    masks = tuple((2 << i) - 1 for i in range(num_rows))
    return Feed(tuple(map(token, where)), where, where, start, masks)


def read_up_to(executor: Executor, start: int, end: int) -> int:
    """Read the tokens [start, end) of a text into the cache, in chunks; return `end`."""
    for first in range(start, end, CHUNK):
        where = tuple(range(first, min(end, first + CHUNK)))
        executor.run(Feed(tuple(map(token, where)), where, where, first, None), ())
    return end
