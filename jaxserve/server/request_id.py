"""`X-Request-Id`: which request an answer, an error or a line of the log is about."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from aiohttp import web

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_REQUEST_ID_HEADER = "Request-Id"  # the same, where Anthropic's clients look for it
REQUEST_ID = web.RequestKey("request_id", str)

# Nothing that means anything in a header, a log, a URL, a file name or JSON.
_HARMLESS = re.compile(r"[A-Za-z0-9._:+=@-]{1,128}", re.ASCII)


def choose_request_id(headers: Mapping[str, str]) -> str:
    """The one that the client sent, if it is harmless, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client which one it was; a signal of aiohttp's, so it covers errors and streams as well."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
        response.headers[ANTHROPIC_REQUEST_ID_HEADER] = request_id
