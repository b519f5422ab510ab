"""The application for Ray Serve: pairs by the dozen behind our router; imports ray.serve.

Two deployments. `pair`: each replica holds a whole server (`serve_pair.py`). `ingress`: our router
(`coordinator/ingress`), which keeps the tokens of each answer and moves a text when its replica is
lost; Ray Serve chooses the replica, counts what is in work there, and adds and ends replicas. Bytes
go through Ray's own calls, so that a server is reached by its replica alone.
"""

import asyncio
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel
from ray import cloudpickle, serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import checked
from coordinator.api.replicas import ReplicasConfig
from coordinator.cli.words import words_of
from coordinator.http.settings import ServeConfig
from deploy import serve_pair, supervisor
from proto.errors import ConfigurationError
from slipstream import __version__

T = TypeVar("T", bound=BaseModel)

NAME = "slipstream"  # of the application
PAIR, INGRESS = "pair", "ingress"  # of its deployments
URL = "http://127.0.0.1"  # of any replica: what its server takes for its own address
HEALTH_PERIOD_S, HEALTH_LIMIT_S = 1.0, 5.0
IN_WORK = 512  # most requests that a replica is given; its server has limits of its own
UPSCALE_S, DOWNSCALE_S = 10.0, 300.0  # how long there is more or less to do before it counts
# How long another replica is asked by the status of the last one, and how often. Ray Serve may not
# know yet that a replica is lost, and one that ends refuses requests for a moment.
PATIENCE_S = {serve_pair.AWAY: 15.0, 503: 3.0}
AGAIN_S = 0.2
WAIT_S = 60.0  # how long a request or a broken stream waits for a replica
SEED_BITS = 31
# Settings of the ingress, which the replicas' servers do not get: each has its own address and key.
OF_INGRESS = (
    *("host", "port", "api_key", "api_key_file", "insecure", "allowed_host", "allow_origin"),
    *("forwarded_allow_ips", "log_requests", "log_format"),
)

# Their code is sent to the cluster, not their names: see `supervisor.py`.
for module in (supervisor, serve_pair, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


class ThroughRay(httpx.AsyncBaseTransport):
    """Sends requests to whichever replica Ray Serve chooses.

    pairs  a handle of the deployment `pair`
    """

    def __init__(self, pairs: Any) -> None:
        self._well = pairs.options(method_name="is_well")
        self._ask = pairs.options(method_name="ask", stream=True)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer of a replica. Raises httpx.ReadError: it was lost on the way."""
        body = await request.aread()
        target = request.url.raw_path.decode("ascii")
        if (limit_s := request.extensions.get("timeout", {}).get("read")) is not None:
            return await self._health(limit_s)  # only the router's own questions have a limit
        headers = [
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in request.headers.raw
        ]
        since = time.monotonic()
        while True:
            parts = self._ask.remote(request.method, target, headers, body)
            try:
                status, answered = await anext(parts)
            except RayActorError as error:
                status, answered, why = serve_pair.AWAY, [], str(error)
            except (RayError, RayServeException, RuntimeError, StopAsyncIteration) as error:
                raise httpx.ReadError(str(error), request=request) from error
            except BaseException:
                parts.cancel()
                raise
            else:
                why = "its server is away"
            passed_s = time.monotonic() - since
            if passed_s >= PATIENCE_S.get(status, 0.0):
                if status == serve_pair.AWAY:
                    raise httpx.ReadError(why, request=request)
                stream = Parts(parts)
                return httpx.Response(status, headers=answered, stream=stream, request=request)
            parts.cancel()
            await asyncio.sleep(AGAIN_S)

    async def _health(self, limit_s: float) -> httpx.Response:
        """Answer for all replicas: well if one of them is. One that is asked may just have died."""
        for _ in range(2):
            try:
                if await asyncio.wait_for(self._well.remote(), limit_s / 2):
                    return httpx.Response(200)
            except (RayError, RayServeException, TimeoutError):
                continue
        return httpx.Response(503)


class Parts(httpx.AsyncByteStream):
    """The parts of an answer, as they come from a replica."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts. Raises httpx.ReadError: the replica was lost."""
        try:
            async for part in self._parts:
                yield part
        except (RayError, RayServeException, RuntimeError) as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        """End the request at the replica, if it goes on there."""
        self._parts.cancel()


def _asgi(version: str, server: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Return what the deployment `ingress` answers requests with; called in its process.

    version  of Slipstream, which has to be the one of this host
    server   fields of a ServeConfig
    """
    supervisor.root_on(socket.gethostname(), version)
    from coordinator.http import serving
    from coordinator.http.clients import networks
    from coordinator.http.settings import ServeConfig
    from coordinator.ingress.app import Ingress
    from coordinator.ingress.servers import Servers

    name = serve.get_replica_context().app_name
    config = ServeConfig(**server)
    ingress = Ingress(
        Servers.at([URL]),
        wait_s=WAIT_S,
        draw=lambda: random.getrandbits(SEED_BITS),
        proxies=networks(config.forwarded_allow_ips),
        transport=ThroughRay(serve.get_deployment_handle(PAIR, app_name=name)),
    )
    _, work = serving.limits_of(config)
    guarded = serving.guarded(ingress.app, config, keys, work)
    is_started = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal is_started
        if not is_started:
            is_started = True
            ingress.start()  # in the loop that answers requests
        await guarded(scope, receive, send)

    return app


def application(
    pair: PairConfig,
    speculation: SpeculationConfig,
    server: ServeConfig,
    replicas: ReplicasConfig,
    num_gpus: int,
) -> serve.Application:
    """Return the application for these settings.

    num_gpus  of each replica, all on one host

    Raises ConfigurationError: a setting is not for replicas, or API keys are missing or unreadable.
    """
    if server.journal is not None:
        raise ConfigurationError("--journal is for one server, not for replicas on Ray Serve")
    keys = tuple(server.read_keys())
    fields = {name: getattr(server, name) for name in ServeConfig.model_fields}
    fields |= {"api_key": (), "api_key_file": None}
    drain_s = server.drain_timeout_s
    deploy: Any = serve.deployment
    pairs = deploy(
        serve_pair.PairReplica,
        name=PAIR,
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=IN_WORK,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_LIMIT_S,
        graceful_shutdown_timeout_s=drain_s + 2 * serve_pair.LIVES_ON_S,
        **_scale(replicas, pair.num_seqs * pair.targets),
    ).bind(__version__, _words(pair, speculation, server), keys, drain_s)

    def build() -> Any:
        return _asgi(__version__, fields, keys)

    made: serve.Application = deploy(
        serve.ingress(build)(),
        name=INGRESS,
        ray_actor_options={"num_cpus": 0},  # it only passes on
        max_ongoing_requests=server.max_requests,
        health_check_period_s=HEALTH_PERIOD_S,
    ).bind(pairs)
    return made


def built(args: Mapping[str, object]) -> serve.Application:
    """Return the application for flags of `serve` by name. Raises ConfigurationError."""
    given = {name.replace("-", "_"): value for name, value in args.items()}
    kinds = (PairConfig, SpeculationConfig, ServeConfig, ReplicasConfig)
    unknown = [name for name in given if not any(name in kind.model_fields for kind in kinds)]
    if unknown:
        raise ConfigurationError(f"{unknown[0]}: no such setting; they are flags of `serve`")

    def read(kind: type[T]) -> T:
        return checked(
            kind, **{name: one for name, one in given.items() if name in kind.model_fields}
        )

    given["ray_serve"] = True
    # Where Ray Serve listens, its own settings say: unless it is said here too, anybody may come.
    given.setdefault("host", "0.0.0.0")
    pair, speculation = read(PairConfig), read(SpeculationConfig)
    speculation.check(pair)
    replicas = read(ReplicasConfig)
    return application(pair, speculation, read(ServeConfig), replicas, replicas.replica_gpus or 0)


def _scale(replicas: ReplicasConfig, num_lanes: int) -> dict[str, Any]:
    """Return how many replicas there are, in the words of Ray Serve.

    num_lanes  how many texts a replica writes at once: with more requests there is work for another
    """
    if replicas.most == replicas.replicas:
        return {"num_replicas": replicas.replicas}
    scaling = {
        "min_replicas": replicas.replicas,
        "max_replicas": replicas.most,
        "target_ongoing_requests": num_lanes,
        "upscale_delay_s": UPSCALE_S,
        "downscale_delay_s": DOWNSCALE_S,
    }
    return {"autoscaling_config": scaling}


def _words(pair: PairConfig, speculation: SpeculationConfig, server: ServeConfig) -> list[str]:
    """Return the flags of a replica's server. Folders that are here are named by whole paths."""
    models = {name: getattr(pair, name) for name in ("target", "drafter", "heads")}
    whole = {name: str(Path(one).resolve()) for name, one in models.items() if Path(one).is_dir()}
    moved = pair.model_copy(update={name: one for name, one in whole.items() if models[name]})
    words = words_of(moved, but=("heads",) if pair.has_default_heads else ())
    return [*words, *words_of(speculation), *words_of(server, but=OF_INGRESS)]
