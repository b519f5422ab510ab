"""Node processes on a Ray cluster: one supervising actor per node. The only file that imports ray.

Ray reserves a machine for each role (a placement group; the roles are custom resources of the Ray
nodes), starts the actor there, and ends it with the coordinator's job, however the coordinator
ends. The actor starts the node process as the local launcher does and holds its lifeline: when the
actor goes, the node goes. Tokens never pass through Ray: nodes connect to the coordinator.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.cluster.launcher import ROOT, Obituary
from proto.errors import ConfigurationError, NodeError, SlipstreamError, TransportError
from proto.messages import Role
from proto.node_config import NodeConfig

CONNECT_LIMIT_S = 10.0
PLACEMENT_LIMIT_S = 10.0
START_LIMIT_S = 60.0  # Ray starts a Python process for the actor; the node loads its model later
CLOSE_LIMIT_S = 5.0  # the local launcher insists after one and after two seconds
POLL_S = 0.05

# The supervisor's code is sent to the cluster, not its name: it must run before anything of the
# project can be imported there, to say that the project is not there.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Supervisor:
    """The actor: starts one node process on its machine and holds it. Runs two methods at once."""

    def start(self, root: str, network: str, config: str) -> int:
        """Start the node; return its process id."""
        if loopback_network() != network:
            raise RuntimeError(
                "its Ray node is on another machine; what nodes and coordinator send is not "
                "encrypted, so all must be on one machine"
            )
        if not Path(root, "coordinator", "cluster", "launcher.py").is_file():
            raise RuntimeError(f"the repository is not at {root} on its Ray node; put it there")
        sys.path.insert(0, root)
        from coordinator.cluster.launcher import Launcher
        from proto.node_config import NodeConfig

        forget_thread_limit()
        self._launcher = Launcher()
        self._launcher.start(NodeConfig.from_json(config))
        (pid,) = self._launcher.pids().values()
        return pid

    def wait(self) -> "Obituary":  # in quotes: where this runs, the name may not be there yet
        """Return when the node has ended, and how it did."""
        while not (ended := self._launcher.ended()):
            time.sleep(POLL_S)
        return ended[0]

    def close(self) -> None:
        """End the node."""
        self._launcher.close()


def loopback_network() -> str:
    """A name for what 127.0.0.1 reaches from this process: the boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def forget_thread_limit() -> None:
    """Undo what Ray does to an actor without CPUs: one thread, also for a node on all cores."""
    raylet = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if b"OMP_NUM_THREADS=" not in raylet:
        os.environ.pop("OMP_NUM_THREADS", None)


class RayLauncher:
    """Starts nodes on the Ray cluster at `address` ("auto" or HOST:PORT), a machine for each role.

    Raises TransportError if there is no such cluster, NodeError if it has no room for the roles.
    """

    def __init__(self, address: str, roles: tuple[Role, ...]) -> None:
        self.endpoint = "tcp://127.0.0.1:*"
        self._roles = roles
        self._owner = os.getpid()
        self._actors: dict[Role, Any] = {}
        self._pids: dict[Role, int] = {}
        self._deaths: dict[Role, Future[Obituary]] = {}
        self._identities: dict[Role, str] = {}
        _check_reachable(address)
        try:
            _connect(address)
            self._group = _reserve(roles)
        except BaseException:
            ray.shutdown()
            raise

    def start(self, config: NodeConfig) -> None:
        """Start a node. Raises NodeError if that cannot be done."""
        role = config.role
        place = PlacementGroupSchedulingStrategy(self._group, self._roles.index(role))
        actor = ray.remote(Supervisor).options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=place,
        )
        supervisor: Any = actor.remote()
        self._actors[role] = supervisor
        self._identities[role] = config.identity
        started = supervisor.start.remote(str(ROOT), loopback_network(), config.to_json())
        self._pids[role] = _answer(role, started)
        self._deaths[role] = supervisor.wait.remote().future()

    def ended(self) -> list[Obituary]:
        """The nodes that have ended since the last call."""
        found = [(role, death) for role, death in list(self._deaths.items()) if death.done()]
        for role, _ in found:
            del self._deaths[role]
            del self._pids[role]
        return [_obituary(role, self._identities[role], death) for role, death in found]

    def pids(self) -> dict[str, int]:
        """Process ids by role, for people and tests."""
        return {str(role): pid for role, pid in self._pids.items()}

    def close(self) -> None:
        """End the nodes and their actors, give the place back, leave the cluster."""
        if os.getpid() != self._owner:
            return  # a forked child's copy
        self._deaths.clear()
        self._pids.clear()
        actors = [self._actors.pop(role) for role in list(self._actors)]
        if not ray.is_initialized():
            return
        # Ray waits a minute for a cluster that is gone, and then ends this process.
        leaving = threading.Thread(target=_leave, args=(actors, self._group), daemon=True)
        leaving.start()
        leaving.join(CLOSE_LIMIT_S)
        if leaving.is_alive():
            atexit.register(_exit_at_once)


def _leave(actors: list[Any], group: PlacementGroup) -> None:
    with contextlib.suppress(RayError):
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors))
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
    ray.shutdown()


def _exit_at_once() -> None:
    """Ray would wait again at exit, or crash in a thread that still waits."""
    sys.stdout.flush()
    os._exit(1)


def _check_reachable(address: str) -> None:
    """Raises TransportError. Asks in a process of its own.

    At an address that does not answer, Ray tries for minutes, prints, and ends the process.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONNECT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"no Ray cluster answers at {address} ({CONNECT_LIMIT_S:.0f} s); is it up there?"
        ) from error
    if done.returncode == 0:
        return
    if "uthentication" in done.stderr:
        raise TransportError(
            f"the Ray cluster at {address} wants a token: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to its own"
        )
    words = done.stderr.strip().splitlines()[-1:] or ["it does not say why"]
    raise TransportError(f"cannot reach a Ray cluster at {address}: {words[0][:300]}")


def _connect(address: str) -> None:
    """Join the cluster, silently. Raises TransportError."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise TransportError(f"cannot join the Ray cluster at {address}: {_line(error)}") from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own there


def _reserve(roles: tuple[Role, ...]) -> PlacementGroup:
    """A bundle for each role, in their order. Raises NodeError, ConfigurationError."""
    there = ray.cluster_resources()
    for role in roles:
        if there.get(str(role), 0) < 1:
            raise ConfigurationError(
                f"the Ray cluster has no node with the resource `{role}`; start one with "
                f"`ray start --resources='{{\"{role}\": 1}}' ...` (deploy/README.md)"
            )
    group: PlacementGroup = placement_group([{str(role): 1.0} for role in roles], name="slipstream")
    if not group.wait(PLACEMENT_LIMIT_S):
        remove_placement_group(group)
        names = " and ".join(f"`{role}`" for role in roles)
        raise NodeError(
            f"the Ray cluster's {names} did not become free in {PLACEMENT_LIMIT_S:.0f} s; "
            "another coordinator uses them"
        )
    return group


def _answer(role: Role, started: "ray.ObjectRef[int]") -> int:
    """What the supervisor returned. Raises NodeError, or the project's error it raised."""
    try:
        return ray.get(started, timeout=START_LIMIT_S)
    except RayTaskError as error:
        if isinstance(error.cause, SlipstreamError):
            raise error.cause from error
        raise NodeError(f"cannot start the {role}: {_line(error.cause)}") from error
    except GetTimeoutError as error:
        raise NodeError(
            f"cannot start the {role}: Ray did not start its supervisor in {START_LIMIT_S:.0f} s"
        ) from error
    except RayError as error:
        raise NodeError(f"cannot start the {role}: {_line(error)}") from error


def _obituary(role: Role, identity: str, death: Future[Obituary]) -> Obituary:
    try:
        return death.result()
    except RayError as error:
        line = f"the {role} process went with its Ray node: {_line(error)}"
        return Obituary(identity, line, status=None)


def _line(error: BaseException) -> str:
    """The first line of Ray's explanations."""
    return str(error).strip().split("\n", 1)[0][:300]
