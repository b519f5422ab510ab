"""How long a text, and how many texts at once, fit into a device's memory: the arithmetic (pure).

`memory.py` applies it to a model that is loaded, the coordinator to a model's files before anything
is loaded (`stated_sizes.py`). The cache gets the shares below, or what the user says
(`Utilization`, --gpu-memory-utilization).
"""

from dataclasses import dataclass

from engine.layout.slots import BLOCK, NUM_TREE_SLOTS

# Share for the cache of the device's memory without the weights: of one text, if the user asked for
# its maximum length; of all texts at once then; and of one and of all if nobody asked, since other
# programs may need some. On a GPU the rest is for activations and CUDA graphs; on a CPU also for
# the weights, which are a mapped file until they are laid out anew, and for other processes. (On a
# CPU a cache takes memory only where texts were.)
SHARES = {"cuda": 0.85, "cpu": 0.5}
SHARE_OF_SEVERAL = 0.5
USUAL_SHARES = {"cuda": 0.4, "cpu": 0.25}
LONGEST = 1 << 20  # tokens; the most that a message can hold
USUAL_LEN = 4096  # tokens; the usual share never makes the maximum length lower than this
SHORTEST = 256  # tokens; a lower maximum length is useless
# Slots for the tree, at most as many for padding rows, and on a GPU for rounding up to a step of
# slots and to a block (`executor.py`).
SPARE_SLOTS = {"cuda": 3 * NUM_TREE_SLOTS + BLOCK, "cpu": 2 * NUM_TREE_SLOTS}

PROMPT_ROWS = 2048  # most rows of a prefill chunk on a GPU
FEWEST_PROMPT_ROWS = 64
SCORED_BYTES = 256 << 20  # most bytes of float32 logits of a chunk of which all are wanted
RANKED_AT_ONCE = 1 << 22  # logits
RANKING_BYTES = 24 * RANKED_AT_ONCE  # beside the logits, ids and ranks included


@dataclass(frozen=True, slots=True)
class Utilization:
    """How much of a device's memory weights and caches may take.

    share       of the device's whole memory (0 to 1); 0: nobody has said, the usual shares count
    peer_bytes  weights of the pair's other model, if it is on this device too; its cache has the
                rest of `part`
    """

    share: float = 0.0
    peer_bytes: int = 0


USUAL = Utilization()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one process of a model takes on its device; all but `kind` and `most_len` in bytes.

    kind      of the device: "cuda" or "cpu"
    device    the device's memory, whoever uses it; of a CPU that ranks share, the rank's part
    weights   in the bits in which they stay
    slot      keys and values of one token
    state     running states of one text, whatever its length
    mask      of one slot, in the attention masks of a prefill chunk
    scored    all logits of a prefill chunk, and what ranks them
    most_len  number of positions that the model can take
    """

    kind: str
    device: int
    weights: int
    slot: int
    state: int
    mask: int
    scored: int
    most_len: int

    @property
    def beside(self) -> int:
        """Return the device's memory without the weights of this model."""
        return max(0, self.device - self.weights)

    def room(self, part: float, usual: float, utilization: Utilization) -> int:
        """Return the bytes that this model's cache may take.

        part   share (0 to 1) of the cache memory for this model
        usual  share of the memory without the weights, where the user has said nothing
        """
        if not utilization.share:
            return int(part * usual * max(0, self.beside - utilization.peer_bytes))
        allowed = utilization.share * self.device
        return max(0, int(part * (allowed - self.weights - utilization.peer_bytes)))

    def fitting(self, room: float) -> int:
        """Return how many tokens a text may have whose cache and masks take `room` bytes."""
        left = max(0, int(room) - self.scored - self.state)
        return left // (self.slot + self.mask) - SPARE_SLOTS[self.kind]

    def slots(self, max_len: int) -> int:
        """Return the slots of a text of at most `max_len` tokens."""
        return max_len + SPARE_SLOTS[self.kind]

    def lane(self, max_len: int) -> int:
        """Return the bytes of the cache of one text, its states included."""
        return self.slots(max_len) * self.slot + self.state

    def passes(self, max_len: int) -> int:
        """Return the bytes that the masks and logits of a prefill chunk take beside the cache."""
        return self.slots(max_len) * self.mask + self.scored

    def lanes(self, max_len: int, room: int) -> int:
        """Return how many texts at once fit into `room` bytes; may be 0."""
        return max(0, room - self.passes(max_len)) // self.lane(max_len)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a text may be.

    limit    the model's own limit, or what was asked for, if that is lower
    most     what fits, at the share of who asks for a length
    length   what a text gets: at most both; None: too little fits, and the model is refused
    """

    limit: int
    most: int
    length: int | None


def lengths(sizes: Sizes, asked: int, part: float, utilization: Utilization) -> Lengths:
    """Return how long a text may be; `asked` tokens were asked for, 0: what fits."""
    limit = min(sizes.most_len, asked or LONGEST)
    most = sizes.fitting(sizes.room(part, SHARES[sizes.kind], utilization))
    if most < (limit if asked else min(limit, SHORTEST)):
        return Lengths(limit, most, None)
    if asked:
        return Lengths(limit, most, limit)
    usual = sizes.fitting(sizes.room(part, USUAL_SHARES[sizes.kind], utilization))
    return Lengths(limit, most, min(limit, most, max(usual, USUAL_LEN)))


def room_of_all(sizes: Sizes, asked: int, part: float, utilization: Utilization) -> int:
    """Return the bytes that the caches of all texts at once may take; `asked` as for `lengths`."""
    share = SHARE_OF_SEVERAL if asked else USUAL_SHARES[sizes.kind]
    return sizes.room(part, share, utilization)


def mask_bytes(kind: str, itemsize: int, *, num_kinds: int, group: int, is_head: bool) -> int:
    """Return the bytes that one slot takes in the attention masks of a prefill chunk.

    On a GPU the mask covers all slots for each row of the chunk, for each kind of layer, and where
    g query heads share a key head there are g more copies of it. An EAGLE head makes a second mask,
    which hides empty slots too. One text is prefilled at a time. 0 on a CPU, where chunks are short
    and half of the memory is left free.

    itemsize   bytes of a number of the model's type
    num_kinds  of layers, by what they see of a text (`LayerKinds`)
    group      query heads for each key head
    """
    if kind != "cuda":
        return 0
    copies = num_kinds * group if group > 1 else 0
    return PROMPT_ROWS * itemsize * ((2 if is_head else num_kinds) + copies)


def scored_bytes(kind: str, itemsize: int, vocab_size: int) -> int:
    """Return the bytes for all logits of a prefill chunk, in two types, and for ranking them.

    0 on a CPU.
    """
    if kind != "cuda":
        return 0
    return scored_rows(vocab_size) * vocab_size * (4 + itemsize) + RANKING_BYTES


def scored_rows(vocab_size: int) -> int:
    """Return the most rows of a prefill chunk whose logits are all wanted: 64, 128, 256, ..."""
    fitting = max(1, SCORED_BYTES // (4 * vocab_size))
    return min(PROMPT_ROWS, max(FEWEST_PROMPT_ROWS, 1 << (fitting.bit_length() - 1)))
