"""How long a text, and how many texts at once, fit into a device's memory beside the weights.

Both follow from the model's files, the settings and the device's total memory, so that they are the
same at every start: first the length of a text, then as many texts as fit (`room.py`). What is free
at that moment decides only whether the model is refused. Called before the cache is allocated, so
that the user learns at once and in one line what does not fit, instead of from a failed allocation
a minute later. Knows sizes, but no layer and no text.
"""

import logging

from engine import room as rooms
from engine.device import free_bytes, gigabytes, total_bytes
from engine.errors import OutOfMemory
from engine.forward.cache_tensors import slot_bytes
from engine.forward.more_layers import state_bytes
from engine.heads.loaded import Loaded, LoadedHead
from engine.heads.medusa import Medusa
from engine.layout.attention_windows import LayerKinds
from engine.quantised.linear import kept_bytes
from engine.room import SHORTEST, USUAL, Sizes, Utilization, lengths, room_of_all
from engine.tensor_parallel.calls import FindFree
from engine.tensor_parallel.split import lowest

logger = logging.getLogger(__name__)


def limits(
    loaded: Loaded,
    asked: int,
    wanted: int,
    *,
    part: float = 1.0,
    utilization: Utilization = USUAL,
) -> tuple[int, int]:
    """Return the longest text in tokens, and how many texts at once there is memory for.

    asked   maximum length of a text; 0: what fits
    wanted  texts at once; fewer if there is no memory for them
    part    share (0 to 1) of the cache memory for this model: a drafter leaves the rest to its
            target, also when a length is asked for
    utilization  what weights and caches may take in all

    Raises:
        OutOfMemory: the cache of one text of `asked` tokens does not fit beside the weights, or
            if `asked` is 0, not even a short one; or other programs have taken the memory.
    """
    max_len = longest_text(loaded, asked, part=part, utilization=utilization)
    room = room_of_all(_sizes(loaded), asked, part, utilization)
    num_lanes = num_lanes_that_fit(loaded, max_len, wanted, room=room)
    refuse_what_is_not_free(loaded, max_len, num_lanes)
    return max_len, num_lanes


def longest_text(
    loaded: Loaded, asked: int, *, part: float = 1.0, utilization: Utilization = USUAL
) -> int:
    """Return the longest text in tokens: `asked` (0: what fits), at most the model's.

    Raises OutOfMemory, as `limits` does.
    """
    sizes = _sizes(loaded)
    found = lengths(sizes, asked, part, utilization)
    if found.length is None:
        room = sizes.room(part, rooms.SHARES[sizes.kind], utilization)
        needed = found.limit * (sizes.slot + sizes.mask) + sizes.state
        raise OutOfMemory(
            f"{loaded.name}: a cache for {found.limit} tokens takes {gigabytes(needed)}, and "
            f"{loaded.device} has {gigabytes(max(0, room - sizes.scored))} for it; "
            f"{_advice(found.most, utilization)}"
        )
    if not asked and found.length < found.limit:
        length = found.length
        outside = "" if isinstance(loaded, LoadedHead) else _outside_windows(loaded.kinds, length)
        name, limit = loaded.name, found.limit
        logger.warning(
            "%s: memory for texts of %d tokens, not of %d%s", name, length, limit, outside
        )
    return found.length


def _advice(fitting: int, utilization: Utilization = USUAL) -> str:
    """Return what to do where texts of so many tokens fit."""
    way = ""
    if 0 < utilization.share < 1:
        way = f"raise --gpu-memory-utilization, which is {utilization.share:g}"
    if fitting >= SHORTEST:
        return f"a maximum length of {fitting} fits" + (f", or {way}" if way else "")
    if way:
        return way
    return "use a smaller model, or end what else runs there"


def _outside_windows(kinds: LayerKinds, length: int) -> str:
    """Return how much of a text's cache no layer sees at its end, for a message; "" if nothing."""
    kinds = kinds.within(length)
    if not kinds.windows:
        return ""
    seen = [kinds.seen[kind] for kind in kinds.of_layers]
    saved = sum(0.0 if window is None else 1 - window.size / length for window in seen)
    percent = round(100 * saved / len(seen))
    return f"; {percent} % of it is for tokens before attention windows, kept for roll-backs"


def num_lanes_that_fit(loaded: Loaded, max_len: int, wanted: int, *, room: int) -> int:
    """Return `wanted`, or the number of lanes (texts at once) that fit if lower; at least 1.

    max_len  maximum length of a text in tokens
    room     bytes that all lanes together may take
    """
    if wanted == 1:
        return 1
    fitting = _sizes(loaded).lanes(max_len, room)
    if fitting < wanted:
        logger.warning(
            "%s: memory for %d texts at once, not for %d; a lower maximum length makes room",
            loaded.name,
            max(1, fitting),
            wanted,
        )
    return min(wanted, max(1, fitting))


def refuse_what_is_not_free(loaded: Loaded, max_len: int, num_lanes: int) -> None:
    """Raise OutOfMemory if other programs have left too little memory for the cache.

    The cache of a CPU takes memory only where texts were, so that room for one text is enough.
    """
    sizes, free = _sizes(loaded), _free_bytes(loaded)
    is_gpu, each, needed = sizes.kind == "cuda", sizes.lane(max_len), sizes.passes(max_len)
    held = (num_lanes if is_gpu else 1) * each
    if needed + held <= free:
        return
    fitting = max(0, free - needed) // each
    advice = f"{fitting} at once fit" if fitting else _advice(min(max_len, sizes.fitting(free)))
    several = f"{num_lanes} texts" if is_gpu and num_lanes > 1 else "a text"
    raise OutOfMemory(
        f"{loaded.name}: the cache for {several} of {max_len} tokens takes "
        f"{gigabytes(needed + held)}, and {loaded.device} has {gigabytes(free)} free; {advice}"
    )


def _sizes(loaded: Loaded) -> Sizes:
    """Return what a loaded model or head takes, and its device has."""
    kind = loaded.device.type if loaded.device.type in rooms.SHARES else "cpu"
    is_head = isinstance(loaded, LoadedHead)
    return Sizes(
        kind,
        device=_device_bytes(loaded),
        weights=_weight_bytes(loaded),
        slot=_slot_bytes(loaded),
        state=0 if isinstance(loaded, LoadedHead) else state_bytes(loaded.model),
        mask=_mask_bytes(loaded),
        scored=0 if is_head else _scored_bytes(loaded),  # a head scores nothing
        most_len=loaded.max_model_len,
    )


def _slot_bytes(loaded: Loaded) -> int:
    """Return the bytes that one token takes in the KV cache."""
    if isinstance(loaded, LoadedHead):
        return loaded.slot_bytes
    return slot_bytes(loaded.model, loaded.device)


def _mask_bytes(loaded: Loaded) -> int:
    """Return the bytes that one slot takes in the masks of a prefill chunk (`mask_bytes`)."""
    num_kinds, is_head = 1, isinstance(loaded, LoadedHead)
    if isinstance(loaded, LoadedHead):
        if isinstance(loaded.module, Medusa):
            return 0  # it has no attention
        group = loaded.group
    else:
        num_kinds = len(loaded.kinds.seen)
        config = loaded.model.config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", 1)
        group = num_heads // (getattr(config, "num_key_value_heads", None) or num_heads)
    return rooms.mask_bytes(
        loaded.device.type,
        loaded.dtype.itemsize,
        num_kinds=num_kinds,
        group=group,
        is_head=is_head,
    )


def _scored_bytes(loaded: Loaded) -> int:
    """Return the bytes for all logits of a prefill chunk (`scored_bytes`)."""
    return rooms.scored_bytes(loaded.device.type, loaded.dtype.itemsize, loaded.vocab_size)


def _device_bytes(loaded: Loaded) -> int:
    """Return the bytes of the device's memory, whoever uses it.

    Ranks (processes that share a model) on CPUs share one memory equally.
    """
    total, rank = total_bytes(loaded.device), loaded.rank
    if rank is not None and loaded.device.type == "cpu":
        total //= rank.count
    return total


def _weight_bytes(loaded: Loaded) -> int:
    """Return the bytes of the weights that are on this device."""
    if isinstance(loaded, LoadedHead):
        return loaded.num_parameters * loaded.dtype.itemsize
    kept = (*loaded.model.parameters(), *loaded.model.buffers())
    return sum(int(one.nbytes) for one in kept) + kept_bytes(loaded.model)


def _free_bytes(loaded: Loaded) -> int:
    """Return the bytes of device memory that this process may use.

    Ranks (processes that share a model) all use the same amount, so the rank with the least free
    memory decides: its GPU may serve a drafter as well. Ranks on CPUs share one memory equally.
    """
    free, rank = free_bytes(loaded.device), loaded.rank
    if rank is None:
        return free
    if rank.followers is not None:
        with rank.followers.together(FindFree()):
            free = lowest(free, rank, loaded.device) or 0
    return free // rank.count if loaded.device.type == "cpu" else free
