"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

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
