"""Run a pass again row by row, if some of its logits were not finite.

A hidden slot still takes part in attention with weight zero, and zero times NaN is NaN. So a row
that writes NaN to the cache makes all rows of its lane NaN, also those that do not see it: the rows
of its own pass, and of every later pass until its slot is overwritten. Rows of other lanes are not
affected.

Here each row of the lane is run in a pass with only its ancestors visible, and what a bad row has
written is wiped (set to zero) at once. So every row gets the logits that it would have without the
others. This takes one pass per row, and is done only if a row was not finite.

A row counts as good if its logits are finite: NaN in any layer reaches the logits of its own row,
which sees its own key and value and adds up the layers' results. A row with finite logits but
infinite keys is possible (its own query may turn the key into a score of minus infinity). It is
found when another row sees it; then the text is read again, in a lane that is all zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.executor import Executor
from engine.forward.forward import Layers
from engine.layout.slots import Feed


@dataclass(frozen=True, slots=True)
class Again:
    """Result of running one lane's part of a pass again.

    logits    [num_asked, V] float32; meaningless for a bad row
    is_good   [num_asked]: True if the row and all its ancestors have finite logits
    features  [n, width]: hidden states of all rows of the feed, if they were wanted; meaningless
              for a bad row
    culprit   position of the committed token that causes NaN, so that the text cannot go on; None:
              it can
    """

    logits: torch.Tensor
    is_good: tuple[bool, ...]
    features: torch.Tensor | None
    culprit: int | None = None


def run_again(executor: Executor, feed: Feed, num_asked: int, layers: Layers = ()) -> Again:
    """Run one lane's part of a pass again, row by row; return the result.

    feed       the rows; a prefill chunk is one chain of committed tokens, so it is run as a whole
    num_asked  number of rows, at the end, whose logits are wanted: the first of these is the last
               committed token, the others are drafts
    layers     layers whose hidden states are wanted
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
    bad_slots = 0  # bit i: the row in slot prefix_len + i is bad
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
    """Run a prefill chunk again as a whole; return the result."""
    num_rows = len(feed.tokens)
    ask = range(num_rows - num_asked, num_rows)
    out = executor.forward(executor.lay_out((feed,), (ask,)), layers)
    is_good = tuple(out.logits.amax(dim=1).isfinite().tolist())
    culprit = None if all(is_good) else _culprit(executor, feed, ask[is_good.index(False)])
    return Again(out.logits, is_good, out.features, culprit)


def _culprit(executor: Executor, feed: Feed, row: int) -> int:
    """Return the position of the committed token with a bad key or value; else that of `row`."""
    slot = executor.not_finite(feed.lane)
    return feed.positions[row] if slot is None else slot


def _part(feed: Feed, rows: Sequence[int]) -> Feed:
    """Return a feed of some consecutive rows of `feed`."""
    assert feed.masks is not None
    part = slice(rows[0], rows[-1] + 1)
    return replace(
        feed,
        tokens=feed.tokens[part],
        positions=feed.positions[part],
        slots=feed.slots[part],
        masks=feed.masks[part],
        before=feed.before[part],
        near=tuple(masks[part] for masks in feed.near),
    )
