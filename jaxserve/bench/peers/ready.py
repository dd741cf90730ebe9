"""Waiting until a server answers, and finding out what it calls its model and itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.peers.client import completion_body
from jaxserve.bench.peers.process import Running
from jaxserve.errors import JaxserveError
from jaxserve.workload.traced_request import TracedRequest

_POLL_S = 0.05
_STILL_LOADING = (404, 429, 503)  # so some servers answer while they load


class NotReadyError(JaxserveError):
    """The peer ended, said no, or took too long, before it had answered anything."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself.

    Attributes:
      model: the first of `/v1/models`.
      version: of `/version`, else the `system_fingerprint` of an answer, else "".
    """

    model: str
    version: str


def wait_until_ready(
    server: Running, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Identity:
    """Return once the server has answered a completion of one token.

    Args:
      headers: of every request.

    Raises:
      NotReadyError: one line that says what came instead.
    """
    return asyncio.run(_wait(server, time.monotonic() + timeout_s, timeout_s, headers))


async def _wait(
    server: Running, deadline: float, timeout_s: float, headers: Mapping[str, str] | None
) -> Identity:
    seen = ""
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            code = server.exit_code()
            if code is not None:
                raise NotReadyError(
                    f"ended with exit code {code}: {server.last_words() or 'it printed nothing'}"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                words = server.last_words()
                raise NotReadyError(
                    f"not ready after {timeout_s:g} s ({seen or 'nothing was tried'})"
                    + (f"; its log ends: {words}" if words else "")
                )
            try:
                async with asyncio.timeout(left):
                    return await _ask(session, server.url)
            except TimeoutError:  # our own patience ended: what the server said before tells more
                seen = seen or "it took the connection and did not answer"
            except (aiohttp.ClientError, _NotYet) as error:
                seen = " ".join(str(error).split()) or type(error).__name__
            await asyncio.sleep(_POLL_S)


class _NotYet(Exception):
    """An answer that a loading server may give."""


async def _ask(session: aiohttp.ClientSession, url: str) -> Identity:
    listed = await _json(session, "GET", f"{url}/v1/models")
    try:
        model = listed["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise NotReadyError(f"{url}/v1/models names no model") from None
    body = {**completion_body(model, TracedRequest((1, 2, 3), 1)), "stream": False}
    del body["stream_options"]
    answer = await _json(session, "POST", f"{url}/v1/completions", body)
    return Identity(str(model), await _version(session, url) or str(answer.get("system_fingerprint") or ""))


async def _json(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    async with session.request(method, url, json=body) as response:
        text = await response.text(errors="replace")
        if response.status in _STILL_LOADING:
            raise _NotYet(f"HTTP {response.status}")
        if response.status != 200:
            raise NotReadyError(f"{url}: HTTP {response.status}: {' '.join(text.split())[:300]}")
        try:
            value = json.loads(text)
        except ValueError:
            raise NotReadyError(f"{url}: not the answer of an OpenAI-compatible server") from None
        if not isinstance(value, dict):
            raise NotReadyError(f"{url}: not the answer of an OpenAI-compatible server")
        return value


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    """Not part of the OpenAI API, so a server may not have it."""
    async with session.get(f"{url}/version") as response:
        if response.status != 200:
            return ""
        try:
            return str(json.loads(await response.text(errors="replace"))["version"])
        except (ValueError, KeyError, TypeError):
            return ""
