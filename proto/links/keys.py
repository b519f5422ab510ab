"""Keys of the encrypted links between hosts (CURVE: RFC 25 and 26 of ZeroMQ), and their files.

Whoever takes part in a link has a key pair of its own. A node knows the coordinator's public key,
the coordinator those of its nodes: neither speaks with anybody else.
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
from proto.messages import MAX_SOURCES, OWN_SOURCES, Role
from proto.node_config import NodeConfig
from proto.system import cannot_read, cannot_write

COORDINATOR = "coordinator"
MAX_NODES = {Role.TARGET: 1, Role.DRAFTER: MAX_SOURCES - len(OWN_SOURCES)}
PUBLIC, SECRET = ".key", ".key_secret"
KEY_CHARS = 40  # of a key in Z85
Z85 = frozenset(map(chr, Z85CHARS))
HOW = "make keys with `python -m coordinator keys new DIR`"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret one, in Z85; the secret one is never shown."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> "KeyPair":
        """A fresh one."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """A node's: its own pair, and the public key of the coordinator."""

    own: KeyPair
    coordinator: str


@dataclass(frozen=True, slots=True)
class CoordinatorKeys:
    """The coordinator's: its own pair, and the public keys of its nodes by their identity.

    Nodes may be added at any time, from any thread.

    is_open  whoever comes may speak, under any name: on a loopback address without keys
    """

    own: KeyPair
    nodes: dict[bytes, str] = field(default_factory=dict)
    is_open: bool = False

    def lets_in(self, key: str) -> bool:
        """Whether somebody with this public key may speak."""
        return self.is_open or key in tuple(self.nodes.values())

    def is_of(self, name: bytes, key: str) -> bool:
        """Whether this public key is that of the node of this name."""
        return self.is_open or (bool(key) and self.nodes.get(name) == key)

    def name_of(self, key: str) -> bytes | None:
        """The node with this public key; the latest, where several had it one after another."""
        names = [name for name, one in tuple(self.nodes.items()) if one == key]
        return names[-1] if names else None


# On a loopback address without keys. It is no secret, and so it keeps none.
EVERYBODYS = KeyPair(
    "7d=amI4<?&*n.J&/Cj:o[G.0NNo^ON<X#4N&.9W5", "1(7Qm*K8#u{U=EcU%nnpWqP4]A%MbfeH!G:v9i5^"
)


def open_door() -> CoordinatorKeys:
    """For a coordinator without keys."""
    return CoordinatorKeys(EVERYBODYS, is_open=True)


def open_hand() -> NodeKeys:
    """For a node without keys."""
    return NodeKeys(KeyPair.new(), EVERYBODYS.public)


def keys_of(config: NodeConfig) -> NodeKeys | None:
    """Those that a node was given; None where its link is not encrypted."""
    if not config.coordinator_key:
        return None
    return NodeKeys(KeyPair(config.public_key, config.secret_key), config.coordinator_key)


def with_keys(config: NodeConfig, keys: NodeKeys) -> NodeConfig:
    """A node's config with its keys."""
    return replace(
        config,
        public_key=keys.own.public,
        secret_key=keys.own.secret,
        coordinator_key=keys.coordinator,
    )


def names_of(role: Role) -> list[str]:
    """The names that nodes of this role may have, by hand."""
    return [f"{role}-{number + 1}" for number in range(MAX_NODES[role])]


def file_of(name: str) -> str:
    """The name of a node's files without their ends; the first of its role needs no number."""
    return name.removesuffix("-1")


def write_new(folder: Path, num_drafters: int = 1) -> list[Path]:
    """Make a folder with a pair for the coordinator and one for each node; returns the files.

    Raises ConfigurationError: one is there already, or the folder cannot be written to.
    """
    names = [*names_of(Role.TARGET), *names_of(Role.DRAFTER)[:num_drafters]]
    files = [COORDINATOR, *map(file_of, names)]
    for file in (folder / f"{file}{end}" for file in files for end in (PUBLIC, SECRET)):
        if file.exists():
            raise ConfigurationError(
                f"{file} is there already; name another folder, or remove the old keys first"
            )
    return _written(folder, files)


def add_drafter(folder: Path) -> list[Path]:
    """Make a pair for one more drafter; returns its files. Raises ConfigurationError."""
    _public(folder, COORDINATOR)  # it is such a folder
    names = names_of(Role.DRAFTER)
    for file in map(file_of, names):
        if not any((folder / f"{file}{end}").exists() for end in (PUBLIC, SECRET)):
            return _written(folder, [file])
    raise ConfigurationError(f"{folder} has keys of {len(names)} drafters; more cannot take part")


def _written(folder: Path, names: list[str]) -> list[Path]:
    mask = os.umask(0o077)  # also while the library writes them, nobody else reads them
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
    """The coordinator's keys from their folder: its own, and those of every node that has some.

    Raises ConfigurationError.
    """
    nodes: dict[bytes, str] = {}
    for role in roles:
        first, *others = names_of(role)
        there = [name for name in others if (folder / f"{file_of(name)}{PUBLIC}").exists()]
        nodes |= {name.encode(): _public(folder, file_of(name)) for name in (first, *there)}
    return CoordinatorKeys(_pair(folder, COORDINATOR), nodes)


def own_name(folder: Path | None, role: Role) -> str:
    """Which node of its role one is, by its secret key; the first, where that does not tell."""
    names = names_of(role)
    if folder is None:
        return names[0]
    mine = [name for name in names if (folder / f"{file_of(name)}{SECRET}").exists()]
    return next(iter(mine), names[0])


def of_node(folder: Path, name: str) -> NodeKeys:
    """The keys of the node of this name from their folder. Raises ConfigurationError."""
    return NodeKeys(_pair(folder, file_of(name)), _public(folder, COORDINATOR))


def _pair(folder: Path, name: str) -> KeyPair:
    file = folder / f"{name}{SECRET}"
    public, secret = _loaded(file)
    if secret is None:
        raise ConfigurationError(f"{file} has no secret key; {HOW}")
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
        # The library says of a file that is not there only that it is not there.
        reason = cannot_read(error) if error.errno else f"there is no such file; {HOW}"
        raise ConfigurationError(f"cannot read the key {file}: {reason}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not a key; {HOW}") from error
    if public is None or not all(_is_key(key) for key in (public, secret) if key is not None):
        raise ConfigurationError(f"{file} is not a key; {HOW}")
    return public, secret


def _is_key(key: str) -> bool:
    """Whether the library takes it."""
    return len(key) == KEY_CHARS and set(key) <= Z85
