"""Errors as HTTP clients see them: one JSON shape, the OpenAI one, for everything that can go wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from jaxserve.errors import EngineDeadError, InvalidRequestError, OverloadedError
from jaxserve.server.circuit_breaker import BreakerOpenError

RETRY_AFTER_SECONDS = 1.0
# Whoever asks a server that ends should ask another one, or the next in its place, a moment later.
SHUTDOWN_RETRY_SECONDS = 5.0


@dataclass(eq=False)
class ApiError(Exception):
    """An error response.

    Attributes:
      status: HTTP status.
      message: one line for people. Lone surrogates in it are escaped when it is encoded.
      type, param, code: as in the OpenAI API; `param` names the offending field where there is one.
      headers: further response headers.
      retry_after_seconds: when to try again; None where trying again is no use.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    retry_after_seconds: float | None = None

    def __str__(self) -> str:
        return self.message


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error response."""

    error: ErrorObject


def error_object(error: ApiError) -> ErrorObject:
    """The object under "error" in a response body; always encodable as UTF-8 JSON."""
    return ErrorObject(
        message=encodable(error.message),
        type=error.type,
        param=None if error.param is None else encodable(error.param),
        code=error.code,
    )


def error_body(error: ApiError) -> bytes:
    """The whole response body."""
    return msgspec.json.encode(ErrorBody(error_object(error)))


def encodable(text: str) -> str:
    """`text` with lone surrogates written as escapes, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_api_error(error: BaseException) -> ApiError:
    """The response for an exception; one that nobody raised on purpose becomes a 500 without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        seconds = RETRY_AFTER_SECONDS if error.retry_after_seconds is None else error.retry_after_seconds
        is_hopeless = seconds == math.inf
        return ApiError(
            429,
            str(error),
            type="server_overloaded",
            code=error.reason,
            headers={"x-should-retry": "false"} if is_hopeless else {},  # read by OpenAI's own clients
            retry_after_seconds=None if is_hopeless else seconds,
        )
    if isinstance(error, BreakerOpenError):
        return breaker_open(error)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), type="server_error", code="engine_dead")
    return ApiError(500, "internal server error", type="server_error", code="internal_error")


def shutting_down() -> ApiError:
    """An orderly end, for new requests and for those that the grace did not suffice for."""
    return ApiError(
        503,
        "the server is shutting down",
        type="server_error",
        code="shutting_down",
        retry_after_seconds=SHUTDOWN_RETRY_SECONDS,
    )


def breaker_open(error: BreakerOpenError) -> ApiError:
    """The engine has failed too often; a later request may try whether it is over."""
    return ApiError(
        503,
        f"the server takes no requests for now: {error}",
        type="server_error",
        code="circuit_open",
        retry_after_seconds=error.retry_after_seconds,
    )


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


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Errors from within name a field as the client called it, as `param` and in their text.

    Args:
      names: what the client called it, by the name that it has there.
    """
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param or "", error.param)
        error.args = (_with_names(str(error), names),)
        raise


def _with_names(text: str, names: Mapping[str, str]) -> str:
    """`text` with fields renamed. A name that could be any word counts at the beginning, and in quotes."""
    patterns = []
    for name in sorted(names, key=len, reverse=True):
        if name.isalpha():
            patterns.append(rf"^{name}(?= )|(?<=^'){name}(?=')|(?<= '){name}(?=')")
        elif name:
            patterns.append(rf"(?<![\w.]){re.escape(name)}(?![\w\[]|\.\w)")
    return re.sub("|".join(patterns), lambda match: names[match[0]], text) if patterns else text
