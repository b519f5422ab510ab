"""A pass with logits that are not finite, made again row by row.

Masks are added to the scores, and zero times NaN is NaN. So one row that writes NaN to the cache
makes all rows of its lane NaN, also those that do not see it: those of its own pass, and of every
later one until its slot is written anew. Rows of other lanes meet none of its numbers.

Here each row of one lane is run with those before it on its path alone, and what a bad row has
written is wiped at once. So every row says what it would have said without the others. It takes a
pass for each row, and is only done where a row was not finite.

Whether a row is good is judged by its logits. What is not finite in a layer goes on to the logits
of its row: it sees its own key and value, and what it hands on is added up. A row whose logits are
finite although its keys are not (an infinite key that its own query takes for minus infinity) is
found when another row meets it: then the text is read anew, in a lane that is all zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.executor import Executor
from engine.forward.forward import Layers
from engine.layout.slots import Feed


@dataclass(frozen=True, slots=True)
class Again:
    """A part of a pass that was made again.

    logits    [num_asked, V] float32; of a bad row anything
    is_good   for each of these rows, whether it and all before it on its path are finite
    features  [n, width] of all rows of the feed, if they were wanted; of a bad row anything
    culprit   if the text cannot go on: the position of the committed token that brings NaN
    """

    logits: torch.Tensor
    is_good: tuple[bool, ...]
    features: torch.Tensor | None
    culprit: int | None = None


def run_again(executor: Executor, feed: Feed, num_asked: int, layers: Layers = ()) -> Again:
    """Make one lane's part of a pass again, whose last `num_asked` rows are wanted.

    The first of these is the last committed token, those behind it are drafts. A chunk of a
    prefill is one chain of committed tokens, so it is run as a whole.
    """
    executor.wipe(feed.lane, feed.positions[0])
    if feed.masks is None:
        return _chunk_again(executor, feed, num_asked, layers)
    assert list(feed.slots) == sorted(feed.slots), "a wiped row would take others with it"
    num_rows = len(feed.tokens)
    num_committed = num_rows - num_asked + 1
    groups = [range(num_committed), *(range(i, i + 1) for i in range(num_committed, num_rows))]
    culprit: int | None = None
    logits: list[torch.Tensor] = []
    features: list[torch.Tensor] = []
    is_good: list[bool] = []
    bad_slots = 0  # as in a mask
    for rows in groups:
        one = _part(feed, rows)
        assert one.masks is not None
        if one.masks[-1] & bad_slots:
            logits.append(logits[0])
            features += [rows_of_one[-1:] for rows_of_one in features[-1:]]
            is_good.append(False)
            continue
        out = executor.forward(executor.lay_out((one,), ([len(rows) - 1],)), layers)
        logits.append(out.logits.clone())
        if out.features is not None:  # they are valid until the next pass
            features.append(out.features.clone())
        is_good.append(bool(out.logits.amax().isfinite()))
        if not is_good[-1]:
            if len(is_good) == 1:
                culprit = _culprit(executor, feed, num_committed - 1)
            bad_slots |= 1 << one.slots[-1] - feed.prefix_len
            executor.wipe(feed.lane, one.slots[0])
    made = torch.cat(features) if features else None
    return Again(torch.cat(logits), tuple(is_good), made, culprit)


def _chunk_again(executor: Executor, feed: Feed, num_asked: int, layers: Layers) -> Again:
    num_rows = len(feed.tokens)
    ask = range(num_rows - num_asked, num_rows)
    out = executor.forward(executor.lay_out((feed,), (ask,)), layers)
    is_good = tuple(out.logits.amax(dim=1).isfinite().tolist())
    culprit = None if all(is_good) else _culprit(executor, feed, ask[is_good.index(False)])
    return Again(out.logits, is_good, out.features, culprit)


def _culprit(executor: Executor, feed: Feed, row: int) -> int:
    """The position of the committed token whose keys or values are bad; else that of the row."""
    slot = executor.not_finite(feed.lane)
    return feed.positions[row] if slot is None else slot


def _part(feed: Feed, rows: Sequence[int]) -> Feed:
    """Some rows of a feed that are behind each other."""
    assert feed.masks is not None
    part = slice(rows[0], rows[-1] + 1)
    return replace(
        feed,
        tokens=feed.tokens[part],
        positions=feed.positions[part],
        slots=feed.slots[part],
        masks=feed.masks[part],
        before=feed.before[part],
    )
