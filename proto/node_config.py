"""What coordinator and nodes share before any message: the config of a node, and exit statuses."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from proto.errors import ConfigurationError
from proto.messages import MAX_SOURCES, OWN_SOURCES, Role

NO_CONFIG = (
    "a node reads its config as one JSON line from standard input: a coordinator starts it, or you "
    "do by hand with `--join tcp://HOST:PORT`"
)
# Where a target's passes run on CPUs: on its own cores, or on these and the drafter's as well.
Placement = Literal["auto", "apart", "shared"]
READY_BUT = "ready, but "  # a node's state that begins so is shown to people
FETCHING = "fetching the model"  # a node's state in which its start has no time limit
LOADING = "loading"  # a node's state in which it reads weights begins so
MAX_RANKS = 64  # processes that share a model
# Most nodes of a coordinator, by role. Every drafter needs a source number of its own.
MAX_NODES = {Role.TARGET: 8, Role.DRAFTER: MAX_SOURCES - len(OWN_SOURCES)}
EXIT_FAILED = 1
# Means the same as FaultCode.UNUSABLE: the process may end before its Fault message has arrived.
EXIT_UNUSABLE = 2


# The part of the memory for caches that is for each model. A drafter is loaded first, and needs
# less for each token: if it took more, its target might find no room on the same GPU.
CACHE_PARTS = {Role.TARGET: 1.0, Role.DRAFTER: 0.4}


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything that a node needs to know; written by the process that starts it.

    role            drafter or target
    endpoint        address of the coordinator's socket
    identity        name of this node
    secret          word with which the node proves itself in its Hello
    model           name or folder of its model; `revision` is of a name on the Hugging Face Hub
    device          "cpu", "cpu:N" (pinned to core N), "cpu:N-M" (to those cores) or "cuda:N";
                    several, one for each rank: "cuda:N-M", "cpu:N,cpu:M"; "": whoever starts the
                    node chooses
    tensor_parallel_size  number of ranks (processes) that share the model; 1: as many as the device
                    names
    peer_size       number of ranks of the other node, for whoever chooses the devices of both
    peer_device     device of the other node, written like `device`; None: there is no other
    placement       of a target: which cores its passes use, where nobody has named a device
    shared_device   of a target: all cores that it may use, the drafter's among them; filled in by
                    the launcher; "": those of `device` alone
    shares_gpu      of a target: the drafter's process computes on the same GPU; filled in by the
                    launcher
    max_model_len   most tokens of a text; 0: the model's own limit
    fixed_rows      reproducible mode: number of rows of every decoding pass; 0: off
    simulated_ms    imitated duration of a forward pass; 0: it takes the time that it takes here
    simulated_ms_per_row  what each row of the pass adds to that
    max_candidates  classical rules: most tokens that a draft is sampled from
    backend         which forward pass runs: one of `engine.loading.BACKENDS`
    busy_poll_us    how long a wait polls for messages without pause before it sleeps
    parent_pid      the process that has started the node; the launcher fills it in
    max_num_seqs    most texts at once that the node is asked for; it has room for fewer if memory
                    is short
    outside         where the coordinator listens for nodes of other hosts, for whoever starts those
    dtype_on_cpu    used instead of `dtype` where the device is a CPU, by whoever starts the node
    target, target_revision  of a drafter that is a head: the model that supplies the parts which
                             its
                    checkpoint lacks
    home_drafter, home_revision  of a target with a drafter in its own process: that draft model or
                    head
    home_dtype, home_quantization  the same for it as `dtype` and `quantization`; "": that of the
                    target, and of a draft model on a CPU the fastest
    home_ms, home_ms_per_row  imitated duration of a step of that drafter, like `simulated_ms`
    layers          of a target: the layers whose features will be wanted (`Open.layers`)
    quantization    how plain weights are rounded: "int8" or "int4"; "": they are not
    gpu_memory_utilization  share of the device's memory for weights and cache, also of the other
                    model where both are on this device; 0: nobody has said
    peer_bytes      size of the other model's weights; whoever starts the node makes it 0 where
                    that model is on another device
    target_bytes    of a target with a drafter in its process: size of the target's weights, which
                    are loaded after the drafter
    computes_alone  of a target: no drafter process computes beside it
    remembered_as   of a target: the drafter beside it, by whose name it is kept for later starts
                    whether drafts pay; "": nothing is kept
    tunes           choose anew what earlier starts have chosen by timing, and keep that
    line            descriptor of the node's end of a line to the coordinator (`links/line.py`);
                    -1: there is none
    public_key, secret_key, coordinator_key  keys of an encrypted link; "": it is not encrypted
    """

    role: Role
    endpoint: str
    identity: str
    secret: str
    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    peer_size: int = 1
    peer_device: str | None = None
    placement: Placement = "auto"
    shared_device: str = ""
    shares_gpu: bool = False
    max_model_len: int = 0
    fixed_rows: int = 0
    simulated_ms: float = 0.0
    simulated_ms_per_row: float = 0.0
    max_candidates: int = 64
    backend: str = "auto"
    busy_poll_us: int = 0
    parent_pid: int = 0
    max_num_seqs: int = 1
    outside: str = ""
    dtype_on_cpu: str = ""
    target: str = ""
    target_revision: str | None = None
    home_drafter: str = ""
    home_revision: str | None = None
    home_dtype: str = ""
    home_quantization: str = ""
    home_ms: float = 0.0
    home_ms_per_row: float = 0.0
    layers: tuple[int, ...] = ()
    quantization: str = ""
    gpu_memory_utilization: float = 0.0
    peer_bytes: int = 0
    target_bytes: int = 0
    remembered_as: str = ""
    tunes: bool = False
    computes_alone: bool = False
    line: int = -1
    public_key: str = ""
    secret_key: str = field(default="", repr=False)
    coordinator_key: str = ""

    def to_json(self) -> str:
        """Return the config as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "NodeConfig":
        """Return the config in a line of JSON. Raises ConfigurationError if it is not a config."""
        try:
            fields: dict[str, Any] = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError("it is no object")
            layers = tuple(fields.get("layers", ()))
            return cls(**{**fields, "role": Role(fields["role"]), "layers": layers})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"{NO_CONFIG} ({error})") from error


def cache_part(config: NodeConfig) -> float:
    """Return which share of the memory for caches a node's cache may take.

    Where the user has said how much both may take in all, target and drafter divide it.
    """
    if not config.gpu_memory_utilization:
        return CACHE_PARTS[config.role]
    if not config.peer_bytes:
        return 1.0
    drafts = CACHE_PARTS[Role.DRAFTER]
    return drafts if config.role is Role.DRAFTER else 1.0 - drafts
