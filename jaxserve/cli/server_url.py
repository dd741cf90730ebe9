"""Asking a running server, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.server_url import parse_server_url

BROKEN = (OSError, ValueError, http.client.HTTPException)  # what reading an answer may end with


def server_base(url: str) -> str:
    """See `parse_server_url`, for `open_url`.

    Raises:
      ConfigError: it is none, or names a user, which urllib would take for a part of the host.
    """
    base = parse_server_url(url)
    if urllib.parse.urlsplit(base).username is not None:
        raise ConfigError(f"{url!r} names a user: http://HOST:PORT")
    return base


def open_url(url: str, api_key: str | None, *, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    """The response; with `body`, as JSON, to a POST. Use it as a context manager.

    Raises:
      InvalidRequestError: the server refuses the body.
      ConfigError: nobody answers there, or with an error.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        return _opener(url).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        message = _error_message(error)
        if error.code in (400, 413, 422):
            raise InvalidRequestError(message) from None
        hint = "; give the server's key with --api-key" if error.code in (401, 403) else ""
        raise ConfigError(f"{url}: {message} (HTTP {error.code}){hint}") from None
    except http.client.BadStatusLine as error:
        if isinstance(error, OSError):
            raise ConfigError(f"{url}: no answer: {error}") from None
        raise ConfigError(f"{url}: what answers there does not speak HTTP") from None
    except BROKEN as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{url}: no answer: {reason}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Proxies from the environment apply, except on the way to this very machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
