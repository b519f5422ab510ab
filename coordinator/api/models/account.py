"""The account of memory of a pair: what its models will take on each device, before a start.

The weights in their bits, the caches of all texts, the masks and logits of prompts, and an estimate
of what libraries and recordings take. Each model's length of texts and number of texts at once are
computed as its node computes them (`engine/room.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coordinator.api.config import PairConfig
from coordinator.api.models.heads import is_whole_model
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.sizes import UNKNOWN, device_of, sizes_at_home, sizes_of_node
from coordinator.launching.devices import gpu_memory, gpus_of
from proto.messages import Role
from proto.node_config import CACHE_PARTS, NodeConfig, cache_part

if TYPE_CHECKING:
    from engine.room import Lengths, Utilization
    from engine.stated_sizes import StatedSizes

Memory = Callable[[str], int | None]
"""Function: "cpu" or "cuda:N" -> bytes of its memory; None: not known"""

# What a process takes on a device beside its model, until it is measured: of a GPU the context of
# CUDA, its libraries and the recordings of passes; of a CPU torch and what it compiles.
RUNTIME_BYTES = {"cuda": 900_000_000, "cpu": 600_000_000}


@dataclass(frozen=True, slots=True)
class Item:
    """A model on a device.

    stated   what one process of it takes
    part     share of the memory for caches that is for this model (`engine/room.py`)
    asked    maximum length of a text that was asked for; 0: what fits
    wanted   texts at once
    is_home  True: a drafter in the target's process
    """

    role: Role
    name: str
    stated: "StatedSizes"
    part: float
    utilization: "Utilization"
    asked: int
    wanted: int
    is_home: bool = False

    @property
    def lengths(self) -> "Lengths":
        """Return how long texts may be."""
        from engine.room import lengths

        return lengths(self.stated.sizes, self.asked, self.part, self.utilization)

    @property
    def max_len(self) -> int:
        """Return the tokens of a text for which the cache is made, or would have to be."""
        found = self.lengths
        return found.limit if found.length is None else found.length

    @property
    def num_lanes(self) -> int:
        """Return how many texts at once there is room for, at least 1, at most as many as wanted.

        On a CPU caches take memory only where texts are.
        """
        from engine.room import room_of_all

        room = room_of_all(self.stated.sizes, self.asked, self.part, self.utilization)
        return max(1, min(self.wanted, self.stated.sizes.lanes(self.max_len, room)))

    @property
    def cache(self) -> int:
        """Return the bytes of the keys and values of all texts at once."""
        sizes = self.stated.sizes
        return self.num_lanes * sizes.slots(self.max_len) * sizes.slot

    @property
    def states(self) -> int:
        """Return the bytes of the running states of all texts at once."""
        return self.num_lanes * self.stated.sizes.state

    @property
    def passes(self) -> int:
        """Return the bytes of the masks and logits of a prompt."""
        return self.stated.sizes.passes(self.max_len)

    @property
    def runtime(self) -> int:
        """Return the estimate for libraries and recordings; 0: it is in another model's process."""
        return 0 if self.is_home else RUNTIME_BYTES[self.stated.sizes.kind]

    @property
    def total(self) -> int:
        """Return the bytes of all of it."""
        parts = self.stated.sizes.weights, self.cache, self.states, self.passes, self.runtime
        return sum(parts)


@dataclass(frozen=True, slots=True)
class Device:
    """A device, or several with the same models on each.

    names  such as "cuda:0", or "cpu"
    total  bytes of the memory of each; None: not known
    """

    names: tuple[str, ...]
    total: int | None
    items: tuple[Item, ...]

    @property
    def taken(self) -> int:
        """Return the bytes that all models take on each of these devices."""
        return sum(item.total for item in self.items)


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a pair.

    devices  each with its models; the target first
    refusal  why it does not fit and what would, in one line; "": it fits, as far as is known
    """

    devices: tuple[Device, ...]
    refusal: str


def account_of(config: PairConfig, *, drafts: bool = True, memory: Memory | None = None) -> Account:
    """Return the account of memory of a pair; `drafts` as for `node_configs`.

    memory  of devices; None: of this machine's

    Raises:
        ModelError: a model's weights are not here, or a file is damaged.
    """
    found = memory or memory_here
    devices = devices_of(config, found, drafts=drafts)
    why = next(filter(None, map(why_not, devices)), "")
    if not why:
        return Account(devices, "")
    ways = [_longest(config, devices, found, drafts=drafts)]
    one_text = config.model_copy(update={"max_num_seqs": 1})
    usual_share = config.model_copy(update={"gpu_memory_utilization": None})
    if config.gpu_memory_utilization and _fits(usual_share, found, drafts=drafts):
        ways.append("a higher --gpu-memory-utilization")
    if config.num_seqs > 1 and _fits(one_text, found, drafts=drafts):
        ways.append("--max-num-seqs 1")
    if drafts and _fits(config, found, drafts=False):
        ways.append("the target without this drafter (--drafter ngram)")
    said = " or ".join(filter(None, ways)) or "a smaller model, fewer bits or more devices"
    return Account(devices, f"{why}; what fits: {said}")


def _fits(config: PairConfig, memory: Memory, *, drafts: bool) -> bool:
    """True if a pair fits, as far as is known."""
    return not any(map(why_not, devices_of(config, memory, drafts=drafts)))


def _longest(
    config: PairConfig, devices: tuple[Device, ...], memory: Memory, *, drafts: bool
) -> str:
    """Return the flag for the longest texts that fit, in steps; "": not even short ones do."""
    from engine.room import SHORTEST

    most = min(item.max_len for device in devices for item in device.items)
    low, high = 0, most // SHORTEST  # so many steps fit; so many are the most that may
    while low < high:
        middle = (low + high + 1) // 2
        shorter = config.model_copy(update={"max_model_len": middle * SHORTEST})
        if _fits(shorter, memory, drafts=drafts):
            low = middle
        else:
            high = middle - 1
    return f"--max-model-len {low * SHORTEST}" if low else ""


def why_not(device: Device) -> str:
    """Return why models do not fit on a device; "": they do, as far as is known."""
    if device.total is None:
        return ""
    where, has = device.names[0], _gigabytes(device.total)
    weights = sum(item.stated.sizes.weights for item in device.items)
    if weights > device.total:
        return f"the weights take {_gigabytes(weights)} on {where}, which has {has}"
    for item in device.items:
        if item.lengths.length is None:
            needed = item.stated.sizes.lane(item.max_len)
            return (
                f"a cache for {item.max_len} tokens of the {item.role} takes {_gigabytes(needed)} "
                f"beside {_gigabytes(weights)} of weights on {where}, which has {has}"
            )
    one_each = sum(item.total - (item.num_lanes - 1) * _lane(item) for item in device.items)
    needed = device.taken if device.items[0].stated.sizes.kind == "cuda" else one_each
    if needed > device.total:
        return f"all of it takes {_gigabytes(needed)} on {where}, which has {has}"
    return ""


def _lane(item: Item) -> int:
    return item.stated.sizes.lane(item.max_len)


def devices_of(config: PairConfig, memory: Memory, *, drafts: bool) -> tuple[Device, ...]:
    """Return the devices with the models on each; those that are alike as one."""
    nodes = node_configs(config, endpoint="", outside="", secret="", drafts=drafts)
    places = {node.identity: _places(node) for node in nodes}
    names = list(dict.fromkeys(name for node in nodes for name in places[node.identity]))
    alike: dict[tuple[tuple[Item, ...], int | None], list[str]] = {}
    for name in names:
        there = [node for node in nodes if name in places[node.identity]]
        total = memory(name)
        items = tuple(item for node in there for item in _items(node, total, places))
        alike.setdefault((items, total), []).append(name)
    return tuple(Device(tuple(names), total, items) for (items, total), names in alike.items())


def _places(node: NodeConfig) -> list[str]:
    """Return the names of a node's devices, one for each memory."""
    gpus = sorted(gpus_of(device_of(node), node.tensor_parallel_size))
    return [f"cuda:{gpu}" for gpu in gpus] or ["cpu"]


def _items(node: NodeConfig, total: int | None, places: dict[str, list[str]]) -> list[Item]:
    """Return the models of a node on a device; `places` are those of all nodes, by name."""
    from engine.room import Utilization

    # A model whose other ranks share a device with the other node has the same limits on all.
    own = set(places[node.identity])
    shares = any(own & set(there) for name, there in places.items() if name != node.identity)
    node = node if shares else replace(node, peer_bytes=0)
    bytes_there = UNKNOWN if total is None else total
    used = Utilization(node.gpu_memory_utilization, node.peer_bytes)
    part, asked, wanted = cache_part(node), node.max_model_len, node.max_num_seqs
    stated = sizes_of_node(node, bytes_there)
    items = [Item(node.role, node.model, stated, part, used, asked, wanted)]
    if node.home_drafter:
        home = sizes_at_home(node, bytes_there)
        drafts, of_target = 1.0, used
        if is_whole_model(node.home_drafter, node.home_revision):  # it is loaded first
            drafts = CACHE_PARTS[Role.DRAFTER]
            of_target = Utilization(node.gpu_memory_utilization, node.target_bytes)
        else:  # heads are made for the target's texts
            asked, wanted = items[0].max_len, items[0].num_lanes
        name = node.home_drafter
        items.append(Item(Role.DRAFTER, name, home, drafts, of_target, asked, wanted, is_home=True))
    return items


def memory_here(name: str) -> int | None:
    """Return the memory of a device of this machine in bytes; None: not known."""
    if name.startswith("cuda"):
        return gpu_memory(int(name.partition(":")[2]))
    from engine.host import memory_bytes

    return memory_bytes()


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
