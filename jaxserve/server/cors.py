"""Which web pages may call the server from a browser (CORS, the Fetch standard)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve.server.request_id import REQUEST_ID_HEADER

ANY_ORIGIN = "*"


def check_origin(origin: str) -> str:
    """`origin` as browsers send it. Raises: ConfigError: it is none (it has a path, or no scheme, say)."""
    try:
        parts = urlsplit(origin)
    except ValueError:  # brackets that hold no IPv6 address
        parts = urlsplit("")
    if origin == ANY_ORIGIN or (parts.hostname and origin == f"{parts.scheme}://{parts.netloc}".lower()):
        return origin
    raise ConfigError(
        f"{origin!r} is not an origin: it is '*' or looks like https://example.org or http://localhost:3000"
    )


def cors_headers(
    allowed_origins: tuple[str, ...],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal that adds the headers to every response to an allowed origin, errors and streams included."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if ANY_ORIGIN not in allowed_origins:
            response.headers["Vary"] = (
                "Origin"  # also without one: a cache must not hand it to another's page
            )
        origin = request.headers.get("Origin")
        if origin is None:
            return
        if ANY_ORIGIN in allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
        elif origin in allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = origin
        else:
            return
        response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID_HEADER}, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", "Authorization, Content-Type"
            )
            response.headers["Access-Control-Max-Age"] = "600"

    return add
