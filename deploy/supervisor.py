"""What holds a node process on a host of a Ray cluster; an actor, but nothing here is of Ray.

It is sent to the host as code and runs before anything of the project can be imported there.
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
class Place:
    """Where an actor has come to be.

    network     what its 127.0.0.1 is (`loopback_network`)
    can_enter   whether it can reach the coordinator's socket in its folder
    public_key  of the pair that it has made for its node; the secret one stays there
    gpus        that Ray gives it, by UUID where that is known (`devices.visible_gpus`)
    """

    host: str
    network: str
    can_enter: bool
    public_key: str
    gpus: tuple[str, ...]


class Supervisor:
    """The actor: starts one node process on its host and holds it. Runs two methods at once."""

    _launcher: "Launcher"
    _is_alone: bool  # how the launcher was made

    def arrive(self, version: str, folder: str) -> tuple[str, str, bool, str, tuple[str, ...]]:
        """Make a key pair; the fields of a `Place`. Raises RuntimeError: the host is not ready.

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

        # Its environment is its own: no launcher here knows which GPUs the other node has.
        read = replace(NodeConfig.from_json(config), peer_device=None)
        if read.coordinator_key:
            read = replace(read, public_key=self._keys.public, secret_key=self._keys.secret)
        forget_thread_limit()
        # One launcher for all nodes of this place, one after another: each has a run of its own in
        # the logs, of which the latest are kept.
        is_same = hasattr(self, "_launcher") and self._is_alone == is_alone
        if not is_same or self._launcher.pids():
            self.close()
            self._launcher, self._is_alone = Launcher(is_alone=is_alone), is_alone
        self._launcher.start(read)
        (pid,) = self._launcher.pids().values()
        return pid

    def wait(self) -> "Obituary":  # in quotes: where this runs, the name may not be there yet
        """Return when the node has ended, and how it did. What it prints is in Ray's logs."""
        while True:
            lines = self._launcher.new_lines()
            ended = self._launcher.ended()
            for line in (*lines, *(one.line for one in ended)):
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            if ended:
                return ended[0]
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the node."""
        if hasattr(self, "_launcher"):
            self._launcher.close()


def root_on(host: str, version: str) -> str:
    """The folder of this host's own Slipstream, where nodes are started. Raises RuntimeError.

    It is put on the path of this process and of the node, never into PYTHONPATH: the other
    processes of Ray may need the package `proto` of the distribution proto-plus.
    """
    try:
        import slipstream
        from slipstream.finding import ROOT, check_names

        check_names()
    except ImportError as error:
        raise RuntimeError(
            f"{sys.executable} on {host} cannot import slipstream ({error}); install version "
            f"{version} there"
        ) from error
    # One that is older says none.
    theirs = vars(slipstream).get("__version__", "of an older version")
    if theirs != version:
        raise RuntimeError(
            f"slipstream on {host} is {theirs}, and the coordinator's is {version}; install the "
            "same version on every host"
        )
    return str(ROOT)


def loopback_network() -> str:
    """A name for what 127.0.0.1 reaches from this process: the boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def forget_thread_limit() -> None:
    """Undo what Ray does to an actor without CPUs: one thread, also for a node on all cores."""
    raylet = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if b"OMP_NUM_THREADS=" not in raylet:
        os.environ.pop("OMP_NUM_THREADS", None)
