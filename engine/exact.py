"""Is a row's logit the same bits in every pass? A check of the forms that run, made at load.

A target is *exact* if the logits of a token depend on its text alone: not on how many rows a pass
has, on drafts beside it, on slots, other texts, threads, or on how the text before it was read.
Then every policy, timing and fault gives the same text in every number type, for nothing. The
forms are made for that (`cpu_attention.py`, `cpu_products.py`); this check tests it, it proves
nothing.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.cpu_library import library_name
from engine.kept import Kept
from engine.layout.slots import NUM_TREE_SLOTS, Feed, with_near
from engine.model_executor import ModelExecutor

logger = logging.getLogger(__name__)

_CHUNK = 256  # rows of a pass that reads a prompt
_NUM_ROWS = 17  # that are compared: one more than tile registers hold
_LONGEST = _CHUNK + 3 * _NUM_ROWS  # tokens of the text: more than one chunk of a prompt
_SHORTEST = 2 * _NUM_ROWS
_NUM_DIGITS = 16  # of a digest
_PIECES = (1, 2, 5, 9, 40)  # rows of the passes in which the text is read another time


def bits_of(executor: ModelExecutor, kept: Kept) -> str:
    """Return a digest of what decides the bits of logits; "" if a row's depend on other rows.

    Two targets with one digest give the same logits, for all that can be told: it is made of our
    library, the number type and the logits of some rows. A target that has passed the check is not
    checked again on this machine (`kept`).

    Overwrites the first slots of the first two lanes, so call it before any text is opened.
    """
    tokens = _text(executor) if executor.is_by_row else None
    if tokens is None:
        return ""
    alone = _alone(executor, tokens)
    about = library_name(), str(executor.loaded.dtype), len(tokens), alone.numpy().tobytes()
    bits = hashlib.sha256(repr(about).encode()).hexdigest()[:_NUM_DIGITS]

    def passes() -> bool:
        why = _difference(executor, tokens, alone)
        if why is not None:
            logger.warning("a row has other bits %s than alone; texts may differ at near ties", why)
        return why is None

    return bits if kept.found("exact", (bits,), passes, _is_true, needs_quiet=False) else ""


def _is_true(found: object) -> bool:
    """Only a check that was passed is kept: one that failed is made at each start."""
    return found is True


def why_not_exact(executor: ModelExecutor) -> str | None:
    """Return in which kind of pass a row has other bits than alone; None: in none that was tried.

    Overwrites the first slots of the first two lanes, so call it before any text is opened.
    """
    tokens = _text(executor)
    if tokens is None:
        return "texts are too short to try"
    return _difference(executor, tokens, _alone(executor, tokens))


def _text(executor: ModelExecutor) -> Sequence[int] | None:
    """Return the tokens of the text that is tried; None: there is no room for one."""
    length = min(_LONGEST, executor.capacity - NUM_TREE_SLOTS, executor.loaded.max_model_len)
    return _tokens(executor.loaded.vocab_size, length) if length >= _SHORTEST else None


def _difference(executor: ModelExecutor, tokens: Sequence[int], alone: torch.Tensor) -> str | None:
    """Return in which kind of pass the last rows of a text have other logits than `alone`."""
    for threads in dict.fromkeys((torch.get_num_threads(), 1)):
        with _num_threads(threads):
            for kind, logits in _passes(executor, tokens):
                if not torch.equal(logits, alone[-len(logits) :]):
                    return f"{kind}, on {threads} threads"
    return None


def _alone(executor: ModelExecutor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of the last rows of a text, each computed alone, [17, V]."""
    start = len(tokens) - _NUM_ROWS
    _read(executor, tokens[:start], (_CHUNK,))
    return torch.cat(
        [_run(executor, _chain(tokens, at, at + 1)) for at in range(start, len(tokens))]
    )


def _passes(executor: ModelExecutor, tokens: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the logits of a text's last rows in other passes, and what these are."""
    start = len(tokens) - _NUM_ROWS
    yield "in a chunk of a prompt", _read(executor, tokens, (_CHUNK,))[-_NUM_ROWS:]
    _read(executor, tokens[:start], _PIECES)
    yield f"in a pass of {_NUM_ROWS} rows", _run(executor, _chain(tokens, start, len(tokens)))
    tree = _tree(executor, tokens, start)
    yield "in a tree", _run(executor, tree)[::2]
    if executor.num_lanes_per_pass > 1:
        beside = replace(_chain(tokens, 0, 3), lane=1)
        _run(executor, _chain(tokens, start, start + 1))
        both = executor.run_together((beside, tree), ((), range(0, len(tree.tokens), 2)))
        yield "beside another text", both


def _read(executor: ModelExecutor, tokens: Sequence[int], pieces: Sequence[int]) -> torch.Tensor:
    """Read a text in passes of so many rows, in turn; return the logits of the last one."""
    at, number, logits = 0, 0, torch.empty(0)
    while at < len(tokens):
        end = min(at + pieces[number % len(pieces)], len(tokens))
        where = tuple(range(at, end))
        prompt = Feed(tuple(tokens[at:end]), where, where, at, None)
        feed = prompt if end - at > NUM_TREE_SLOTS else _chain(tokens, at, end)
        logits = _run(executor, feed)
        at, number = end, number + 1
    return logits


def _run(executor: ModelExecutor, feed: Feed) -> torch.Tensor:
    """Return the logits of the last rows of a pass, [at most 34, V]."""
    first = max(0, len(feed.tokens) - _SHORTEST)
    feed = feed if feed.masks is None else with_near(feed, executor.windows)
    return executor.run(feed, range(first, len(feed.tokens)))


def _chain(tokens: Sequence[int], start: int, end: int) -> Feed:
    """Return the rows of the tokens from `start` to `end`, in a chain behind those before."""
    where = tuple(range(start, end))
    masks = tuple((2 << row) - 1 for row in range(end - start))
    return Feed(tuple(tokens[start:end]), where, where, start, masks)


def _tree(executor: ModelExecutor, tokens: Sequence[int], start: int) -> Feed:
    """Return the last rows of a text with a wrong sibling behind each, in scattered slots."""
    count = len(tokens) - start
    slots = [start + 5 * row % (2 * count) for row in range(2 * count)]
    assert len(set(slots)) == 2 * count, "34 has no divisor in common with 5"
    ids, positions, masks, path = [], [], [], 0
    for row in range(count):
        own, other = (1 << slots[2 * row + i] - start for i in (0, 1))
        masks += [path | own, path | other]
        path |= own
        ids += [tokens[start + row], (tokens[start + row] + 1) % executor.loaded.vocab_size]
        positions += [start + row] * 2
    feed = Feed(tuple(ids), tuple(positions), tuple(slots), start, tuple(masks))
    return with_near(feed, executor.windows)


def _tokens(vocab_size: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, count)]


@contextlib.contextmanager
def _num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
