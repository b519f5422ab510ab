"""`python -m coordinator router`: several servers behind one address."""

import random
import re
from typing import Annotated
from urllib.parse import urlsplit

import typer

from coordinator.cli import log_format
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.harmless import harmless
from coordinator.cli.wrapping import for_stderr
from coordinator.http.clients import networks
from coordinator.http.settings import ServeConfig
from proto.errors import ConfigurationError, shown
from proto.installation import missing
from proto.system import may_open

MOST_SERVERS = 1024
SPARE_FILES = 128  # besides connections of clients and to servers
USUAL_PORTS = {"http": 80, "https": 443}
SEED_BITS = 31


@with_settings
def router(
    *,
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL", help="A server, such as http://10.0.0.2:8000. There may be several."
        ),
    ],
    server: Annotated[
        ServeConfig,
        Flags(
            *("host", "port", "api_key", "api_key_file", "insecure", "allowed_host"),
            *("allow_origin", "forwarded_allow_ips", "max_body_mb", "max_requests"),
            *("max_connections", "io_timeout_s", "drain_timeout_s"),
            *("log_requests", "log_format"),
        ),
    ],
    wait_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86_400,
            help="How long to wait while no server is ready. Requests wait, and broken streams.",
        ),
    ] = 60.0,
) -> None:
    """Send requests to several servers. A text goes on elsewhere when its server is lost.

    All servers must serve the same model, on devices that compute alike.
    """
    try:
        from coordinator.http import serving
        from coordinator.ingress.app import Ingress
        from coordinator.ingress.servers import Servers
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"router needs {missing(str(error.name), 'serve')}") from error
    servers, keys = Servers.at(addresses(urls)), server.read_keys()
    bound = serving.listen(server)
    with bound:
        may_open(server.max_connections + server.max_requests + SPARE_FILES)
        proxies = networks(server.forwarded_allow_ips)
        ingress = Ingress(servers, wait_s=wait_s, draw=_seed, proxies=proxies)
        door, work = serving.limits_of(server)
        app = serving.guarded(ingress.app, server, keys, work)
        url, count = serving.place_of(bound), len(servers.all)
        line = f"{url}/v1 leads to {count} server{'s' if count > 1 else ''}; Ctrl-C ends"

        def ready() -> None:
            ingress.start()
            for told in (*server.without_effect(keys), line):
                typer.echo(for_stderr(harmless(told)), err=True)
            log_format.use(server.log_format)

        serving.run(serving.Server(app, ingress, server, door, work), bound, ready)


def _seed() -> int:
    return random.getrandbits(SEED_BITS)


def addresses(urls: list[str]) -> list[str]:
    """Return the addresses of servers without what may follow. Raises ConfigurationError."""
    found = [_address(url) for url in urls]
    if len(set(found)) < len(found):
        raise ConfigurationError("URL: a server is named twice; name each once")
    if len(found) > MOST_SERVERS:
        raise ConfigurationError(f"URL: {len(found)} servers; there may be {MOST_SERVERS}")
    return found


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = USUAL_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
        is_right = bool(port and parts.hostname) and parts.scheme in USUAL_PORTS
        is_right = is_right and parts.path in ("", "/", "/v1", "/v1/")
        is_right = is_right and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        is_right = False
    if not is_right or re.search(r"\s", url):
        told = shown(url)
        raise ConfigurationError(f"URL: expected an address like http://host:8000, got {told}")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
