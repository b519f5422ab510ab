"""What the coordinator and its nodes agree on before any message: config, names, exit statuses."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from proto.errors import ConfigurationError
from proto.messages import Role

NO_CONFIG = (
    "a node reads its config as one JSON line from standard input: it is started by "
    "`python -m coordinator`, or by hand with `--join tcp://HOST:PORT`"
)
READY_BUT = "ready, but "  # so begins a state that people must hear of
FETCHING = "fetching the model"  # a node's state while no limit for its start runs
MAX_RANKS = 64  # processes that share a model
EXIT_FAILED = 1
EXIT_UNUSABLE = 2  # as FaultCode.UNUSABLE: its Fault may be overtaken by the end of the process


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything that a node needs to know; written by whoever starts it.

    device          "cpu", "cpu:N" (pinned to core N), "cpu:N-M" (to those) or "cuda:N"; several,
                    for a rank each: "cuda:N-M", "cpu:N,cpu:M"; empty: for who starts it to choose
    tensor_parallel_size  so many ranks share the model; 1: as many as the device names
    peer_size       ranks of the other node, for who chooses the devices of both
    peer_device     where the other node is, as `device`; None: there is no other
    max_model_len   most tokens of a text; 0: the model's own limit
    fixed_rows      reproducible mode: rows of every decoding pass; 0: off
    simulated_ms    a forward takes so long, as on another device; 0: as long as it takes here
    simulated_ms_per_row  and so much more for each of its rows
    backend         which forward runs: one of `engine.loading.BACKENDS`
    busy_poll_us    so long it asks for messages without pause before it sleeps
    parent_pid      the process that has started the node; the launcher knows it
    max_candidates  classical rules: most tokens that a draft is sampled from
    max_num_seqs    texts at once that are asked of it; it has room for fewer if memory is short
    outside         where the coordinator listens for nodes of other hosts, for who starts them
    dtype_on_cpu    instead of dtype, where the device is a CPU; for who starts the node
    target, target_revision  a drafter that is a head: where what its checkpoint lacks comes from
    heads, heads_revision    a target that drafts with heads of its own: which
    heads_ms, heads_ms_per_row  a step of those takes so long, as for `simulated_ms`
    layers          a target: of which layers features will be wanted (`Open.layers`)
    public_key, secret_key, coordinator_key  of an encrypted link; empty: of none
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
    heads: str = ""
    heads_revision: str | None = None
    heads_ms: float = 0.0
    heads_ms_per_row: float = 0.0
    layers: tuple[int, ...] = ()
    public_key: str = ""
    secret_key: str = field(default="", repr=False)
    coordinator_key: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "NodeConfig":
        """Raises ConfigurationError if the line is not a config."""
        try:
            fields: dict[str, Any] = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError("it is no object")
            layers = tuple(fields.get("layers", ()))
            return cls(**{**fields, "role": Role(fields["role"]), "layers": layers})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"{NO_CONFIG} ({error})") from error
