"""A launcher for nodes that users start by hand, on any host (`node.joining`)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.launching.launcher import Obituary
from coordinator.launching.logs import Logs
from coordinator.launching.runtime_folder import RuntimeFolder
from proto.errors import NodeError
from proto.links.keys import CoordinatorKeys, of_coordinator
from proto.links.transport import check_endpoint
from proto.messages import Role
from proto.node_config import NodeConfig


class RemoteNodes:
    """A launcher that starts no node: it has the address and keys for nodes started by hand.

    Raises ConfigurationError: the address or the keys are wrong. No runtime folder: NodeError.

    listen  tcp://ADDRESS:PORT of this host, to which the nodes connect
    folder  the folder of the keys; None: no encryption, and so only nodes of this host
    invite  is called with the config of each node that is waited for
    """

    way = "by hand"
    is_by_hand = True
    alone_on = ""

    def __init__(
        self,
        listen: str,
        folder: Path | None,
        roles: Sequence[Role],
        invite: Callable[[NodeConfig], None] | None = None,
    ) -> None:
        keys: CoordinatorKeys | None = None
        if folder is not None:
            keys = of_coordinator(folder, roles)
        check_endpoint(listen, is_encrypted=keys is not None)
        self.keys = keys
        self.endpoint, self.outside = ("", listen) if keys is not None else (listen, "")
        self.secret = "" if keys is None else keys.own.public
        try:
            self._runtime = RuntimeFolder()
        except OSError as error:
            raise NodeError(
                f"cannot make a runtime folder: {error}; free space or set TMPDIR"
            ) from error
        self.folder = self._runtime.path
        self.logs = Logs(self.folder)
        self._invite = invite

    def start(self, config: NodeConfig, *, with_line: bool = False) -> None:
        """Announce that a node is waited for, by calling `invite`; no process is started here."""
        del with_line
        if self._invite is not None:
            self._invite(config)

    def take_line(self, identity: str) -> None:
        """Return None: frames to nodes elsewhere go over the network."""
        del identity

    def ended(self) -> list[Obituary]:
        """Return an empty list: a node started by hand is known to be gone only by its silence."""
        return []

    def kill(self, identity: str) -> None:
        """Do nothing: who has started a node ends it."""

    def has_room_again(self) -> bool:
        """Return False: no node is started here, so none loses its place."""
        return False

    def pids(self) -> dict[str, int]:
        """Return an empty dict: the process ids of the nodes are not known here."""
        return {}

    def close(self) -> None:
        """Remove the runtime folder and close the logs; the nodes are not ended.

        May be called twice.
        """
        self._runtime.remove()
        self.logs.close()
