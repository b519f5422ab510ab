"""`serve --ray-serve`: starts the application on a cluster, and ends it after a signal.

The command line finds `serve_replicas` by its entry point (`slipstream.launchers` in
pyproject.toml). Like all applications of Ray Serve it stays if this process is killed: then
`serve shutdown` ends it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.replicas import ReplicasConfig
from coordinator.http.settings import ServeConfig
from deploy import ray_address
from proto.errors import ConfigurationError, NodeError, TransportError
from proto.installation import missing

LOOK_S = 1.0  # between two looks whether the application is well
MOST_GPUS = 2  # of a replica, where nobody has said how many: one for each model


def serve_replicas(
    address: str,
    pair: PairConfig,
    speculation: SpeculationConfig,
    server: ServeConfig,
    replicas: ReplicasConfig,
    model: str,
    say: Callable[[str], None],
) -> None:
    """Serve until a signal. Raises ConfigurationError, TransportError, NodeError.

    address  of the cluster
    model    its name for people
    say      called with each line for people
    """
    if find_spec("ray") is None:
        raise ConfigurationError(f"--ray-serve needs {missing('ray', 'ray')}")
    ray_address.check(address)
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        from deploy import ray_launcher, serve_app
    except ImportError as error:
        wanted = missing(str(error.name), "ray-serve")
        raise ConfigurationError(f"--ray-serve needs {wanted}") from error
    ray_launcher.check_reachable(address)
    ray_launcher.join(address)
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    application = serve_app.application(pair, speculation, server, replicas, _gpus(replicas))
    status = serve.status()
    if status.proxies or status.applications:
        raise TransportError(
            "Ray Serve runs on this cluster already; `serve shutdown` ends it (docs/cluster.md)"
        )
    try:
        serve.start(http_options={"host": server.host, "port": server.port})
        _start(application, replicas.replicas, say)
        url = f"http://{server.host}:{server.port}"
        say(f"{model} is served at {url}/v1 by Ray Serve; Ctrl-C ends")
        while serve_app.NAME in serve.status().applications:
            time.sleep(LOOK_S)
        raise NodeError("the application was deleted from Ray Serve")
    except (RayServeException, RayError) as error:
        raise TransportError(f"Ray Serve: {ray_launcher.line_of(error)}") from error
    finally:
        with suppress(RayServeException, RayError):
            serve.shutdown()
        ray.shutdown()


def _start(application: Any, num_replicas: int, say: Callable[[str], None]) -> None:
    """Return when all replicas are ready. Raises NodeError: they cannot be started.

    Says how many are ready whenever that changes, and once that the cluster has no room.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from deploy.serve_app import NAME, PAIR

    why = "the log says why"  # until something else is known

    def run() -> None:
        nonlocal why
        try:
            serve.run(application, name=NAME, route_prefix="/")
            why = ""
        except (RayServeException, RayError, RuntimeError, OSError, ValueError) as error:
            why = str(error).strip() or type(error).__name__

    starting = threading.Thread(target=run, name="ray-serve", daemon=True)
    starting.start()
    told, pairs = "", None
    while starting.is_alive():
        starting.join(LOOK_S)
        found = serve.status().applications.get(NAME)
        pairs = found.deployments.get(PAIR) if found is not None else None
        states = pairs.replica_states if pairs is not None else {}
        num_ready = sum(number for state, number in states.items() if state == "RUNNING")
        line = f"{num_ready} of {num_replicas} replicas are ready" if num_ready else ""
        if not num_ready and pairs is not None and "scheduled" in pairs.message:
            line = "Ray Serve has no room for a replica yet; `ray status` shows what is free"
        if line and line != told:
            say(line)
            told = line
    if why:
        raise NodeError(_why((pairs.message if pairs is not None else "") or why))


def _gpus(replicas: ReplicasConfig) -> int:
    """Return how many GPUs a replica gets: by default as many as a host has, up to MOST_GPUS."""
    import ray

    if replicas.replica_gpus is not None:
        return replicas.replica_gpus
    here = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min(MOST_GPUS, max(here, default=0))


def _why(told: str) -> str:
    """Return in a line why replicas cannot be started, from what Ray Serve tells of it."""
    causes = [line.strip() for line in told.splitlines() if "RuntimeError:" in line]
    if not causes:
        return f"Ray Serve cannot start the replicas: {told.strip().partition(chr(10))[0]}"
    cause = causes[-1].rpartition("RuntimeError:")[2].strip().removeprefix("error: ")
    return f"a replica cannot be started: {cause}"
