"""How long a text, and how many texts at once, fit into a device's memory beside the weights.

Both follow from the model's files, the settings and the device's total memory, so that they are the
same at every start: first the length of a text, then as many texts as fit. What is free at that
moment decides only whether the model is refused. Called before the cache is allocated, so that the
user learns at once and in one line what does not fit, instead of from a failed allocation a minute
later. Knows sizes, but no layer and no text.

The cache gets the shares below, or what the user says (`Utilization`, --gpu-memory-utilization).
"""

import logging
from dataclasses import dataclass

from engine.checkpoint.long_texts import LONGEST
from engine.choice.logprobs import MOST_BYTES
from engine.device import free_bytes, gigabytes, total_bytes
from engine.errors import OutOfMemory
from engine.forward.cache_tensors import slot_bytes
from engine.forward.flex_attention import BLOCK
from engine.forward.forward import PROMPT_ROWS, scored_rows
from engine.forward.more_layers import state_bytes
from engine.heads.loaded import Loaded, LoadedHead
from engine.heads.medusa import Medusa
from engine.layout.attention_windows import LayerKinds
from engine.layout.slots import NUM_TREE_SLOTS
from engine.tensor_parallel.calls import FindFree
from engine.tensor_parallel.split import lowest

logger = logging.getLogger(__name__)

# Share for the cache of the device's memory without the weights: of one text, if the user asked for
# its maximum length; of all texts at once then; and of one and of all if nobody asked, since the
# other model may be on this device too. On a GPU the rest is for activations and CUDA graphs; on a
# CPU also for the weights, which are a mapped file until they are laid out anew, and for other
# processes. (On a CPU a cache takes memory only where texts were.)
_SHARES = {"cuda": 0.85, "cpu": 0.5}
_SHARE_OF_SEVERAL = 0.5
_USUAL_SHARES = {"cuda": 0.4, "cpu": 0.25}
_USUAL = 4096  # tokens; the usual share never makes the maximum length lower than this
# Slots for the tree, at most as many for padding rows, and on a GPU for rounding up to a step of
# slots and to a block (`executor.py`).
_SPARE_SLOTS = {"cuda": 3 * NUM_TREE_SLOTS + BLOCK, "cpu": 2 * NUM_TREE_SLOTS}
_SHORTEST = 256  # tokens; a lower maximum length is useless


@dataclass(frozen=True, slots=True)
class Utilization:
    """How much of a device's memory weights and caches may take, where the user has said it.

    share       of the device's whole memory (0 to 1); 0: nobody has said, the usual shares count
    peer_bytes  weights of the pair's other model, if it is on this device too; its cache has the
                rest of `part`
    """

    share: float = 0.0
    peer_bytes: int = 0


USUAL = Utilization()


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
    share = _SHARE_OF_SEVERAL if asked else _USUAL_SHARES[_kind(loaded)]
    room = _room(loaded, part, share, utilization)
    num_lanes = num_lanes_that_fit(loaded, max_len, wanted, room=room)
    refuse_what_is_not_free(loaded, max_len, num_lanes)
    return max_len, num_lanes


def longest_text(
    loaded: Loaded, asked: int, *, part: float = 1.0, utilization: Utilization = USUAL
) -> int:
    """Return the longest text in tokens: `asked` (0: what fits), at most the model's.

    Raises OutOfMemory, as `limits` does.
    """
    limit = min(loaded.max_model_len, asked or LONGEST)
    kind = _kind(loaded)
    room = _room(loaded, part, _SHARES[kind], utilization)
    most = _fitting(loaded, room)
    if most < (limit if asked else min(limit, _SHORTEST)):
        each, once, scored = _slot_bytes(loaded), _mask_bytes(loaded), _scored_bytes(loaded)
        raise OutOfMemory(
            f"{loaded.name}: a cache for {limit} tokens takes "
            f"{gigabytes(limit * (each + once) + _state_bytes(loaded))}, and {loaded.device} has "
            f"{gigabytes(max(0, room - scored))} for it; {_advice(most, utilization)}"
        )
    if asked:
        return limit
    usual = _fitting(loaded, _room(loaded, part, _USUAL_SHARES[kind], utilization))
    length = min(limit, most, max(usual, _USUAL))
    if length < limit:
        outside = "" if isinstance(loaded, LoadedHead) else _outside_windows(loaded.kinds, length)
        name = loaded.name
        logger.warning(
            "%s: memory for texts of %d tokens, not of %d%s", name, length, limit, outside
        )
    return length


def _fitting(loaded: Loaded, room: float) -> int:
    """Return how many tokens a text may have whose cache and masks take `room` bytes."""
    left = max(0, int(room) - _scored_bytes(loaded) - _state_bytes(loaded))
    return left // (_slot_bytes(loaded) + _mask_bytes(loaded)) - _SPARE_SLOTS[_kind(loaded)]


def _room(loaded: Loaded, part: float, usual: float, utilization: Utilization) -> int:
    """Return the bytes that this model's cache may take.

    part   share (0 to 1) of the cache memory for this model
    usual  share of the memory without the weights, where the user has said nothing
    """
    if not utilization.share:
        return int(part * usual * _total_bytes(loaded))
    allowed = utilization.share * _device_bytes(loaded)
    return max(0, int(part * (allowed - _weight_bytes(loaded) - utilization.peer_bytes)))


def _advice(fitting: int, utilization: Utilization = USUAL) -> str:
    """Return what to do where texts of so many tokens fit."""
    way = ""
    if 0 < utilization.share < 1:
        way = f"raise --gpu-memory-utilization, which is {utilization.share:g}"
    if fitting >= _SHORTEST:
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
    slots = max_len + _SPARE_SLOTS[_kind(loaded)]
    left = room - slots * _mask_bytes(loaded) - _scored_bytes(loaded)
    fitting = max(0, left) // _lane_bytes(loaded, slots)
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
    is_gpu, free = _kind(loaded) == "cuda", _free_bytes(loaded)
    slots = max_len + _SPARE_SLOTS[_kind(loaded)]
    each = _lane_bytes(loaded, slots)
    needed = slots * _mask_bytes(loaded) + _scored_bytes(loaded)
    held = (num_lanes if is_gpu else 1) * each
    if needed + held <= free:
        return
    fitting = max(0, free - needed) // each
    advice = f"{fitting} at once fit" if fitting else _advice(min(max_len, _fitting(loaded, free)))
    several = f"{num_lanes} texts" if is_gpu and num_lanes > 1 else "a text"
    raise OutOfMemory(
        f"{loaded.name}: the cache for {several} of {max_len} tokens takes "
        f"{gigabytes(needed + held)}, and {loaded.device} has {gigabytes(free)} free; {advice}"
    )


def _slot_bytes(loaded: Loaded) -> int:
    """Return the bytes that one token takes in the KV cache."""
    if isinstance(loaded, LoadedHead):
        return loaded.slot_bytes
    return slot_bytes(loaded.model, loaded.device)


def _state_bytes(loaded: Loaded) -> int:
    """Return the bytes of the running states that layers keep of one text, whatever its length."""
    return 0 if isinstance(loaded, LoadedHead) else state_bytes(loaded.model)


def _lane_bytes(loaded: Loaded, slots: int) -> int:
    """Return the bytes of the cache of one text, with so many slots."""
    return slots * _slot_bytes(loaded) + _state_bytes(loaded)


def _mask_bytes(loaded: Loaded) -> int:
    """Return the bytes that one slot takes in the attention masks of a prefill chunk.

    On a GPU the mask covers all slots for each row of the chunk, for each kind of layer, and where
    g query heads share a key head there are g more copies of it. An EAGLE head makes a second mask,
    which hides empty slots too. One text is prefilled at a time. Returns 0 on a CPU, where chunks
    are short and half of the memory is left free.
    """
    if loaded.device.type != "cuda":
        return 0
    num_masks = num_kinds = 1
    if isinstance(loaded, LoadedHead):
        if isinstance(loaded.module, Medusa):
            return 0  # it has no attention
        num_masks, group = 2, loaded.group
    else:
        num_masks = num_kinds = len(loaded.kinds.seen)
        config = loaded.model.config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", 1)
        group = num_heads // (getattr(config, "num_key_value_heads", None) or num_heads)
    copies = num_kinds * group if group > 1 else 0
    return PROMPT_ROWS * loaded.dtype.itemsize * (num_masks + copies)


def _scored_bytes(loaded: Loaded) -> int:
    """Return the bytes for all logits of a prefill chunk, in two dtypes, and for ranking them.

    0 on a CPU and for heads, which score no prompts.
    """
    if loaded.device.type != "cuda" or isinstance(loaded, LoadedHead):
        return 0  # a head scores nothing
    vocab = loaded.vocab_size
    return scored_rows(vocab) * vocab * (4 + loaded.dtype.itemsize) + MOST_BYTES


def _kind(loaded: Loaded) -> str:
    return loaded.device.type if loaded.device.type in _SHARES else "cpu"


def _total_bytes(loaded: Loaded) -> int:
    """Return the bytes of the device's memory without the weights of this model."""
    return max(0, _device_bytes(loaded) - _weight_bytes(loaded))


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
    return sum(int(one.nbytes) for one in kept)


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
