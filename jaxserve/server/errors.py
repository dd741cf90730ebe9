"""Errors as HTTP clients see them: one JSON shape, the OpenAI one, for everything that can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

RETRY_AFTER_SECONDS = 1


@dataclass(eq=False)
class ApiError(Exception):
    """An error response.

    Attributes:
      status: HTTP status.
      message: one line for people. Lone surrogates in it are escaped when it is encoded.
      type, param, code: as in the OpenAI API; `param` names the offending field where there is one.
      headers: further response headers.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def error_object(error: ApiError) -> dict[str, Any]:
    """The object under "error" in a response body; always encodable as UTF-8 JSON."""
    return {
        "message": encodable(error.message),
        "type": error.type,
        "param": None if error.param is None else encodable(error.param),
        "code": error.code,
    }


def error_body(error: ApiError) -> bytes:
    """The whole response body."""
    return msgspec.json.encode({"error": error_object(error)})


def encodable(text: str) -> str:
    """`text` with lone surrogates written as escapes, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_api_error(error: BaseException) -> ApiError:
    """The response for an exception; one that nobody raised on purpose becomes a 500 without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(
            503,
            str(error),
            type="server_overloaded",
            code="queue_full",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), type="server_error", code="engine_dead")
    return ApiError(500, "internal server error", type="server_error", code="internal_error")


def shutting_down() -> ApiError:
    """An orderly end, for new requests and for those that the grace did not suffice for."""
    return ApiError(503, "the server is shutting down", type="server_error", code="shutting_down")


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """No such model here."""
    known = ", ".join(repr(one) for one in served)
    return ApiError(
        404,
        f"the model {name!r} does not exist; this server has {known}",
        param="model",
        code="model_not_found",
    )


def unsupported(param: str, message: str) -> InvalidRequestError:
    """A field of the OpenAI API that this server knows and does not honour."""
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
