# mypy: ignore-errors
"""The kernels of `split_kernel.py`, in Triton, which is imported here and nowhere else.

Names in capitals are constants of a compiled kernel. Scores are logarithms to base 2.
"""

import triton
import triton.language as tl

_NEVER = tl.constexpr(-1e30)  # a score lower than any other; finite, so that no NaN arises


@triton.jit
def _sees(shown, bits, slot, BITS: tl.constexpr):
    """Return True where a row sees a slot: the mask of `masks.from_words`."""
    behind = slot - shown
    bit = bits >> tl.minimum(tl.maximum(behind, 0), BITS - 1)
    return (behind < 0) | ((behind < BITS) & ((bit & 1) == 1))


@triton.jit
def _added(scores, v, top, weight, total, PRECISION: tl.constexpr):
    """Add some slots' values to the weighted sum (online softmax: Milakov, Gimelshein, 2018)."""
    higher = tl.maximum(top, tl.max(scores, 1))
    lost = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * lost[:, None]
    total = tl.dot(weights.to(v.dtype), v, total, input_precision=PRECISION)
    return higher, weight * lost + tl.sum(weights, 1), total


@triton.jit
def _store_share(sums, about, at, total, top, weight, is_query, half, along, DIM: tl.constexpr):
    """Write what `part` has found; `half` is the distance of the two numbers of `about`."""
    tl.store(about + at, top, mask=is_query)
    tl.store(about + half + at, weight, mask=is_query)
    # Sums of shares without slots are not read.
    is_kept = (is_query & (weight > 0))[:, None] & (along < DIM)[None, :]
    tl.store(sums + at[:, None] * DIM + along[None, :], total, mask=is_kept)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_lanes", "num_slots"])
def part(
    queries,  # [lanes, kv_heads, n * group, dim]
    keys,  # [kv_heads, slots of all lanes, dim]; the values likewise
    values,
    words,  # [2 or 3, lanes * n] int64: prefix length, bits, and lowest slot of a window
    first_slots,  # [lanes] int64
    sums,  # [lanes, kv_heads, shares, n * group, dim]: the weighted sums of the values
    about,  # [2, lanes, kv_heads, shares, n * group]: largest scores, sums of weights
    num_rows,  # n
    num_heads,  # kv_heads
    num_lanes,
    num_slots,  # of a lane
    head_stride,  # elements between two heads of `keys`
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to one share of the keys: for up to QUERIES queries of one head in one lane."""
    share, lane = tl.program_id(0), tl.program_id(2)
    head, tile = tl.program_id(1) % num_heads, tl.program_id(1) // num_heads
    num_shares, num_queries = tl.num_programs(0), num_rows * GROUP
    query = tile * QUERIES + tl.arange(0, QUERIES)
    is_query = query < num_queries
    along = tl.arange(0, PADDED_DIM)
    is_along = along < DIM
    row = lane * num_rows + query // GROUP
    shown = tl.load(words + row, mask=is_query, other=0).to(tl.int32)
    bits = tl.load(words + num_lanes * num_rows + row, mask=is_query, other=0)
    stop = tl.minimum(tl.max(shown, 0) + BITS, num_slots)  # slots are counted from the lane's first
    start = stop * 0
    if HAS_WINDOW:
        windows = words + 2 * num_lanes * num_rows
        lowest = tl.load(windows + row, mask=is_query, other=num_slots).to(tl.int32)
        start = tl.min(lowest, 0) // SLOTS * SLOTS
    blocks = tl.cdiv(tl.cdiv(stop - start, SLOTS), num_shares)  # of a share
    start += share * blocks * SLOTS
    stop = tl.minimum(start + blocks * SLOTS, stop)

    of_head = (lane * num_heads + head).to(tl.int64)
    at = (of_head * num_queries + query)[:, None] * DIM + along[None, :]
    q = tl.load(queries + at, mask=is_query[:, None] & is_along[None, :], other=0.0)
    origin = head.to(tl.int64) * head_stride + tl.load(first_slots + lane) * DIM
    top = tl.full((QUERIES,), _NEVER, tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, PADDED_DIM), tl.float32)
    for first in tl.range(start, stop, SLOTS, num_stages=STAGES):
        slot = first + tl.arange(0, SLOTS)
        is_slot = slot < stop
        there = origin + slot[:, None] * DIM + along[None, :]
        is_there = is_slot[:, None] & is_along[None, :]
        k = tl.load(keys + there, mask=is_there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        is_seen = _sees(shown[:, None], bits[:, None], slot[None, :], BITS) & is_slot[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (slot[None, :] >= lowest[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        v = tl.load(values + there, mask=is_there, other=0.0)
        top, weight, total = _added(scores, v, top, weight, total, PRECISION)

    at = (of_head * num_shares + share) * num_queries + query
    half = num_lanes * num_heads * num_shares * num_queries
    _store_share(sums, about, at, total, top, weight, is_query, half, along, DIM)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_lanes"])
def join(
    sums,
    about,
    out,  # [lanes, n, kv_heads, group, dim]
    num_rows,
    num_heads,
    num_lanes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Add up the shares of one query of one head in one lane, and write its output."""
    query, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries = num_rows * GROUP
    along = tl.arange(0, PADDED_DIM)
    of_head = (lane * num_heads + head).to(tl.int64)
    at = (of_head * SHARES + tl.arange(0, SHARES)) * num_queries + query
    top = tl.load(about + at)
    weight = tl.load(about + num_lanes * num_heads * SHARES * num_queries + at)
    scaled = tl.exp2(top - tl.max(top, 0))
    is_there = (weight > 0)[:, None] & (along < DIM)[None, :]
    parts = tl.load(sums + at[:, None] * DIM + along[None, :], mask=is_there, other=0.0)
    whole = tl.sum(weight * scaled, 0)
    # A row that sees nothing gets zeros.
    found = tl.sum(parts * scaled[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    row, member = lane * num_rows + query // GROUP, query % GROUP
    to = ((row.to(tl.int64) * num_heads + head) * GROUP + member) * DIM + along
    tl.store(out + to, found.to(out.dtype.element_ty), mask=along < DIM)
