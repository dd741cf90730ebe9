"""Server-sent events: sending an answer while it is being made."""

from __future__ import annotations

import logging
import socket
from typing import Any, Protocol

import msgspec
from aiohttp import web

from jaxserve.errors import JaxserveError
from jaxserve.outputs import RequestOutput
from jaxserve.server.async_engine import OutputStream
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.request_id import REQUEST_ID
from jaxserve.server.request_record import RECORD

logger = logging.getLogger(__name__)

# Bytes that may wait in this process for one client's socket before its handler pauses. What the handler has not
# taken yet stays in its mailbox as deltas.
WRITE_BUFFER_BYTES = 32 * 1024
# The same for the kernel's side of the socket, which would otherwise grow to megabytes a client.
SEND_BUFFER_BYTES = 128 * 1024
# A peer that acknowledges nothing for so long (its machine is gone, or it has stopped reading) is cut off.
DEAD_PEER_SECONDS = 120

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventSource(Protocol):
    """How an endpoint words a streamed answer. Everything is events as they go over the wire, or nothing."""

    def events(self, output: RequestOutput) -> bytes:
        """Raises: ApiError: the engine could not finish a choice."""

    def end(self) -> bytes:
        """After the last output of a whole answer."""

    def failure(self, error: ApiError) -> bytes:
        """In the place of all that would have come."""


async def send_stream(request: web.Request, source: EventSource, outputs: OutputStream) -> web.StreamResponse:
    """Answer `request` with the events of `outputs`.

    One that can't be finished ends with an event that says so, and without the endpoint's own end, so that nobody
    takes it for whole. A client that goes away ends the coroutine (it is cancelled, or a write raises); the caller
    closes `outputs`, which aborts the request.
    """
    response = web.StreamResponse(headers=HEADERS)
    bound_buffers(request)
    await response.prepare(request)
    try:
        while news := await outputs.next():
            events = b"".join([source.events(output) for output in news])
            if events:
                await response.write(events)
    except (ApiError, JaxserveError) as error:
        await response.write(_failure(request, source, error))
    except OSError:
        raise  # the client is gone
    except Exception as error:
        logger.exception("a stream of %r failed (request %s)", request.path, request[REQUEST_ID])
        await response.write(_failure(request, source, error))
    else:
        last = source.end()
        if last:
            await response.write(last)
    await response.write_eof()
    return response


def _failure(request: web.Request, source: EventSource, error: Exception) -> bytes:
    told = to_api_error(error)
    request[RECORD].error = told.code or told.type
    return source.failure(told)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event, with a name where the endpoint has any."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def bound_buffers(request: web.Request) -> None:
    """Let little wait for a client that does not read, in this process and in the kernel."""
    transport = request.transport
    if transport is None:
        return
    transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, DEAD_PEER_SECONDS * 1000)
