"""What fits into the memory of a device beside the weights: the longest text, and how many at once.

Asked before memory is taken, so that what does not fit is said in one line and at once, and not by
an allocator after a minute of reading. Knows sizes; no layer, no text.
"""

import logging

from engine.choice.logprobs import MOST_BYTES
from engine.device import free_bytes, gigabytes
from engine.errors import OutOfMemory
from engine.forward.flex_attention import BLOCK
from engine.forward.forward import PROMPT_ROWS, scored_rows
from engine.forward.kv_cache import slot_bytes
from engine.heads.loaded import Loaded, LoadedHead
from engine.layout.slots import NUM_TREE_SLOTS, num_lanes_within
from engine.tensor_parallel.calls import FindFree
from engine.tensor_parallel.split import lowest

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are there, for the cache. A GPU's rest is for what a
# pass computes and for graphs; a CPU's also for the weights, which are a mapped file until they are
# laid out anew, and for everybody else.
_SHARES = {"cuda": 0.85, "cpu": 0.5}
_SHARE_OF_SEVERAL = 0.5  # for the cache of several texts
# Of the same memory, for the texts of a length that nobody has asked for: the other model may be on
# this device too, and its weights not be there yet.
_CAREFUL_SHARES = {"cuda": 0.25, "cpu": 0.1}
_LONGEST = 1 << 20  # tokens; nobody can say more of them in a message
_USUAL = 4096  # tokens; fewer are not for care's sake
# The tree, at most as many for rows that fill up, and on a GPU the rest of a step of slots and of a
# block (`executor.py`).
_SPARE_SLOTS = {"cuda": 3 * NUM_TREE_SLOTS + BLOCK, "cpu": 2 * NUM_TREE_SLOTS}
_SHORTEST = 256  # tokens; a text of fewer is of no use


def longest_text(loaded: Loaded, asked: int, *, num_lanes: int = 1, part: float = 1.0) -> int:
    """Return the most tokens of a text: `asked`, or if that is 0 what the model takes and fits.

    num_lanes  texts at once that there should be room for, if nothing is asked for
    part       of the memory for a cache, for this model: a drafter leaves the rest to its target,
               also when a length is asked for

    Raises:
        OutOfMemory: a cache for that many does not fit beside the weights.
    """
    limit = min(loaded.max_model_len, asked or _LONGEST)
    each, once, scored = _slot_bytes(loaded), _mask_bytes(loaded), _scored_bytes(loaded)
    kind = loaded.device.type if loaded.device.type in _SHARES else "cpu"
    all_free = _free_bytes(loaded)
    free = max(0, int(part * _SHARES[kind] * all_free) - scored)
    fitting = free // (each + once) - _SPARE_SLOTS[kind]
    if fitting < (limit if asked else min(limit, _SHORTEST)):
        raise OutOfMemory(
            f"{loaded.name}: a cache for {limit} tokens takes "
            f"{gigabytes(limit * (each + once))}, and {loaded.device} has "
            f"{gigabytes(free)} for it; "
            + (
                f"a maximum length of {fitting} fits"
                if fitting >= _SHORTEST
                else "use a smaller model, or end what else runs there"
            )
        )
    if asked:
        return limit
    careful = int(part * _CAREFUL_SHARES[kind] * all_free)
    careful = careful // (each * num_lanes + once) - _SPARE_SLOTS[kind]
    length = min(limit, fitting, max(careful, _USUAL))
    if length < limit:
        logger.warning("%s: memory for texts of %d tokens, not of %d", loaded.name, length, limit)
    return length


def num_lanes_that_fit(loaded: Loaded, max_len: int, wanted: int, *, part: float = 1.0) -> int:
    """As many lanes as are wanted, or as the memory allows; one at least. `part` as above."""
    if wanted == 1:
        return 1
    slots = max_len + _SPARE_SLOTS.get(loaded.device.type, _SPARE_SLOTS["cpu"])
    free = int(part * _SHARE_OF_SEVERAL * _free_bytes(loaded)) - slots * _mask_bytes(loaded)
    free = max(0, free - _scored_bytes(loaded))
    fitting = num_lanes_within(free, _slot_bytes(loaded), slots)
    if fitting < wanted:
        logger.warning(
            "%s: memory for %d texts at once, not for %d; a lower maximum length makes room",
            loaded.name,
            max(1, fitting),
            wanted,
        )
    return min(wanted, max(1, fitting))


def _slot_bytes(loaded: Loaded) -> int:
    """Bytes of one token in the cache."""
    if isinstance(loaded, LoadedHead):
        return loaded.slot_bytes
    return slot_bytes(loaded.model, loaded.device)


def _mask_bytes(loaded: Loaded) -> int:
    """Bytes of one slot in the mask of a chunk of a prompt: one text is read at a time.

    On a GPU it is over all slots, once for each row of the chunk and once more for each row of its
    query heads. (On a CPU a chunk is short, and half of the memory is left.)
    """
    if loaded.device.type != "cuda":
        return 0
    group = 1
    if not isinstance(loaded, LoadedHead):
        config = loaded.model.config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", 1)
        group = num_heads // (getattr(config, "num_key_value_heads", None) or num_heads)
    return PROMPT_ROWS * loaded.dtype.itemsize * (1 + (group if group > 1 else 0))


def _scored_bytes(loaded: Loaded) -> int:
    """Bytes of all logits of a chunk of a prompt, in two types, and of what ranks them."""
    if loaded.device.type != "cuda" or isinstance(loaded, LoadedHead):
        return 0  # a head scores nothing
    vocab = loaded.vocab_size
    return scored_rows(vocab) * vocab * (4 + loaded.dtype.itemsize) + MOST_BYTES


def _free_bytes(loaded: Loaded) -> int:
    """What this process may take of the memory of its device.

    Of several ranks all take as much, so the one with the least decides: the GPU of one may be a
    drafter's as well. Those on CPUs share one memory.
    """
    free, rank = free_bytes(loaded.device), loaded.rank
    if rank is None:
        return free
    if rank.followers is not None:
        with rank.followers.together(FindFree()):
            free = lowest(free, rank, loaded.device) or 0
    return free // rank.count if loaded.device.type == "cpu" else free
