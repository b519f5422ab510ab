"""Starts node processes on a Ray cluster, with one supervising actor per node; imports ray.

No other file imports ray. Ray reserves a host for each role (a placement group; the roles are
custom resources of the Ray nodes), starts the actor there, and ends it with the coordinator's job,
however the coordinator ends. The actor starts the node process as the local launcher does and holds
the pipe to it: when the actor ends, the node ends. Tokens and secret keys never pass through Ray:
nodes connect to the coordinator.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.launching.launcher import Obituary, Wanted
from coordinator.launching.logs import Logs
from coordinator.launching.mps import CONTROL, PIPE
from coordinator.launching.runtime_folder import RuntimeFolder
from deploy import supervisor
from deploy.supervisor import ActorHost, Supervisor, loopback_network
from proto.errors import ConfigurationError, NodeError, SlipstreamError, TransportError
from proto.links.keys import CoordinatorKeys, KeyPair
from proto.messages import Role
from proto.node_config import NodeConfig
from slipstream import __version__

logger = logging.getLogger(__name__)

CONNECT_LIMIT_S = 10.0
PLACEMENT_LIMIT_S = 10.0
START_LIMIT_S = 60.0  # Ray starts a Python process for the actor; the node loads its model later
CLOSE_LIMIT_S = 5.0  # the local launcher sends SIGTERM after one second, SIGKILL after two
LOOK_EVERY_S = 5.0  # how often new hosts are looked for while a node has none
# Words in Ray's message if an actor's process has ended, but not its host.
ACTOR_DIED = ("its worker process has died", "it was killed by `ray.kill`")

# The supervisor's code is sent to the cluster, not its module name: it must run before the project
# can be imported there, so that it can report that the project is missing.
ray.cloudpickle.register_pickle_by_value(supervisor)


class Lookout:
    """Looks for new hosts of the cluster, in a thread of its own because that may take long.

    look  returns the hosts that are there now, by id, with the resources that they offer
    """

    def __init__(self, look: Callable[[], dict[str, frozenset[str]]]) -> None:
        self._look = look
        self._known: frozenset[str] | None = None  # that offer it; None: not looked yet
        self._found: queue.SimpleQueue[dict[str, frozenset[str]]] = queue.SimpleQueue()
        self._next_look = 0.0
        self._is_looking = False

    def has_news(self, wanted: set[str]) -> bool:
        """True, once, if a look found a host with a wanted resource that the look before lacked."""
        if not wanted:
            self._known = None
            return False
        if not self._is_looking and time.monotonic() >= self._next_look:
            with contextlib.suppress(RuntimeError):  # no room for a thread: try later
                threading.Thread(target=self._go, name="lookout", daemon=True).start()
                self._is_looking = True
        with contextlib.suppress(queue.Empty):
            hosts = self._found.get_nowait()
            self._is_looking = False
            self._next_look = time.monotonic() + LOOK_EVERY_S
            before = self._known
            self._known = frozenset(host for host, offers in hosts.items() if offers & wanted)
            return before is not None and not self._known <= before
        return False

    def _go(self) -> None:
        hosts: dict[str, frozenset[str]] = {}
        with contextlib.suppress(RayError, RuntimeError, OSError, ValueError, KeyError):
            hosts = self._look()
        self._found.put(hosts)


def _hosts() -> dict[str, frozenset[str]]:
    return {node["NodeID"]: frozenset(node["Resources"]) for node in ray.nodes() if node["Alive"]}


class RayLauncher:
    """Starts nodes on a Ray cluster, each on a host of its own where there are two.

    A node on the coordinator's own host connects as without Ray. For the others the coordinator
    listens at its host's address in the cluster; every link has new keys, and no secret key leaves
    the process that has made it.

    Raises TransportError if there is no such cluster, NodeError if it has no room for the roles or
    a host is not ready.
    """

    way = "Ray"
    is_by_hand = False
    alone_on = ""

    def __init__(self, wanted: Wanted) -> None:
        self.secret = secrets.token_hex(16)
        self.outside = ""
        self.keys: CoordinatorKeys | None = None
        self._roles = tuple(wanted.devices)
        self._lost: set[Role] = set()  # roles whose actor or host is lost
        self._is_closed = False
        self._lock = threading.Lock()  # no actor is started once it is closed
        self._owner = os.getpid()
        self._lookout = Lookout(_hosts)
        self._actors: dict[Role, Any] = {}
        self._pids: dict[Role, int] = {}
        self._deaths: dict[Role, Future[Obituary]] = {}
        self._identities: dict[Role, str] = {}
        self._runtime = RuntimeFolder()
        self.folder = self._runtime.path
        self.logs = Logs(self.folder)
        self.endpoint = f"ipc://{self.folder}/s"
        check_reachable(wanted.address)
        try:
            join(wanted.address)
            self._bundles = _bundles(wanted)
            self._group = _reserve(self._roles, self._bundles, is_packed=wanted.is_packed)
            self._places = self._arrive(self._roles)
            self._say_if_shared()
        except BaseException:
            self._runtime.remove()
            _leave_in_time(list(self._actors.values()), None)
            raise
        if not all(map(self._is_near, self._roles)):
            self.outside = f"tcp://{ray.util.get_node_ip_address()}:*"
            self.keys = CoordinatorKeys(KeyPair.new())

    def _arrive(self, roles: tuple[Role, ...]) -> dict[Role, ActorHost]:
        """Start supervisor actors; return where each one runs. Raises NodeError."""
        asked = {}
        for role in roles:
            index = self._roles.index(role)
            with self._lock:
                if self._is_closed:
                    raise NodeError(f"cannot start the {role}: all nodes are being ended")
                actor = _supervisor(self._group, index, self._bundles[index])
                self._actors[role] = actor
            asked[role] = actor.arrive.remote(__version__, str(self.folder))
        return {role: ActorHost(*_answer(role, answer)) for role, answer in asked.items()}

    def _say_if_shared(self) -> None:
        """Warn if both nodes are on one GPU of the cluster.

        No MPS is started there: it would belong to an actor, which may end before the other node.
        """
        seen = [(place.network, gpu) for place in self._places.values() for gpu in place.gpus]
        if len(set(seen)) < len(seen):
            logger.warning(
                "both nodes share a GPU of a Ray host in turns, unless %s runs there and `ray "
                "start` was given its %s",
                *(CONTROL, PIPE),
            )

    def _is_near(self, role: Role) -> bool:
        place = self._places[role]
        return place.network == loopback_network() and place.can_enter

    def start(self, config: NodeConfig, *, with_line: bool = False) -> None:
        """Start a node. Raises NodeError if that cannot be done."""
        del with_line
        try:
            self._start(config)
        except (RayError, KeyError, RuntimeError, ValueError) as error:
            # While Ray is shut down, its calls raise errors of all these kinds.
            raise NodeError(f"cannot start the {config.role}: {line_of(error)}") from error

    def _start(self, config: NodeConfig) -> None:
        role = config.role
        if role in self._lost:
            ray.kill(self._actors[role])
            self._places |= self._arrive((role,))
        self._lost.add(role)  # until the actor has answered
        place = self._places[role]
        if not self._is_near(role):
            if self.keys is None:
                raise NodeError(f"cannot start the {role}: it is on another host than before")
            self.keys.nodes[config.identity.encode()] = place.public_key
            config = replace(config, endpoint=config.outside, coordinator_key=self.keys.own.public)
        is_alone = [one.network for one in self._places.values()].count(place.network) == 1
        actor = self._actors[role]
        self._identities[role] = config.identity
        self._pids[role] = _answer(role, actor.start.remote(config.to_json(), is_alone=is_alone))
        self._deaths[role] = actor.wait.remote().future()
        self._lost.discard(role)

    def take_line(self, identity: str) -> None:
        """Return None: frames to nodes elsewhere go over the network."""
        del identity

    def ended(self) -> list[Obituary]:
        """Remove the nodes that have ended, and return how each of them ended."""
        found = [(role, death) for role, death in list(self._deaths.items()) if death.done()]
        for role, _ in found:
            del self._deaths[role]
            del self._pids[role]
        return [self._obituary(role, death) for role, death in found]

    def _obituary(self, role: Role, death: Future[Obituary]) -> Obituary:
        try:
            return death.result()
        except RayError as error:
            self._lost.add(role)
            line = f"the {role} process went with {_lost_with(error, self._places[role].host)}"
            return Obituary(self._identities[role], line, status=None)

    def kill(self, identity: str) -> None:
        """End the process of a node at once, by the actor that holds it."""
        with contextlib.suppress(RayError, RuntimeError):
            for role, known in list(self._identities.items()):
                if known == identity and role in self._actors:
                    self._actors[role].kill.remote(identity)

    def has_room_again(self) -> bool:
        """True if a new host has come that offers the role of a lost node."""
        return self._lookout.has_news({str(role) for role in self._lost.copy()})

    def pids(self) -> dict[str, int]:
        """Return the process ids of the nodes by identity, for people and tests."""
        return {self._identities[role]: pid for role, pid in self._pids.items()}

    def close(self) -> None:
        """End the nodes and their actors, free the reserved places and leave the cluster."""
        if os.getpid() != self._owner:
            return  # a forked child's copy
        with self._lock:
            self._is_closed = True
            actors = [self._actors.pop(role) for role in list(self._actors)]
        self._deaths.clear()
        self._pids.clear()
        self._runtime.remove()
        self.logs.close()
        _leave_in_time(actors, self._group)


def _lost_with(error: RayError, host: str) -> str:
    """Return what was lost with the node, by Ray's words: its actor or its host."""
    if isinstance(error, ActorDiedError) and any(words in str(error) for words in ACTOR_DIED):
        return f"the Ray actor that held it on {host}"
    return f"its host {host}"


def _leave_in_time(actors: list[Any], group: PlacementGroup | None) -> None:
    """End the actors and leave the cluster, within CLOSE_LIMIT_S seconds.

    If a cluster is gone, Ray waits a minute for it and then ends this process.
    """
    if not ray.is_initialized():
        return
    leaving = threading.Thread(target=_leave, args=(actors, group), daemon=True)
    leaving.start()
    leaving.join(CLOSE_LIMIT_S)
    if leaving.is_alive():
        _end_without_ray()


def _leave(actors: list[Any], group: PlacementGroup | None) -> None:
    with contextlib.suppress(RayError):
        # An actor that has not started yet does not answer.
        closing = [actor.close.remote() for actor in actors]
        ray.wait(closing, num_returns=len(actors), timeout=CLOSE_LIMIT_S / 2)
        for actor in actors:
            ray.kill(actor)
        if group is not None:  # otherwise it is removed with the job
            remove_placement_group(group)
    ray.shutdown()


def _end_without_ray() -> None:
    """Prevent that the end of this process waits for Ray again or crashes in its threads.

    The process ends through a handler of the C library, which gets the program's exit status.
    """
    atexit.unregister(worker.shutdown)
    if sys.excepthook is worker.custom_excepthook:  # Ray's hook would report to the cluster
        sys.excepthook = worker.normal_excepthook
    library = ctypes.CDLL(None)
    library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)


def check_reachable(address: str) -> None:
    """Raise TransportError if no cluster answers at the address. Asks in a subprocess.

    If an address does not answer, Ray itself tries for minutes, prints, and ends its process.
    """
    # -P: not with this folder in front, where in a checkout there is a `proto` that is not Ray's.
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts"]
    command += ["health-check", "--address", address]
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
            f"the cluster at {address} wants a token: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    words = done.stderr.strip().splitlines()[-1:] or ["it does not say why"]
    raise TransportError(f"cannot reach a Ray cluster at {address}: {words[0][:300]}")


def join(address: str) -> None:
    """Join the cluster, silently. Raises TransportError."""
    # Despite `log_to_driver=False` Ray prints on stdout, among the text, when a host is gone. The
    # end of a node is reported in the project's own words.
    worker.print_to_stdstream = _say_nothing
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise TransportError(
            f"cannot join the Ray cluster at {address}: {line_of(error)}"
        ) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own handler


def _say_nothing(*_: object, **__: object) -> None:
    pass


def _bundles(wanted: Wanted) -> list[dict[str, float]]:
    """Return the resources to ask for, by role: the role and its GPUs or CPUs.

    A target on a CPU takes all CPUs of its node, except one if the drafter may need it. Raises
    ConfigurationError: no node of the cluster offers a role.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundles = []
    for role, device in wanted.devices.items():
        offers = [node for node in nodes if node.get(str(role), 0) >= 1]
        if not offers:
            raise ConfigurationError(
                f"the Ray cluster has no node with the resource `{role}`; docs/cluster.md says how "
                "to start one"
            )
        bundle = {str(role): 1.0}
        num_gpus = max(node.get("GPU", 0) for node in offers)
        is_shared = all(node.get(str(one), 0) for node in offers for one in wanted.devices)
        if device.startswith("cuda") or (not device and num_gpus):
            num_wanted = wanted.ranks.get(role, 1)
            halved = is_shared and num_gpus == num_wanted == 1
            bundle["GPU"] = 0.5 if halved else float(num_wanted)
        elif role is Role.TARGET:
            cores = min(node.get("CPU", 0) for node in offers) - is_shared
            bundle |= {"CPU": cores} if cores >= 1 else {}
        bundles.append(bundle)
    return bundles


def _reserve(
    roles: tuple[Role, ...], bundles: list[dict[str, float]], *, is_packed: bool
) -> PlacementGroup:
    """Reserve the resources of each bundle in the cluster; return the group. Raises NodeError."""
    num_nodes = sum(
        any(node["Resources"].get(str(role), 0) for role in roles)
        for node in ray.nodes()
        if node["Alive"]
    )
    strategy = "PACK" if is_packed or num_nodes < len(roles) else "STRICT_SPREAD"
    group: PlacementGroup = placement_group(bundles, strategy=strategy, name="slipstream")
    if not group.wait(PLACEMENT_LIMIT_S):
        remove_placement_group(group)
        names = " and ".join(f"`{role}`" for role in roles)
        raise NodeError(
            f"the Ray cluster's {names} did not become free in {PLACEMENT_LIMIT_S:.0f} s; "
            "another coordinator uses them"
        )
    return group


def _supervisor(group: PlacementGroup, index: int, bundle: dict[str, float]) -> Any:
    """Start an actor in a reserved place and return it; its `cuda:0` is the GPU that Ray gives."""
    actor = ray.remote(Supervisor).options(
        num_cpus=0,
        num_gpus=bundle.get("GPU", 0),
        max_restarts=0,
        max_concurrency=2,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
    )
    return actor.remote()


def _answer(role: Role, started: "ray.ObjectRef[Any]") -> Any:
    """Return a supervisor's answer. Raises NodeError, or the project's error that it raised."""
    try:
        return ray.get(started, timeout=START_LIMIT_S)
    except RayTaskError as error:
        if isinstance(error.cause, SlipstreamError):
            raise error.cause from error
        raise NodeError(f"cannot start the {role}: {line_of(error.cause)}") from error
    except GetTimeoutError as error:
        raise NodeError(
            f"cannot start the {role}: Ray did not start its supervisor in {START_LIMIT_S:.0f} s"
        ) from error
    except ActorUnschedulableError as error:
        raise NodeError(
            f"cannot start the {role}: no host of the cluster is free for it"
        ) from error
    except (ActorDiedError, ActorUnavailableError) as error:
        is_killed = any(words in str(error) for words in ACTOR_DIED)
        why = "the Ray actor that holds it has died" if is_killed else "its host does not answer"
        raise NodeError(f"cannot start the {role}: {why}") from error
    except RayError as error:
        raise NodeError(f"cannot start the {role}: {line_of(error)}") from error


def line_of(error: BaseException) -> str:
    """Return the first line of one of Ray's error messages."""
    return str(error).strip().split("\n", 1)[0][:300]
