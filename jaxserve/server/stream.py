"""Server-sent events: sending an answer while it is being made."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from jaxserve.errors import JaxserveError
from jaxserve.server.async_engine import OutputStream
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.errors import ApiError, error_body, to_api_error
from jaxserve.server.responses import ChunkBuilder

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
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


async def send_stream(
    request: web.Request, prepared: PreparedRequest, outputs: OutputStream, tokenizer: Tokenizer
) -> web.StreamResponse:
    """Answer `request` with the events of `outputs`.

    A whole answer ends with `[DONE]`. One that can't be finished ends with an `{"error": ...}` event and without
    `[DONE]`, so that nobody takes it for whole. A client that goes away ends the coroutine (it is cancelled, or a
    write raises); the caller closes `outputs`, which aborts the request.
    """
    response = web.StreamResponse(headers=HEADERS)
    _bound_buffers(request)
    await response.prepare(request)
    builder = ChunkBuilder(prepared, tokenizer)
    try:
        while news := await outputs.next():
            events = [event(chunk) for output in news for chunk in builder.chunks(output)]
            if events:
                await response.write(b"".join(events))
    except (ApiError, JaxserveError) as error:
        await response.write(b"data: " + error_body(to_api_error(error)) + b"\n\n")
    except OSError:
        raise  # the client is gone
    except Exception as error:
        logger.exception("a stream failed")
        await response.write(b"data: " + error_body(to_api_error(error)) + b"\n\n")
    else:
        last = event(builder.usage_chunk()) if prepared.include_usage else b""
        await response.write(last + DONE)
    await response.write_eof()
    return response


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _bound_buffers(request: web.Request) -> None:
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
