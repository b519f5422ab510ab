"""A line in the log for each request that was answered: what was asked, by whom, and what came.

No prompt, no answer and no key is in it. The guard (`guard.py`) writes it when the last part of the
answer has gone, or when the client has.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.types import Message, Send

logger = logging.getLogger("slipstream.requests")

WRITTEN = "written"  # where a scope's `state` has what its texts have come to
CLOSED_BY_CLIENT = 499  # as nginx has it: no status was sent, because the client had gone


@dataclass(slots=True)
class Written:
    """What the texts of a request have come to.

    first_token_s   seconds until the first token of any of them; None: none has come
    finish_reasons  of those that have ended
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def came(self, num_tokens: int, finish_reason: str | None, now_s: float) -> None:
        """Count a part of a text, `now_s` seconds after the request came."""
        self.completion_tokens += num_tokens
        if num_tokens and self.first_token_s is None:
            self.first_token_s = round(now_s, 6)
        if finish_reason is not None:
            self.finish_reasons.append(finish_reason)


class Watched:
    """Passes the parts of an answer on, and notes its status and the id of the request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLOSED_BY_CLIENT
        self.request_id = ""
        self.is_whole = False

    async def __call__(self, message: Message) -> None:
        """Pass a part on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_whole = True


def write(
    asked: Mapping[str, Any], client: str, watched: Watched, written: Written | None, took_s: float
) -> None:
    """Write the line of a request.

    asked    its scope
    written  what its texts have come to; None: it asked for no text, or was refused
    took_s   seconds from its arrival to the end of its answer
    """
    fields: dict[str, Any] = {
        "request_id": watched.request_id,
        "method": asked["method"],
        "path": asked["path"],
        "status": watched.status,
        "client": client,
        "seconds": round(took_s, 6),
        "is_whole": watched.is_whole,
    }
    words = f"{asked['method']} {asked['path']} {watched.status} in {took_s:.3f} s, {client}"
    if watched.request_id:
        words += f", {watched.request_id}"
    if written is not None:
        fields |= asdict(written)
        words += f": {written.prompt_tokens} + {written.completion_tokens} tokens"
        if written.first_token_s is not None:
            words += f", the first after {written.first_token_s:.3f} s"
        if written.finish_reasons:
            words += f", {', '.join(written.finish_reasons)}"
    if not watched.is_whole:
        words += "; not complete"
    logger.info("%s", words, extra={"fields": fields})
