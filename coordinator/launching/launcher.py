"""Starts, watches and ends the node processes on this machine. None outlives the coordinator.

Every node's standard input is a pipe that only this process writes to. When this process ends,
however it ends, the pipe closes and the node ends too. A forked child closes its copies of the
pipes, and the launcher object that it inherits does nothing. Where a library forks without Python's
hooks, the node sees by its parent process id that this process has ended. What a node prints is
kept (`logs.py`).

Every node leads a process group of its own, which contains whatever the node starts, for example
the other ranks of its model. With the node the whole group is killed, stopped processes too. Where
this process itself is killed, the kernel sends SIGHUP to groups in which a process is stopped.
"""

import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from coordinator.launching.compile_cache import VARIABLES, cache_variables
from coordinator.launching.devices import default_device, gpus_of, shared_device, visible_gpus
from coordinator.launching.groups import has_ended, kill
from coordinator.launching.logs import Logs, without_stamp
from coordinator.launching.mps import PIPE, Mps
from coordinator.launching.places import name_among, place_of
from coordinator.launching.runtime_folder import RuntimeFolder
from proto.errors import NodeError
from proto.installation import ROOT
from proto.links.keys import CoordinatorKeys
from proto.links.line import Line, pair
from proto.memory import is_lack_of_memory, is_limited
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import cannot_start, remedy

logger = logging.getLogger(__name__)

END_GRACE_S = 1.0
POLL_S = 0.005
MAX_NEW_BYTES = 1 << 16
MORE_MEMORY = "it has too little memory: give it more, or raise its limits (`ulimit -v`)"
# Where memory runs out in the middle of an import, the exception may be of any type.
LIMITED_MEMORY = "its memory is limited (`ulimit -v`), which may be why: raise that limit"
_UNEXPECTED = re.compile(r"[\w.]+(Error|Exception)\b")  # the last line of a traceback
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
MODULES = {Role.TARGET: "target_node", Role.DRAFTER: "drafter_node"}


@dataclass(frozen=True, slots=True)
class Obituary:
    """How a node process ended: the text that the user reads, and the exit status.

    identity  the identity in the node's config, with which it was started
    line      how the process ended and the last line that it printed
    status    its exit status, below zero for a signal; None: its machine was lost
    """

    identity: str
    line: str
    status: int | None


class NodeLauncher(Protocol):
    """Starts node processes: on this machine (`Launcher`), on a Ray cluster, or by hand.

    endpoint  where the coordinator listens for nodes of its own host; empty: nowhere
    outside   where it listens for nodes of other hosts; empty: nowhere
    keys      the keys that encrypt connections to `outside`; None: no encryption
    secret    the word by which a node shows that it was started for this coordinator
    way       how the nodes are started, in words for people
    is_by_hand  a user starts the nodes, at any time; this launcher starts none
    folder    the folder of this coordinator's sockets, which no other user can enter
    logs      the logs of this run
    alone_on  where a target may run that no drafter disturbs; empty: where it runs beside one
    """

    way: str
    is_by_hand: bool
    folder: Path
    logs: Logs
    endpoint: str
    outside: str
    keys: CoordinatorKeys | None
    secret: str
    alone_on: str

    def start(self, config: NodeConfig, *, with_line: bool = False) -> None:
        """Start a node process. Raises NodeError if that cannot be done.

        with_line  it may talk over a line (`proto/links/line.py`), which the caller takes then
        """

    def take_line(self, identity: str) -> Line | None:
        """Take our end of the line to the node started last as this; None: there is none."""

    def ended(self) -> list[Obituary]:
        """Return how each node ended that has ended since the last call. Never waits."""

    def kill(self, identity: str) -> None:
        """End the process of a node at once; `ended` tells of it. Never waits."""

    def has_room_again(self) -> bool:
        """True if, since the last call, the cluster has room again for a node that lost its place.

        Never waits, because it is called often.
        """

    def pids(self) -> dict[str, int]:
        """Return the process ids of the running nodes by identity, for people and tests."""

    def close(self) -> None:
        """End every node, within seconds. May be called twice; does nothing in a forked child."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a Ray cluster is asked for: room for nodes of these roles, on these devices.

    address    the cluster's address: "auto" or HOST:PORT
    devices    the roles to make room for, each with its device; an empty device: the host's default
    is_packed  both nodes run on one host, even if there are two hosts
    ranks      the number of processes that share the model of a role, if more than one
    """

    address: str
    devices: Mapping[Role, str]
    is_packed: bool = False
    ranks: Mapping[Role, int] = field(default_factory=dict)


ConnectRay = Callable[[Wanted], NodeLauncher]


@dataclass(slots=True)
class NodeProcess:
    """A node process that was started, and the file that holds what it printed."""

    identity: str
    role: Role
    process: subprocess.Popen[str]
    log: Path
    num_read: int = 0  # bytes of the log that `new_lines` has returned

    def obituary(self, name: str) -> Obituary | None:
        """Return how the process ended; None while it runs. `name`: of the node, for people."""
        if not has_ended(self.process):
            return None
        status = self.process.returncode
        if status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"exited with status {status}"
        words = self.last_words()
        line = f"the {name} process {how}" + (f"; its last words: {words}" if words else "")
        if is_lack_of_memory(words):
            line += f"; {MORE_MEMORY}"
        elif is_limited() and (-status in _CRASHES or _UNEXPECTED.match(words)):
            line += f"; {LIMITED_MEMORY}"
        return Obituary(self.identity, line, status)

    def new_lines(self) -> list[str]:
        """Read and return the whole lines that the process has printed since the last call."""
        try:
            with self.log.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.num_read:
                    self.num_read = 0  # the log was shortened
                file.seek(self.num_read)
                new = file.read(MAX_NEW_BYTES)
        except OSError:
            return []
        if len(new) < MAX_NEW_BYTES:  # a line longer than that is cut, so that it is shown at all
            new = new[: new.rfind(b"\n") + 1]
        self.num_read += len(new)
        return new.decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """Return the last line that the process printed, at most 300 characters; "" if none."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return without_stamp(lines[-1]).strip()[:300] if lines else ""


def _place(error: OSError) -> str:
    """Return advice for a user on whose disk no runtime folder can be made."""
    return remedy(error, "make room there") + " (TMPDIR says where it is made)"


def _peer_device(config: NodeConfig) -> str:
    """Return the device of a node's peer, which there is: as named, or the default one."""
    return config.peer_device or default_device(
        next(role for role in MODULES if role is not config.role),
        is_alone=False,
        size=config.peer_size,
        peer_size=config.tensor_parallel_size,
    )


class Launcher:
    """Starts node processes on this machine, watches them and ends them.

    is_alone  only one node runs on this machine
    modules   Python module that the process of a role runs, where it differs from `MODULES`

    The constructor raises NodeError if no runtime folder can be made.
    """

    way = "local"
    is_by_hand = False

    def __init__(
        self,
        *,
        is_alone: bool = False,
        modules: Mapping[Role, str] = MappingProxyType({}),
    ) -> None:
        self.outside = ""
        self.alone_on = ""
        self.keys: CoordinatorKeys | None = None
        self.secret = secrets.token_hex(16)
        self._is_alone = is_alone
        self._modules = {**MODULES, **modules}
        try:
            # The folder is removed when this process ends, also where `close` is interrupted.
            self._runtime = RuntimeFolder()
        except OSError as error:
            raise NodeError(f"cannot make a runtime folder: {error}; {_place(error)}") from error
        self.folder = self._runtime.path
        self.logs = Logs(self.folder)
        self.endpoint = f"ipc://{self.folder}/s"
        self._nodes: list[NodeProcess] = []
        self._places: set[str] = set()  # of all nodes that were started
        self._lines: dict[str, Line] = {}  # our ends, by identity, until they are taken
        self._mps: Mps | None = None
        self._has_tried_mps = False
        self._compilers: Mapping[str, str] | None = None  # None: not asked for yet
        self._is_closed = False
        self._lock = threading.Lock()  # start nothing once closed
        _launchers.add(self)

    def start(self, config: NodeConfig, *, with_line: bool = False) -> None:
        """Start a node process and send it its config. Raises NodeError if that cannot be done.

        with_line  give it a line, of which the caller takes our end
        """
        try:
            config = self._completed(config)  # reads files of the system: descriptors may run out
            with self._lock:
                if self._is_closed:
                    raise NodeError(f"cannot start the {config.role} process: all are being ended")
                start = self._with_line if with_line else self._without
                config, node = start(config)
        except OSError as error:
            why = cannot_start(error)
            raise NodeError(f"cannot start the {config.role} process: {why}") from error
        try:
            assert node.process.stdin is not None
            node.process.stdin.write(config.to_json() + "\n")
            node.process.stdin.flush()
        except (OSError, ValueError):
            pass  # the node has ended already, or is being ended; its obituary says why

    def _with_line(self, config: NodeConfig) -> tuple[NodeConfig, NodeProcess]:
        """Start a node process with a line to it; return it, and its config. Raises OSError."""
        ours, theirs = pair()
        with theirs:
            config = replace(config, line=theirs.fileno())
            try:
                node = self._started(config)
            except BaseException:
                ours.close()
                raise
        self._lines[config.identity] = ours
        return config, node

    def _without(self, config: NodeConfig) -> tuple[NodeConfig, NodeProcess]:
        return config, self._started(config)

    def take_line(self, identity: str) -> Line | None:
        """Take our end of the line to the node started last as this; None: there is none."""
        return self._lines.pop(identity, None)

    def _started(self, config: NodeConfig) -> NodeProcess:
        self._share_gpu(config)
        log = self.logs.of_node(config.identity)
        with log.open("a") as output:  # append mode: writes go to the end also after `trim`
            process = subprocess.Popen(
                [sys.executable, "-m", self._modules[config.role]],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment(config),
                process_group=0,
                pass_fds=() if config.line < 0 else (config.line,),
            )
        node = NodeProcess(config.identity, config.role, process, log)
        self._nodes.append(node)
        self._places.add(place_of(config.identity))
        return node

    def _share_gpu(self, config: NodeConfig) -> None:
        """Start NVIDIA MPS once both nodes share a GPU, so that their kernels overlap."""
        if self._has_tried_mps or not self._shares_gpu(config, config.device):
            return
        own = gpus_of(config.device, config.tensor_parallel_size)
        visible = visible_gpus()
        if shared := [number for number in sorted(own) if number < len(visible)]:
            self._has_tried_mps = True
            self._mps = Mps.start(self.folder, visible, shared[0])

    def _environment(self, config: NodeConfig) -> dict[str, str]:
        given = dict(os.environ)
        if not given.get(PIPE) or (self._has_tried_mps and self._mps is None):
            given.pop(PIPE, None)
        of_mps = self._mps.environment(config.role) if self._mps is not None else {}
        # Files that its libraries leave in TMPDIR are removed together with our runtime folder.
        own = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(self.folder)}
        compilers: Mapping[str, str] = {}
        if config.device.startswith("cuda"):
            compilers = self._of_compilers()
        return {**given, **own, **of_mps, **compilers}

    def _of_compilers(self) -> Mapping[str, str]:
        """Return the environment variables that show nodes where compiled programs are kept."""
        if self._compilers is None:
            try:
                self._compilers = cache_variables(os.environ)
            except OSError as error:
                logger.warning(
                    "programs are compiled anew at each start: they cannot be kept (%s); "
                    "set XDG_CACHE_HOME",
                    error,
                )
                self._compilers = {
                    name: str(self.folder / folder) for name, folder in VARIABLES.items()
                }
        return self._compilers

    def _completed(self, config: NodeConfig) -> NodeConfig:
        """Return the config with the device, dtype and parent process id of this machine."""
        shared = shared_device() if self._may_share(config) else ""
        self.alone_on = shared or self.alone_on
        is_beside = config.peer_device is not None or bool(shared)
        device = config.device or default_device(
            config.role,
            is_alone=self._is_alone,
            size=config.tensor_parallel_size,
            peer_size=config.peer_size,
            # With fixed rows the cores must not depend on whether there is a drafter.
            has_peer=is_beside or config.fixed_rows > 0,
        )
        dtype = config.dtype_on_cpu if device.startswith("cpu") else ""
        return replace(
            config,
            device=device,
            shared_device=shared,
            shares_gpu=config.role is Role.TARGET and self._shares_gpu(config, device),
            dtype=dtype or config.dtype,
            parent_pid=os.getpid(),
            peer_bytes=config.peer_bytes * self._shares_memory(config, device),
        )

    def _shares_memory(self, config: NodeConfig, device: str) -> bool:
        """True if the node's device has the other node's model in its memory as well."""
        if self._is_alone or config.peer_device is None or not config.peer_bytes:
            return False
        theirs = _peer_device(config)
        if device.startswith("cpu"):
            return theirs.startswith("cpu")
        return self._shares_gpu(config, device)

    def _shares_gpu(self, config: NodeConfig, device: str) -> bool:
        """True if the other node computes on one of the node's GPUs."""
        own = gpus_of(device, config.tensor_parallel_size)
        if not own or self._is_alone or config.peer_device is None:
            return False
        return bool(own & gpus_of(_peer_device(config), config.peer_size))

    def _may_share(self, config: NodeConfig) -> bool:
        """True for a target that may leave the default cores, or go back to them, in mid-text.

        Not where passes have fixed rows, so that no time may decide.
        """
        are_default = not self._is_alone and not config.device and not config.peer_device
        is_one_process = config.tensor_parallel_size == 1 and config.peer_size == 1
        is_simulated = config.simulated_ms > 0 or config.simulated_ms_per_row > 0
        may_vary = not is_simulated and not config.fixed_rows
        return config.role is Role.TARGET and are_default and is_one_process and may_vary

    def ended(self) -> list[Obituary]:
        """Remove the nodes that have ended and return how each ended; shorten long logs."""
        self.logs.trim()
        nodes = list(self._nodes)
        found = [(node, end) for node in nodes if (end := node.obituary(self._name_of(node)))]
        for node, _ in found:
            self._nodes.remove(node)  # in place: another thread may append a new node
        return [obituary for _, obituary in found]

    def _name_of(self, node: NodeProcess) -> str:
        return name_among(node.identity, self._places)

    def kill(self, identity: str) -> None:
        """End the process of a node, and all that it has started, also if it is stopped."""
        for node in list(self._nodes):
            if node.identity == identity and node.process.returncode is None:
                kill(node.process)

    def has_room_again(self) -> bool:
        """Return False: nodes never lose their place on this machine."""
        return False

    def new_lines(self) -> list[str]:
        """Return the lines that the nodes have printed since the last call, each after its name."""
        return [
            f"{self._name_of(node)}: {line}"
            for node in list(self._nodes)
            for line in node.new_lines()
        ]

    def pids(self) -> dict[str, int]:
        """Return the process ids of the running nodes by identity, for people and tests."""
        return {node.identity: node.process.pid for node in self._nodes}

    def close(self) -> None:
        """End every node: close its standard input, then send SIGTERM, then SIGKILL."""
        with self._lock:
            self._is_closed = True
        for node in self._nodes:
            if node.process.stdin is not None and not node.process.stdin.closed:
                node.process.stdin.close()
        for insist in (None, signal.SIGTERM, signal.SIGKILL):
            for node in self._nodes:
                if insist is None or has_ended(node.process):
                    continue
                if insist is signal.SIGKILL:
                    kill(node.process)
                else:
                    node.process.send_signal(insist)
            if self._wait():
                break
        self._nodes = []
        for ours in self._lines.values():
            ours.close()
        if self._mps is not None:
            self._mps.stop()
        self._runtime.remove()
        self.logs.close()

    def disown(self) -> None:
        """In a forked child: forget the nodes, so that only the parent can end them."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for node in self._nodes:
            if node.process.stdin is not None and not node.process.stdin.closed:
                # Closing the file would wait for its lock, which a thread of the parent may hold.
                os.dup2(nowhere, node.process.stdin.fileno(), inheritable=False)
        os.close(nowhere)
        self._nodes = []
        if self._mps is not None:
            self._mps.disown()
        self._lock = threading.Lock()  # a thread of the parent may have held it

    def _wait(self) -> bool:
        """Wait up to END_GRACE_S seconds; True if all nodes have ended."""
        deadline = time.monotonic() + END_GRACE_S
        while not all(has_ended(node.process) for node in self._nodes):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def _disown_all() -> None:
    for launcher in _launchers:
        launcher.disown()


os.register_at_fork(after_in_child=_disown_all)
