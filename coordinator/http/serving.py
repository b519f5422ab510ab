"""Runs the server: socket, signals, limits, and an end within a limit."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

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
    """A socket at the address, before anything is loaded. Raises ConfigurationError."""
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
    """The address as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def application(llm: AsyncLLM, model: str, config: ServeConfig, key: str) -> ASGIApp:
    """All that answers: routes, and the guard in front of them."""
    app: ASGIApp = make_app(llm, model, Figures(model), most=config.max_output_tokens)
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


class Server(uvicorn.Server):
    """Ends when the pair has ended, too; then `failure` says why."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM) -> None:
        super().__init__(config)
        self._llm = llm
        self.failure: SlipstreamError | None = None

    async def watch(self) -> None:
        """Look at the pair until it has ended."""
        while not self.should_exit:
            try:
                self._llm.pair.service.check_alive()
            except SlipstreamError as error:
                self.failure = error
                self.should_exit = True
            await asyncio.sleep(LOOK_S)


def serve(
    llm: AsyncLLM,
    model: str,
    config: ServeConfig,
    key: str,
    bound: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Answer until a signal comes, which is raised again afterwards. Raises what ended the pair."""
    # Requests have prompts and keys in them: nothing of theirs is logged.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    settings = uvicorn.Config(
        application(llm, model, config, key),
        http="h11",
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
    server = Server(settings, llm)

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
