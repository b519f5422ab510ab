"""Nodes that somebody starts by hand, on any host (`node.joining`); here they are waited for."""

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
    """A launcher that starts nothing. Raises ConfigurationError, NodeError.

    listen  tcp://ADDRESS:PORT of this host, that the nodes know
    folder  of the keys; None: no encryption, and so only within this host
    invite  is told of each node that is waited for
    """

    way = "by hand"
    is_by_hand = True

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

    def start(self, config: NodeConfig) -> None:
        """Only say that it is waited for: the node introduces itself when it is there."""
        if self._invite is not None:
            self._invite(config)

    def ended(self) -> list[Obituary]:
        """Nobody: a node that is gone is silent."""
        return []

    def has_room_again(self) -> bool:
        """Never: nothing is started here."""
        return False

    def pids(self) -> dict[str, int]:
        """None that are known here."""
        return {}

    def close(self) -> None:
        """Leave the nodes, which wait for another coordinator. May be called twice."""
        self._runtime.remove()
        self.logs.close()
