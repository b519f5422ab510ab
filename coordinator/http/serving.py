"""Runs the HTTP server: its socket, signals and limits, and its end within a limited time.

After a signal the server drains (`work.py`): requests in work go on, new ones are refused, and
connections are still accepted, so that clients are told so. Then what is left is broken off with an
error that says when to ask again, and the server ends. The way of a request is in `routes.py`.
"""

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from coordinator.api.async_llm import AsyncLLM
from coordinator.http import request_log
from coordinator.http.clients import networks
from coordinator.http.door import Door
from coordinator.http.figures import Figures
from coordinator.http.guard import Guard, Rules
from coordinator.http.routes import make_app
from coordinator.http.settings import ServeConfig
from coordinator.http.work import Phase, Work
from coordinator.journal.writing import Journal
from proto.errors import ClosedError, ConfigurationError, SlipstreamError
from proto.system import RAISE_THE_LIMIT, may_open

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FLUSH_S = 2  # in which clients may take what an answer ends with; then it is broken off
MAX_HEADER_BYTES = 1 << 16
FEWEST_CONNECTIONS = 4


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


def application(
    llm: AsyncLLM,
    named: Named,
    config: ServeConfig,
    keys: Sequence[str],
    work: Work,
    journal: Journal | None = None,
) -> tuple[ASGIApp, Callable[[], int]]:
    """Return the complete application: the routes, and the guard in front of them.

    Also what to call in the event loop before clients come: it takes up the answers of the journal,
    and returns how many are written on.

    keys     the API keys, one of which clients must send; empty: none is wanted
    journal  None: no answer is kept
    """
    app = make_app(
        llm,
        named.model,
        Figures(named.model),
        most=config.max_output_tokens,
        version=named.version,
        reasoning_parser=config.reasoning_parser,
    )
    begin: Callable[[], int] = int
    if journal is not None:
        begin = app.state.routes.keep(journal, config.journal_keep_s).start
    return guarded(app, config, keys, work), begin


def guarded(app: ASGIApp, config: ServeConfig, keys: Sequence[str], work: Work) -> ASGIApp:
    """Return an application with the guard in front of it; `keys` as for `application`."""
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
        keys=tuple(keys),
        proxies=networks(config.forwarded_allow_ips),
        max_body=config.max_body_mb << 20,
        io_timeout_s=config.io_timeout_s,
    )
    if config.log_requests:
        request_log.logger.setLevel(logging.INFO)
    return Guard(app, rules, work, logs=config.log_requests)


def limits_of(config: ServeConfig) -> tuple[Door, Work]:
    """Return what bounds the connections and the requests in work.

    Where this process may not open as many files, there are fewer connections, and always some that
    have no request in work: by these a client can be told that there are too many.
    """
    most = max(FEWEST_CONNECTIONS, may_open(config.max_connections))
    most = min(most, config.max_connections)
    if most < config.max_connections:
        logger.warning(
            "at most %d connections are open at once, not --max-connections %d: %s",
            most,
            config.max_connections,
            RAISE_THE_LIMIT,
        )
    num_requests = min(config.max_requests, most - max(1, most // 8))
    is_asked = config.max_requests != ServeConfig.model_fields["max_requests"].default
    if is_asked and num_requests < config.max_requests and most == config.max_connections:
        logger.warning(
            "at most %d requests are in work at once, not %d: raise --max-connections",
            num_requests,
            config.max_requests,
        )
    return Door(most), Work(num_requests)


class Behind(Protocol):
    """What is behind an application: an `AsyncLLM`, or other servers."""

    def check_alive(self) -> None:
        """Raise SlipstreamError if it has ended."""

    def end(self, error: SlipstreamError) -> None:
        """End everything that is in work with this error."""


class Server(uvicorn.Server):
    """uvicorn's server with our own door, which drains after a signal, and ends with its pair.

    behind   what is behind the application
    failure  the error that ended that; None: it has not ended
    """

    def __init__(
        self, app: ASGIApp, behind: Behind, config: ServeConfig, door: Door, work: Work
    ) -> None:
        super().__init__(settings_for(app, config, door))
        self.failure: SlipstreamError | None = None
        self._behind = behind
        self._door = door
        self._work = work
        self._drain_s = config.drain_timeout_s
        self._signals: list[int] = []  # those that have come

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections at the sockets."""
        await super().startup(sockets=[])

        def make() -> asyncio.Protocol:
            kind = self.config.http_protocol_class
            state = self.lifespan.state
            made: asyncio.Protocol = kind(self.config, self.server_state, state)  # type: ignore
            return made

        (bound,) = sockets or []
        self._door.open(bound, make)

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether the server ends now; True if it does."""
        now = time.monotonic()
        try:
            self._behind.check_alive()
        except SlipstreamError as error:
            self.failure = error
            self._work.end(f"the models have ended: {error}")
            self.should_exit = True
        if self._signals and not self._work.is_ending:
            self._work.drain(now, self._drain_s)
            if self._work.num:
                logger.warning(
                    "ending: %d requests have up to %g s; a second signal ends them at once",
                    self._work.num,
                    self._drain_s,
                )
        self.should_exit |= len(self._signals) > 1 or self._work.is_drained(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is still in work with an error, close all connections, and end."""
        if self._work.phase is not Phase.ENDED:
            self._work.end("the server has ended; ask again later, or another one")
        self._behind.end(self.failure or ClosedError(self._work.why))
        self._door.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """While inside, let signals end the server in order; then raise the first one again.

        Ignored signals, as under nohup, stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = [(number, signal.signal(number, self.handle_exit)) for number in heeded]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        for first in self._signals[:1]:
            signal.raise_signal(first)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; the second one ends the server at once."""
        del frame
        self._signals.append(sig)
        self.force_exit = len(self._signals) > 1


class Unawaited(ThreadPoolExecutor):
    """Threads for what takes long in a request; the end of the event loop does not wait for them.

    No library that reads a long prompt can be interrupted.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """Start nothing more, and return at once."""
        del wait, cancel_futures
        super().shutdown(wait=False, cancel_futures=True)


def serve(
    llm: AsyncLLM,
    named: Named,
    config: ServeConfig,
    keys: Sequence[str],
    bound: socket.socket,
    ready: Callable[[int], None],
    journal: Journal | None = None,
) -> None:
    """Answer requests until a signal, which is raised again. Raises what ended the pair.

    ready  is told how many answers of the journal are written on
    """
    door, work = limits_of(config)
    app, begin = application(llm, named, config, keys, work, journal)
    run(Server(app, llm, config, door, work), bound, lambda: ready(begin()))


def run(server: Server, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Run a server until a signal, which is raised again. Raises what ended what is behind it."""
    # What was made by now stays: looking for garbage in it would stop all streams for a moment.
    gc.collect()
    gc.freeze()

    async def serving() -> None:
        asyncio.get_running_loop().set_default_executor(Unawaited(thread_name_prefix="request"))
        ready()
        await server.serve(sockets=[bound])

    asyncio.run(serving())
    if server.failure is not None:
        raise server.failure


def settings_for(app: ASGIApp, config: ServeConfig, door: Door) -> uvicorn.Config:
    """Return uvicorn's settings for the application: with limits, and no logs of its own."""
    # Requests have prompts and keys in them: what is logged of them, `request_log.py` says.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        http=door.protocol(config.io_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(config.io_timeout_s) or 1,
        timeout_graceful_shutdown=FLUSH_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
