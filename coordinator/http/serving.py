"""Runs the HTTP server: its socket, signals and limits, and its end within a limited time."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.api.async_llm import AsyncLLM
from coordinator.http.figures import Figures
from coordinator.http.guard import Guard, Rules
from coordinator.http.routes import make_app
from coordinator.http.settings import ServeConfig
from proto.errors import ConfigurationError, SlipstreamError

GRACE_S = 6  # in which texts may be finished after a signal; then they are cancelled
MAX_HEADER_BYTES = 1 << 16
LOOK_S = 0.5  # between looks at whether the pair is alive


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at the configured address. Raises ConfigurationError.

    Called before any model is loaded, so that a bad address is reported at once.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(2048)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror or error}; "
            "choose another --host or --port"
        ) from error
    return made


def place_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Named:
    """The names that clients see: of the model, and the version of this software."""

    model: str
    version: str = ""


def application(llm: AsyncLLM, named: Named, config: ServeConfig, key: str) -> ASGIApp:
    """Return the complete application: the routes, and the guard in front of them."""
    app: ASGIApp = make_app(
        llm,
        named.model,
        Figures(named.model),
        most=config.max_output_tokens,
        version=named.version,
        reasoning_parser=config.reasoning_parser,
    )
    if config.allow_origin:
        app = CORSMiddleware(
            app,
            allow_origins=config.allow_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type"),
        )
    rules = Rules(
        checks_host=config.is_loopback,
        hosts=tuple(host.lower() for host in config.allowed_host),
        origins=config.allow_origin,
        key=key,
        max_body=config.max_body_mb << 20,
        io_timeout_s=config.io_timeout_s,
    )
    return Guard(app, rules)


class HurriedProtocol(H11Protocol):
    """Closes a connection whose client does not send a whole header within `limit_s`.

    uvicorn itself limits only the time between an answer and the next request.
    """

    limit_s = 30.0
    _hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit when a client has connected."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the client; the time limit runs until a whole header has come."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end()
        elif self.cycle is None or self.cycle.response_complete:
            self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit when the client has gone."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._hurry is None:
            self._hurry = self.loop.call_later(self.limit_s, self.transport.close)

    def _end(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None


class Server(uvicorn.Server):
    """A server that also ends when the pair has ended, while `watch` runs; `failure` says why."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM) -> None:
        super().__init__(config)
        self._llm = llm
        self.failure: SlipstreamError | None = None

    async def watch(self) -> None:
        """Check the pair every LOOK_S seconds; when it has ended, note why and end the server."""
        while not self.should_exit:
            try:
                self._llm.pair.service.check_alive()
            except SlipstreamError as error:
                self.failure = error
                self.should_exit = True
            await asyncio.sleep(LOOK_S)


def serve(
    llm: AsyncLLM,
    named: Named,
    config: ServeConfig,
    key: str,
    bound: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Answer requests until a signal, which is raised again. Raises what ended the pair."""
    server = Server(settings_for(application(llm, named, config, key), config), llm)

    # What was made by now stays: looking for garbage in it would stop all streams for a moment.
    gc.collect()
    gc.freeze()

    async def run() -> None:
        watching = asyncio.create_task(server.watch())
        ready()
        try:
            await server.serve(sockets=[bound])
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    asyncio.run(run())
    if server.failure is not None:
        raise server.failure


def settings_for(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's settings for the application: with limits, and no logs of requests."""
    # Requests have prompts and keys in them: nothing of theirs is logged.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    limits = {"limit_s": config.io_timeout_s}
    return uvicorn.Config(
        app,
        http=type("Protocol", (HurriedProtocol,), limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=int(config.io_timeout_s) or 1,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
