"""A client's connection, where what arrives is no HTTP, or has headers beyond the limits: also that gets JSON."""

from __future__ import annotations

import http
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from jaxserve.server.errors import ApiError, error_body

MAX_HEADER_BYTES = 8190  # of the request line, and of each header
MAX_HEADERS = 128


class JsonAppRunner(web.AppRunner):
    """An AppRunner whose connections answer with OpenAI-shaped errors before there is a request to route."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _JsonServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _JsonServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _JsonConnection(self, loop=self._loop, **self._kwargs)


class _JsonConnection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's answer and its line in the log, with a body of ours."""
        response = cast(web.Response, super().handle_error(request, status, exc, message))
        response.body = error_body(_error(status, exc))
        response.content_type = "application/json"
        return response


def _error(status: int, exc: BaseException | None) -> ApiError:
    if status >= 500:
        return ApiError(status, "internal server error", type="server_error", code="internal_error")
    if isinstance(exc, LineTooLong) or "headers" in str(exc):
        return ApiError(
            status,
            f"the request line and each header may have {MAX_HEADER_BYTES} bytes; there may be {MAX_HEADERS} headers",
            code="headers_too_large",
        )
    return ApiError(
        status,
        f"this is not an HTTP request: {http.HTTPStatus(status).phrase.lower()}",
        code="invalid_http",
    )
