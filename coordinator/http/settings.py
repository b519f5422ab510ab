"""The settings of the HTTP server: where it listens, whom it lets in, how much it takes."""

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from coordinator.api.async_llm import MAX_WAITING
from coordinator.api.config_base import Frozen
from coordinator.api.reasoning import AUTO, ParserName
from coordinator.http.clients import networks
from proto.errors import ConfigurationError
from proto.system import cannot_read

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
LEAST_KEY = 16  # characters; a shorter key could be guessed


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


# -- settings --------------------------------------------------------------------------------------


class ServeConfig(Frozen):
    """Settings of `serve` that are no settings of the pair."""

    host: Annotated[str, Field(min_length=1, description="Address to listen at.")] = "127.0.0.1"
    port: Annotated[
        int,
        Field(ge=0, le=65535, description="Port to listen at; 0: any free port."),
    ] = 8000
    served_model_name: Annotated[
        str, Field(description="Name of the model in the API. Default: the target's name.")
    ] = ""
    reasoning_parser: Annotated[
        ParserName,
        Field(
            description="How the target marks its reasoning. With auto the chat template says it; "
            "with none the thoughts stay in the answer."
        ),
    ] = AUTO
    api_key: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        Field(
            description="API key that clients must send; each key is a client. May be given "
            "several times. Other users of this machine can see it in the list of processes; "
            "--api-key-file keeps it from them."
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value),
        Field(
            description="File with API keys, one in each line. Clients must send one of them. "
            f"A key has at least {LEAST_KEY} characters. The environment variable {KEY_VARIABLE} "
            "may hold a key instead."
        ),
    ] = None
    insecure: Annotated[
        bool,
        Field(
            description="Let everybody in without an API key. Even at an address that others reach."
        ),
    ] = False
    allowed_host: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        Field(
            description="Another name by which clients call this server. It is compared with "
            "the header Host; may be given several times."
        ),
    ] = ()
    allow_origin: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        Field(
            description="Origin of web pages that may use this server (CORS). Such as "
            "https://example.org; may be given several times."
        ),
    ] = ()
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        Field(
            description="Address of a reverse proxy, or a network such as 10.0.0.0/8. Its header "
            "X-Forwarded-For is believed; may be given several times."
        ),
    ] = ()
    max_queue: Annotated[
        int,
        Field(ge=0, le=1 << 16, description="Texts that may wait for a lane. More are refused."),
    ] = MAX_WAITING
    max_output_tokens: Annotated[
        int, Field(ge=0, description="Most tokens that a request may ask for; 0: no limit.")
    ] = 0
    max_body_mb: Annotated[
        int, Field(ge=1, le=1024, description="Largest request body, in megabytes.")
    ] = 8
    max_requests: Annotated[
        int,
        Field(ge=1, le=1 << 16, description="Most requests in work at once. More get status 503."),
    ] = 512
    max_connections: Annotated[
        int,
        Field(
            ge=2,
            le=1 << 16,
            description="Most open connections. For others those are closed that have no "
            "request in work, first the oldest that has sent none.",
        ),
    ] = 1024
    io_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="Longest time without progress by a client. Within this time the client "
            "must send its request, take a part of the answer, or send the next request.",
        ),
    ] = 30.0
    journal: Annotated[
        Path | None,
        BeforeValidator(
            lambda value: Path(value).expanduser() if isinstance(value, str) else value
        ),
        Field(
            description="Folder in which running texts are noted. A server that is started with "
            "the same folder later goes on with them, and clients resume their answers by the "
            "id of the request. Prompts and answers can be read there by this user."
        ),
    ] = None
    journal_keep_s: Annotated[
        float,
        Field(
            gt=0,
            le=86400,
            description="With --journal: time that an answer is kept which nobody reads.",
        ),
    ] = 300.0
    journal_mb: Annotated[
        int,
        Field(
            ge=1,
            le=1 << 16,
            description="With --journal: most megabytes that the answers need there. The file may "
            "be twice as large. What would need more is answered without being noted.",
        ),
    ] = 256
    log_requests: Annotated[
        bool,
        Field(
            description="Log a line for each request. It says who asked for what, the status, "
            "tokens and seconds, and has no prompt, no answer and no key in it."
        ),
    ] = False
    log_format: Annotated[
        Literal["text", "json"],
        Field(
            description="How lines of the log look once it serves. With json each is a JSON object."
        ),
    ] = "text"
    drain_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            description="Time that requests in work have after a signal. New ones get status 503 "
            "meanwhile; a second signal ends the server at once.",
        ),
    ] = 6.0

    @property
    def is_loopback(self) -> bool:
        """True if only programs of this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def read_keys(self) -> tuple[str, ...]:
        """Return the API keys that clients may send; empty: none is wanted.

        Raises ConfigurationError.
        """
        keys = [("--api-key", key) for key in self.api_key]
        if self.api_key_file is not None:
            where = str(self.api_key_file)
            keys += [(where, key) for key in _lines_of(self.api_key_file)]
        if not keys and (key := os.environ.get(KEY_VARIABLE, "")):
            keys = [(KEY_VARIABLE, key)]
        if not keys and not self.is_loopback and not self.insecure:
            raise ConfigurationError(
                f"other machines reach --host {self.host}: give --api-key-file FILE, or "
                "--insecure to let everybody in"
            )
        for where, key in keys:
            _check_key(where, key)
        return tuple(dict.fromkeys(key for _, key in keys))

    def without_effect(self, keys: Sequence[str]) -> list[str]:
        """Return a line for each setting of these that does nothing beside the others.

        keys  the API keys, as `read_keys` returns them
        """
        lines = []
        if self.insecure and keys:
            lines.append("--insecure has no effect: there are API keys, and clients must send one")
        if self.forwarded_allow_ips and keys:
            lines.append(
                "--forwarded-allow-ips has no effect: each API key is a client, from any address"
            )
        if self.allowed_host and not self.is_loopback:
            lines.append(
                f"--allowed-host has no effect: at --host {self.host} every name is allowed"
            )
        if self.journal is None:
            for name in ("journal_keep_s", "journal_mb"):
                if name in self.model_fields_set:
                    flag = f"--{name.replace('_', '-')}"
                    lines.append(f"{flag} has no effect without --journal")
        if os.environ.get(KEY_VARIABLE) and (self.api_key or self.api_key_file is not None):
            lines.append(
                f"the key in {KEY_VARIABLE} does not count: --api-key or --api-key-file is given"
            )
        return lines

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for origin in self.allow_origin:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest or "*" in rest:
                raise ConfigurationError(
                    f"--allow-origin: expected an origin like https://example.org, got {origin}"
                )
        try:
            networks(self.forwarded_allow_ips)
        except ValueError as error:
            raise ConfigurationError(
                f"--forwarded-allow-ips: expected an address or a network like 10.0.0.0/8; {error}"
            ) from error
        return self


def _lines_of(file: Path) -> list[str]:
    """Return the lines of a file of keys, at least one. Raises ConfigurationError."""
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no text file; write the key there") from error
    except OSError as error:
        raise ConfigurationError(f"{file}: {cannot_read(error)}") from error
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]


def _check_key(where: str, key: str) -> None:
    """Raise ConfigurationError if it is no key. Its message does not show the key."""
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError(
            f"{where} holds no API key: one line of at least {LEAST_KEY} letters and digits"
        )
