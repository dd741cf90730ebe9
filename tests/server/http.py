"""The little of an HTTP client that tests need: raw bodies, raw event streams, raw sockets."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body.decode("utf-8"))

    @property
    def error(self) -> dict[str, Any]:
        """The error object; checks that it has the OpenAI shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"]
        assert "Traceback" not in error["message"]
        return error


def request(
    base_url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
) -> Reply:
    """`body`: bytes go as they are, anything else as JSON."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def post(base_url: str, path: str, body: Any, **kwargs: Any) -> Reply:
    return request(base_url, "POST", path, body, **kwargs)


def events(raw: bytes) -> list[Any]:
    """The events of a complete stream: `[DONE]` is required once, at the end, and stripped."""
    assert raw.endswith(b"\n\n"), raw[-80:]
    parts = raw.split(b"\n\n")[:-1]
    for part in parts:
        assert part.startswith(b"data: "), part
        assert b"\n" not in part, part
    assert parts[-1] == b"data: [DONE]"
    assert parts.count(b"data: [DONE]") == 1
    return [json.loads(part[6:].decode("utf-8")) for part in parts[:-1]]


def named_events(raw: bytes) -> list[tuple[str, Any]]:
    """The events of a stream in which each has a name."""
    assert raw.endswith(b"\n\n"), raw[-80:]
    result = []
    for part in raw.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        assert name.startswith(b"event: ")
        assert data.startswith(b"data: ")
        result.append((name[7:].decode(), json.loads(data[6:].decode("utf-8"))))
    return result


def stream(base_url: str, path: str, body: dict[str, Any], **kwargs: Any) -> list[Any]:
    """The chunks of a streamed answer."""
    reply = post(base_url, path, {**body, "stream": True}, **kwargs)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.body)


def timed_stream(base_url: str, path: str, body: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """As `stream`, and when each piece of it came (`time.monotonic()`)."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        data = json.dumps({**body, "stream": True})
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        times, raw = [], b""
        while piece := response.read1(65536):
            times.append(time.monotonic())
            raw += piece
        return times, events(raw)
    finally:
        connection.close()


def open_socket(
    base_url: str, path: str, body: dict[str, Any], *, receive_buffer: int | None = None
) -> socket.socket:
    """A connection on which the request has been sent and nothing been read."""
    parts = urlsplit(base_url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(30)
    sock.connect((parts.hostname, parts.port))
    data = json.dumps(body).encode()
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return sock


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
