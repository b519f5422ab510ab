"""Checks made once, when a model is loaded: does this engine compute the model's own logits?

An architecture may accept a mask and positions and still compute wrong logits (position biases that
go by slot, a causal mask of its own). So each model's logits under a tree mask are compared with
those of its own plain forward, on some sixty tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.checkpoint.files import one_line
from engine.checkpoint.model import LoadedModel
from engine.choice.sampling import NOT_FINITE
from engine.errors import ModelError, OutOfMemory
from engine.layout.slots import Feed, Move, SlotMap, with_near
from engine.model_executor import ModelExecutor

# Largest relative error allowed in a row of logits (after subtracting its mean). In half precision
# two orders of summation differ by some per cent, and a wrong mask by tens of per cent.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}

_PROMPT_LEN = 16
_VISIBLE = 64  # slots that a pass of the slot check covers
# What transformers raises when an architecture does not take such masks, positions or caches.
_MISFITS = (ValueError, RuntimeError, TypeError, AttributeError, LookupError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class PlainLogits:
    """The model's own logits, float32 [n, V], for the two texts of the slot check.

    The slot check runs a small tree; `left` and `right` are the texts along its two branches.
    """

    left: torch.Tensor
    right: torch.Tensor


def plain_logits(loaded: LoadedModel) -> PlainLogits:
    """Return the logits of the model's own forward, without a cache, on the slot check's texts.

    Raises:
        ModelError: the model takes too few positions, or does not run, or its logits are not
            finite.
    """
    if loaded.max_model_len < _VISIBLE:
        raise ModelError(
            f"{loaded.name}: it takes {loaded.max_model_len} tokens (max_position_embeddings), "
            f"fewer than {_VISIBLE}; use another model"
        )
    prompt, (a, b, c, d, e) = _slot_texts(loaded)
    try:
        plain = PlainLogits(_plain(loaded, [*prompt, a, c]), _plain(loaded, [*prompt, b, d, e]))
    except torch.OutOfMemoryError as failure:
        raise ModelError(f"{loaded.name}: out of memory: {one_line(failure)}") from failure
    except _MISFITS as failure:
        raise ModelError(
            f"{loaded.name}: {loaded.architecture} does not run with the settings in config.json "
            f"({one_line(failure)}); correct them"
        ) from failure
    # NaN and infinity show in the maximum.
    if not all(logits.amax(1).isfinite().all() for logits in (plain.left, plain.right)):
        raise ModelError(f"{loaded.name}: {NOT_FINITE}, or settings in config.json are wrong")
    return plain


def check_slot_attention(executor: ModelExecutor, plain: PlainLogits | None = None) -> None:
    """Raise ModelError if the executor's logits on a small tree differ from the model's own.

    The check includes a roll-back and a commit of scattered slots. If passes of several lanes are
    recorded as CUDA graphs, their logits are compared with those of passes of one lane.

    plain  the same model's `plain_logits`; None: computed here. It must be given if the model's
           own forward cannot run any more

    Overwrites the first slots (at least 64) of the lanes, so call it before any text is opened.
    Leaves `set_total` at None.

    Raises:
        ModelError: this architecture's logits with slots and masks are not the model's own, or it
            takes too few positions.
        OutOfMemory: there is no memory for the check.
    """
    loaded = executor.loaded
    plain = plain or plain_logits(loaded)
    executor.set_total(_VISIBLE)
    try:
        error = _slot_error(executor, plain)
        if executor.is_captured and executor.fixed_rows is None and executor.num_lanes_per_pass > 1:
            error = max(error, _lanes_error(executor))
    except torch.OutOfMemoryError as failure:
        raise OutOfMemory(f"{loaded.name}: out of memory: {one_line(failure)}") from failure
    except _MISFITS as failure:
        raise ModelError(
            f"{loaded.name}: {loaded.architecture} does not take tree masks over a slot cache "
            f"({one_line(failure)}); use another architecture"
        ) from failure
    finally:
        executor.set_total(None)
    if not error <= TOLERANCES[loaded.dtype]:
        raise ModelError(
            f"{loaded.name}: {loaded.architecture} gives other logits under a tree mask than "
            f"without (relative error {error:.1e}); use another model"
        )


def check_reproducible(executor: ModelExecutor) -> None:
    """Raise ModelError if a row's logits depend, in any bit, on its place or on other rows.

    For reproducible mode. The place is the row's index in the pass and its lane; the other rows are
    those of its lane and of other lanes. If only passes of several lanes fail, this sets
    `executor.num_lanes_per_pass` to 1 (one text per pass) instead of raising.

    Overwrites the first slots (at least 16 + 2 `fixed_rows`) of the lanes, so call it before any
    text is opened. Leaves `set_total` at None.

    Raises:
        ModelError: the bits depend on place or neighbours, on this device in this dtype.
    """
    assert executor.fixed_rows is not None, "only reproducible mode promises this"
    executor.set_total(executor.capacity)
    try:
        difference = _first_difference(executor)
        if difference is not None and executor.num_lanes_per_pass > 1:
            executor.num_lanes_per_pass = 1
            difference = _first_difference(executor)
    finally:
        executor.set_total(None)
    if difference is not None:
        loaded = executor.loaded
        raise ModelError(
            f"{loaded.name}: passes of {executor.fixed_rows} rows in {loaded.dtype} are not "
            f"reproducible on {loaded.device} ({difference}): use another dtype or number of rows"
        )


def _slot_error(executor: ModelExecutor, plain: PlainLogits) -> float:
    """Return the largest relative error of any row of the slot check.

    The tree's slots reach the last visible one and are not in the order of its rows, so that a
    causal mask of the model's own would show. Committing the right branch swaps two slots.

        prompt [0, n) ─┬─ a (slot n + 7) ── c (n + 2)
                       └─ b (slot n + 1) ── d (n) ── e (n + 2, after b and d are committed)
    """
    prompt, (a, b, c, d, e) = _slot_texts(executor.loaded)
    n = len(prompt)
    before = tuple(range(n))
    executor.run(Feed(tuple(prompt[:-1]), before[:-1], before[:-1], 0, None), ())
    executor.run(Feed((prompt[-1],), (n - 1,), (n - 1,), n - 1, (1,)), ())
    tree = Feed(
        tokens=(a, b, c, d),
        positions=(n, n, n + 1, n + 1),
        slots=(n + 7, n + 1, n + 2, n),
        prefix_len=n,
        masks=(1 << 7, 1 << 1, 1 << 7 | 1 << 2, 1 << 1 | 1 << 0),
    )
    tree = with_near(tree, executor.windows)
    step = min(executor.fixed_rows or 2, 2)
    passes = [_some_rows(tree, range(i, i + step)) for i in range(0, 4, step)]
    rows = [executor.run(part, range(step)) for part in passes]
    executor.move(Move((n + 1, n), (n, n + 1)))
    rows.append(executor.run(Feed((e,), (n + 2,), (n + 2,), n + 2, (1,)), (0,)))
    left, right = plain.left, plain.right
    want = torch.stack([left[n], right[n], left[n + 1], right[n + 1], right[n + 2]])
    return _relative_error(torch.cat(rows), want)


def _lanes_error(executor: ModelExecutor) -> float:
    """Return the largest relative error of a pass of two lanes against a pass of each alone."""
    prompt, after = _slot_texts(executor.loaded)
    feeds, alone = [], []
    for lane, length in ((0, len(prompt)), (executor.lanes.count - 1, _PROMPT_LEN)):
        where = tuple(range(length))
        executor.run(Feed(tuple(prompt[-length:]), where, where, 0, None, lane), ())
        feeds.append(replace(_chain_feed(executor, after[:2], (), length), lane=lane))
        alone.append(executor.run(feeds[-1], range(2)))
    return _relative_error(executor.run_together(feeds, (range(2),) * 2), torch.cat(alone))


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative error of any row of logits [n, V], each row's mean removed."""
    got, want = got - got.mean(1, keepdim=True), want - want.mean(1, keepdim=True)
    return float(((got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)).max())


def _slot_texts(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    """Return the slot check's prompt (56 tokens) and the five tokens of its tree."""
    return _tokens(loaded, _VISIBLE - 8), _tokens(loaded, 5, seed=1)


def _some_rows(feed: Feed, rows: Iterable[int]) -> Feed:
    """Return a pass of only the given rows (indices) of `feed`, in the given order."""
    assert feed.masks is not None
    index = tuple(rows)
    return Feed(
        tuple(feed.tokens[i] for i in index),
        tuple(feed.positions[i] for i in index),
        tuple(feed.slots[i] for i in index),
        feed.prefix_len,
        tuple(feed.masks[i] for i in index),
        near=tuple(tuple(masks[i] for i in index) for masks in feed.near),
    )


def _plain(loaded: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return float32 logits [n, V] of the model's own causal forward, without a cache."""
    ids = torch.tensor([list(tokens)], device=loaded.device)
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(ids, use_cache=False).logits
    return logits[0].float()


def _first_difference(executor: ModelExecutor) -> str | None:
    """Return the first layout of a pass in which a row's logits have other bits, or None.

    Returns a description of the first layout with other bits, or None if all are equal.

    The row ends a chain that follows the prompt, and its slot equals its position, as in a real
    text. It is computed at each row index, after the rest of its chain or after unrelated nodes,
    with the pass otherwise empty or full. Where there is room the next token of the chain is
    computed in the same pass: it reads the key and the value that the row has just written.
    """
    assert executor.fixed_rows is not None
    num_rows = executor.fixed_rows
    prompt = _tokens(executor.loaded, _PROMPT_LEN)
    executor.run(SlotMap[str](executor.capacity).feed_prefix(prompt), ())
    chain = _tokens(executor.loaded, num_rows + 1, seed=1)
    executor.run(_chain_feed(executor, chain[:num_rows], (), _PROMPT_LEN), ())
    pair = chain[-2:][:num_rows]
    feed = _chain_feed(executor, pair, (), _PROMPT_LEN + num_rows - 1)
    alone = executor.run(feed, range(len(pair)))
    for index in range(num_rows):
        for feed in _layouts(executor, chain, _tokens(executor.loaded, num_rows, seed=2), index):
            ask = range(index, min(index + 2, len(feed.tokens)))
            if not torch.equal(executor.run(feed, ask), alone[: len(ask)]):
                return f"alone, and as row {index} of {len(feed.tokens)}"
    return _difference_of_lanes(executor, pair, alone)


def _difference_of_lanes(
    executor: ModelExecutor, pair: Sequence[int], alone: torch.Tensor
) -> str | None:
    """Return the first lane or pass in which the rows have other bits than alone, or None.

    pair   the tokens of the rows; all lanes hold the same prefix
    alone  their logits [n, V] computed alone in lane 0

    Returns a description of the first difference, or None.
    """
    assert executor.fixed_rows is not None
    num_rows, num_lanes = executor.fixed_rows, executor.lanes.count
    start = _PROMPT_LEN + num_rows - 1
    for lane in range(1, num_lanes):
        executor.copy_prefix(0, lane, start)
    asks = [range(len(pair))] + [()] * (executor.num_lanes_per_pass - 1)
    for lane in range(num_lanes if num_lanes > 1 else 0):
        feed = replace(_chain_feed(executor, pair, (), start), lane=lane)
        if not torch.equal(executor.run(feed, asks[0]), alone):
            return f"in one lane, and in lane {lane}"
        if executor.num_lanes_per_pass == 1:
            continue
        others = [
            replace(
                _chain_feed(executor, _tokens(executor.loaded, num_rows, seed=3 + k), (), start),
                lane=k,
            )
            for k in range(num_lanes)
            if k != lane
        ]
        if not torch.equal(executor.run_together([feed, *others], asks), alone):
            return f"alone, and in lane {lane} beside {len(others)} others"
    return None


def _layouts(
    executor: ModelExecutor, chain: Sequence[int], others: Sequence[int], index: int
) -> Iterator[Feed]:
    """Yield passes in which the last but one token of `chain` is the row at `index`.

    chain   tokens that follow the prompt
    others  tokens of unrelated nodes to fill the pass; their number is the most rows of a pass
    """
    num_rows = len(others)
    row_slot = _PROMPT_LEN + num_rows - 1
    part = chain[-2 - index :][:num_rows]
    yield _chain_feed(executor, part, (), row_slot - index)
    yield _chain_feed(executor, part, others[len(part) :], row_slot - index)
    full = _chain_feed(executor, chain[-2:][:num_rows], others[2:], row_slot)
    order = [*range(2, index + 2), 0, 1, *range(index + 2, num_rows)][:num_rows]
    if max(order) < num_rows:
        yield _some_rows(full, order)


def _chain_feed(
    executor: ModelExecutor, chain: Sequence[int], others: Sequence[int], start: int
) -> Feed:
    """Return a pass of a chain from slot `start` on, then of nodes that see only the prefix."""
    count, rows = len(chain), len(chain) + len(others)
    feed = Feed(
        tokens=(*chain, *others),
        positions=tuple(start + (i if i < count else 0) for i in range(rows)),
        slots=tuple(range(start, start + rows)),
        prefix_len=start,
        masks=tuple((2 << i) - 1 if i < count else 1 << i for i in range(rows)),
    )
    return with_near(feed, executor.windows)


def _tokens(loaded: LoadedModel, count: int, seed: int = 0) -> list[int]:
    """Return `count` random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, loaded.vocab_size, count).tolist()  # type: ignore[no-any-return]
