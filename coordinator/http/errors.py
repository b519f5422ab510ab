"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

from starlette.responses import JSONResponse

from coordinator.http.work import RETRY_AFTER_S
from proto.errors import (
    AwayError,
    BusyError,
    ClosedError,
    ConfigurationError,
    IncompatibleError,
    ModelError,
    NodeError,
    SlipstreamError,
    TextError,
    TransportError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = "Retry-After"
MOST_PLACES = 8  # of the code, the innermost ones
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a refused request: an HTTP status and one line that says why."""

    status: int
    line: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def as_event(self) -> dict[str, Any]:
        """Return the JSON of the last event of a stream, which has no status of its own any more.

        The error has it in `status`, and in `retry_after` the seconds after which to ask again.
        """
        told = self.as_json()
        told["error"]["status"] = self.status
        if (seconds := self.headers.get(RETRY_AFTER)) is not None:
            told["error"]["retry_after"] = int(seconds)
        return told

    def as_json(self) -> dict[str, Any]:
        """Return the JSON body of the answer, in the form of OpenAI's API."""
        return {
            "error": {
                "message": self.line,
                "type": TYPES.get(self.status, "internal_error"),
                "param": None,
                "code": self.code or CODES.get(self.status),
            }
        }


class RefusedRequestError(Exception):
    """Raised in a handler to answer its request with `refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.line)
        self.refusal = refusal


def refusal_of(error: SlipstreamError) -> Refusal:
    """Return the refusal (status and line) that answers a request which raised this error."""
    line = str(error)
    match error:
        case ConfigurationError() | ModelError():
            return Refusal(400, line)
        case BusyError():
            return Refusal(429, line, headers=again_after())
        case TextError():
            return Refusal(500, line)
        # The pair is away, or has ended with the server: another one can answer.
        case AwayError() | ClosedError() | NodeError() | IncompatibleError() | TransportError():
            return Refusal(503, line, headers=again_after())
    return Refusal(500, line)


def mistake_of(error: Exception) -> Refusal:
    """Log where the server has made a mistake, and return what its client is told.

    The message of such an error may have parts of a text in it, so it is not logged.
    """
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in extract_tb(error.__traceback__)]
    name = type(error).__name__
    logger.error("a request has failed: %s at %s", name, " > ".join(places[-MOST_PLACES:]))
    return Refusal(500, f"a mistake of the server ({name}); its log says where, please report it")


def again_after(seconds: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the header that says after how many seconds a client should ask again."""
    return {RETRY_AFTER: str(seconds)}


def error_response(refusal: Refusal) -> JSONResponse:
    """Return the HTTP response to a request that is refused."""
    headers = dict(refusal.headers)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refusal.as_json(), refusal.status, headers)


def fault_of(errors: Sequence[Any], body: Any) -> str:
    """Return what is wrong with a request's body, in a line: the first field that is.

    errors  as pydantic lists them. A field that may have several forms has one error for each
            form: the one that came furthest names the fault, or all that came as far.
    """
    if errors[0]["type"] == "json_invalid":
        return "the body: this is no valid JSON"
    places = [_place(error["loc"], body) for error in errors]
    alike = [
        (place, error)
        for place, error in zip(places, errors, strict=True)
        if place[:1] == places[0][:1]
    ]
    furthest, _ = max(alike, key=lambda one: (len(one[0]), not _is_of_type(one[1])))
    told = [error for place, error in alike if place == furthest]
    told = [error for error in told if not _is_of_type(error)] or told
    words = " or ".join(dict.fromkeys(error["msg"] for error in told))
    return f"{'.'.join(map(str, furthest)) or 'the body'}: {words}"


def _is_of_type(error: Mapping[str, Any]) -> bool:
    """True if the value has another type than this form wants."""
    return str(error["type"]).endswith("_type")


def _place(location: Sequence[Any], body: Any) -> tuple[Any, ...]:
    """Return where an error lies in a body, without the names of the forms that were tried."""
    place: list[Any] = []
    for part in location[1:]:  # behind "body"
        if isinstance(body, Mapping):
            place.append(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            place.append(part)
            body = body[part] if part < len(body) else None
    return tuple(place)
