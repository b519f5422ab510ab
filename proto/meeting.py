"""How nodes and coordinator meet: the roles, and what each says of itself before any work."""

from dataclasses import dataclass
from enum import StrEnum

PROTOCOL_VERSION = 12


class Role(StrEnum):
    """What a node does."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two tokenizers must agree on. `digest` is empty for a model without a tokenizer."""

    vocab_size: int
    digest: str
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """Node -> coordinator, once loaded and warm: who I am and what I can do.

    num_lanes  texts that the node has room for at once
    host       where it runs, for people
    backend    which forward runs there, for people
    simulated_us, simulated_us_per_row  of its forwards, as on another device; 0: not simulated
    layers      a drafter that is a head: whose features it reads (see `Features`)
    hidden_size how wide they are: the target's own, or those that a head was made for
    num_layers  of the target
    heads       a target with heads of its own: their kind, for people
    """

    version: int
    role: Role
    secret: str
    fingerprint: Fingerprint
    logits_size: int
    max_model_len: int
    model: str
    dtype: str
    device: str
    num_parameters: int
    load_us: int
    num_lanes: int
    host: str = ""
    backend: str = ""
    simulated_us: int = 0
    simulated_us_per_row: int = 0
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    num_layers: int = 0
    heads: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator -> node: you are in.

    vocab_size  token ids from here on are never drafted
    source      in a drafter's drafts and their acks; the second drafter's is 2 (see MODEL_SOURCE)
    traced      record what the loop does, and say it (`TracePart`)
    """

    vocab_size: int
    source: int
    traced: bool = False
