"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from proto.errors import (
    AwayError,
    BusyError,
    ClosedError,
    ConfigurationError,
    ModelError,
    SlipstreamError,
)

RETRY_AFTER_S = 1
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
            return Refusal(429, line, headers={"Retry-After": str(RETRY_AFTER_S)})
        case AwayError() | ClosedError():
            return Refusal(503, line, headers={"Retry-After": str(RETRY_AFTER_S)})
    return Refusal(500, line)


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
