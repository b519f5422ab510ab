"""The actor that holds a node process on a host of a Ray cluster; this file imports no ray.

Its code is sent to the host and runs before the project can be imported there.
"""

import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.launching.launcher import Launcher, Obituary

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ActorHost:
    """The host where an actor runs, as the actor reports it.

    network     a name for its loopback network (`loopback_network`)
    can_enter   the actor can enter the folder of the coordinator's socket
    public_key  of the key pair that it has made for its node; the secret key stays there
    gpus        the GPUs that Ray gives it, by UUID where that is known (`devices.visible_gpus`)
    """

    host: str
    network: str
    can_enter: bool
    public_key: str
    gpus: tuple[str, ...]


class Supervisor:
    """The actor: starts a node process on its host and holds it. Runs two methods at once."""

    _launcher: "Launcher"
    _is_alone: bool  # the setting that the launcher was made with

    def arrive(self, version: str, folder: str) -> tuple[str, str, bool, str, tuple[str, ...]]:
        """Make a key pair; return an `ActorHost`'s fields. Raises RuntimeError: host not ready.

        version  of the coordinator's Slipstream
        folder   with the coordinator's socket
        """
        host = socket.gethostname()
        # First of all: until here nothing of the project could be imported.
        sys.path.insert(0, root_on(host, version))
        from coordinator.launching.devices import visible_gpus
        from proto.links.keys import KeyPair

        self._keys = KeyPair.new()
        can_enter = os.access(folder, os.X_OK)
        return host, loopback_network(), can_enter, self._keys.public, tuple(visible_gpus())

    def start(self, config: str, *, is_alone: bool) -> int:
        """Start the node; return its process id."""
        from coordinator.launching.launcher import Launcher
        from proto.node_config import NodeConfig

        # The launcher here does not know the other node's GPUs, so it must not start MPS for both.
        read = replace(NodeConfig.from_json(config), peer_device=None)
        if read.coordinator_key:
            read = replace(read, public_key=self._keys.public, secret_key=self._keys.secret)
        forget_thread_limit()
        # One launcher for all nodes of this place, one after another: each launcher makes a run in
        # the logs, and only the latest runs are kept.
        is_same = hasattr(self, "_launcher") and self._is_alone == is_alone
        if not is_same or self._launcher.pids():
            self.close()
            self._launcher, self._is_alone = Launcher(is_alone=is_alone), is_alone
        self._launcher.start(read)
        (pid,) = self._launcher.pids().values()
        return pid

    def wait(self) -> "Obituary":  # in quotes: not imported here
        """Print the node's output until the node has ended; return how it ended."""
        while True:
            lines = self._launcher.new_lines()
            ended = self._launcher.ended()
            for line in (*lines, *(one.line for one in ended)):
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            if ended:
                return ended[0]
            time.sleep(POLL_S)

    def kill(self, identity: str) -> None:
        """End the node's process at once; `wait` returns how it ended."""
        self._launcher.kill(identity)

    def close(self) -> None:
        """End the node that this supervisor has started."""
        if hasattr(self, "_launcher"):
            self._launcher.close()


def root_on(host: str, version: str) -> str:
    """Return the folder of this host's own Slipstream, which starts nodes. Raises RuntimeError.

    It is put on the path of this process and of the node, never into PYTHONPATH: the other
    processes of Ray may need the package `proto` of the distribution proto-plus.
    """
    theirs = ""
    try:
        import slipstream

        # One that is older says none.
        theirs = vars(slipstream).get("__version__", "of an older version")
        if theirs == version:
            from slipstream.finding import ROOT, claim_names

            claim_names()
    except ImportError as error:
        raise RuntimeError(
            f"{sys.executable} on {host} cannot import slipstream ({error}); install version "
            f"{version} there"
        ) from error
    if theirs != version:
        raise RuntimeError(
            f"slipstream on {host} is {theirs}, and the coordinator's is {version}; install the "
            "same version on every host"
        )
    return str(ROOT)


def loopback_network() -> str:
    """Return a name for the network behind 127.0.0.1: the host's boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def forget_thread_limit() -> None:
    """Remove Ray's limit of one thread for an actor without CPUs; the node may use all cores."""
    raylet = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if b"OMP_NUM_THREADS=" not in raylet:
        os.environ.pop("OMP_NUM_THREADS", None)
