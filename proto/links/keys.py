"""Keys of the encrypted links between hosts (CURVE: RFC 25 and 26 of ZeroMQ), and their files.

The coordinator and each node have a key pair of their own. A node knows the coordinator's public
key, and the coordinator knows those of its nodes: neither speaks with anybody else.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils.z85 import Z85CHARS

from proto.errors import ConfigurationError
from proto.installation import program
from proto.messages import Role
from proto.node_config import MAX_NODES, NodeConfig
from proto.system import cannot_read, cannot_write

COORDINATOR = "coordinator"
PUBLIC, SECRET = ".key", ".key_secret"
KEY_CHARS = 40  # length of a key in Z85
Z85 = frozenset(map(chr, Z85CHARS))


def how() -> str:
    """Return what to do where keys are missing."""
    return f"make keys with `{program()} keys new DIR`"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, in Z85 (text); the secret key is not part of the repr."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> "KeyPair":
        """Make and return a new pair of keys."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The keys that a node needs: its own pair, and the coordinator's public key."""

    own: KeyPair
    coordinator: str


@dataclass(frozen=True, slots=True)
class CoordinatorKeys:
    """The keys that the coordinator needs: its own pair, and each node's public key by its name.

    Nodes may be added at any time, from any thread.

    is_open  True: anybody may connect, under any name: on a loopback address without keys
    """

    own: KeyPair
    nodes: dict[bytes, str] = field(default_factory=dict)
    is_open: bool = False

    def lets_in(self, key: str) -> bool:
        """True if a peer with this public key may connect."""
        return self.is_open or key in tuple(self.nodes.values())

    def is_of(self, name: bytes, key: str) -> bool:
        """True if this public key is that of the node with this name."""
        return self.is_open or (bool(key) and self.nodes.get(name) == key)

    def name_of(self, key: str) -> bytes | None:
        """Return the name of the node with this public key; None if the key is unknown.

        Where several names have had the key one after another, it is the latest.
        """
        names = [name for name, one in tuple(self.nodes.items()) if one == key]
        return names[-1] if names else None


# The coordinator's pair on a loopback address without keys. It is public, so it protects nothing.
EVERYBODYS = KeyPair(
    "7d=amI4<?&*n.J&/Cj:o[G.0NNo^ON<X#4N&.9W5", "1(7Qm*K8#u{U=EcU%nnpWqP4]A%MbfeH!G:v9i5^"
)


def open_door() -> CoordinatorKeys:
    """Return the keys for a coordinator that was given none: anybody may connect."""
    return CoordinatorKeys(EVERYBODYS, is_open=True)


def open_hand() -> NodeKeys:
    """Return the keys for a node that was given none: a fresh pair, and EVERYBODYS public key."""
    return NodeKeys(KeyPair.new(), EVERYBODYS.public)


def keys_of(config: NodeConfig) -> NodeKeys | None:
    """Return the keys in a node's config; None if its link is not encrypted."""
    if not config.coordinator_key:
        return None
    return NodeKeys(KeyPair(config.public_key, config.secret_key), config.coordinator_key)


def with_keys(config: NodeConfig, keys: NodeKeys) -> NodeConfig:
    """Return a copy of a node's config with these keys in it."""
    return replace(
        config,
        public_key=keys.own.public,
        secret_key=keys.own.secret,
        coordinator_key=keys.coordinator,
    )


def names_of(role: Role) -> list[str]:
    """Return the names for nodes of this role that are started by hand: "target-1", "drafter-2"."""
    return [f"{role}-{number + 1}" for number in range(MAX_NODES[role])]


def file_of(name: str) -> str:
    """Return the name of a node's key files without suffix; a final "-1" is left out."""
    return name.removesuffix("-1")


def write_new(folder: Path, num_drafters: int = 1, num_targets: int = 1) -> list[Path]:
    """Make a folder with key pairs for coordinator, targets and drafters; returns the files.

    Raises ConfigurationError if such a file exists already or the folder cannot be written.
    """
    names = [*names_of(Role.TARGET)[:num_targets], *names_of(Role.DRAFTER)[:num_drafters]]
    files = [COORDINATOR, *map(file_of, names)]
    for file in (folder / f"{file}{end}" for file in files for end in (PUBLIC, SECRET)):
        if file.exists():
            raise ConfigurationError(
                f"{file} is there already; name another folder, or remove the old keys first"
            )
    return _written(folder, files)


def add_node(folder: Path, role: Role) -> list[Path]:
    """Make a key pair for one more node of this role, and return its files.

    Raises ConfigurationError if the folder has no coordinator's key, has keys of as many such nodes
    as can take part, or cannot be written.
    """
    _public(folder, COORDINATOR)  # raises if this is not a folder of keys
    names = names_of(role)
    for file in map(file_of, names):
        if not any((folder / f"{file}{end}").exists() for end in (PUBLIC, SECRET)):
            return _written(folder, [file])
    raise ConfigurationError(f"{folder} has keys of {len(names)} {role}s; more cannot take part")


def _written(folder: Path, names: list[str]) -> list[Path]:
    mask = os.umask(0o077)  # nobody else can read the files, not even while they are written
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {folder}: {cannot_write(error)}") from error
    finally:
        os.umask(mask)
    return [folder / f"{name}{end}" for name in names for end in (PUBLIC, SECRET)]


def of_coordinator(folder: Path, roles: Iterable[Role]) -> CoordinatorKeys:
    """Read and return the coordinator's own key pair, and the public keys of its nodes.

    roles  the first node of each must have a key; more nodes may have one

    Raises ConfigurationError if a key is missing or cannot be used.
    """
    nodes: dict[bytes, str] = {}
    for role in roles:
        first, *others = names_of(role)
        there = [name for name in others if (folder / f"{file_of(name)}{PUBLIC}").exists()]
        nodes |= {name.encode(): _public(folder, file_of(name)) for name in (first, *there)}
    return CoordinatorKeys(_pair(folder, COORDINATOR), nodes)


def own_name(folder: Path | None, role: Role) -> str:
    """Return the name of the node whose secret key is in the folder; else the role's first."""
    names = names_of(role)
    if folder is None:
        return names[0]
    mine = [name for name in names if (folder / f"{file_of(name)}{SECRET}").exists()]
    return next(iter(mine), names[0])


def of_node(folder: Path, name: str) -> NodeKeys:
    """Read and return the keys of the node with this name. Raises ConfigurationError."""
    return NodeKeys(_pair(folder, file_of(name)), _public(folder, COORDINATOR))


def _pair(folder: Path, name: str) -> KeyPair:
    file = folder / f"{name}{SECRET}"
    public, secret = _loaded(file)
    if secret is None:
        raise ConfigurationError(f"{file} has no secret key; {how()}")
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"others may read {file}; run chmod 600 {file}")
    return KeyPair(public, secret)


def _public(folder: Path, name: str) -> str:
    return _loaded(folder / f"{name}{PUBLIC}")[0]


def _loaded(file: Path) -> tuple[str, str | None]:
    try:
        keys = zmq.auth.load_certificate(file)
        public, secret = (None if key is None else key.decode("ascii") for key in keys)
    except OSError as error:
        # For a missing file the library raises an OSError without an error number.
        reason = cannot_read(error) if error.errno else f"there is no such file; {how()}"
        raise ConfigurationError(f"cannot read the key {file}: {reason}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not a key; {how()}") from error
    if public is None or not all(_is_key(key) for key in (public, secret) if key is not None):
        raise ConfigurationError(f"{file} is not a key; {how()}")
    return public, secret


def _is_key(key: str) -> bool:
    """True if this is a key as the library accepts it."""
    return len(key) == KEY_CHARS and set(key) <= Z85
