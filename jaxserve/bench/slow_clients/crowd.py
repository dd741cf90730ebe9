"""Clients that behave badly, in a process of their own: `python -m jaxserve.bench.slow_clients.crowd ...`.

Prints "ready" once all have been answered with a status, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import Callable
from enum import StrEnum
from urllib.parse import urlsplit

_RECEIVE_BUFFER_BYTES = 4096  # so that what a client does not read stays with the server
_LEAVES_WITHIN_S = (
    20.0  # or a thousand clients would be a thousand requests a second, which is another question
)


class Manner(StrEnum):
    """How a client behaves; each asks again when it is through."""

    READING = "reading"  # as it should
    SILENT = "silent"  # reads the status line, and then nothing any more
    VANISHING = "vanishing"  # closes within 20 s, every second time with a reset


async def crowd(url: str, body: bytes, count: int, manner: Manner, ready: Callable[[], None]) -> None:
    """Until it is cancelled."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    place = (parts.hostname, parts.port or 80)
    missing = count

    def answered() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            ready()

    async def client(seed: int) -> None:
        rng, first = random.Random(seed), True
        while True:
            await _ask(place, body, manner, rng, answered if first else None)
            first = False

    await asyncio.gather(*(client(seed) for seed in range(count)))


async def _ask(
    place: tuple[str, int],
    body: bytes,
    manner: Manner,
    rng: random.Random,
    answered: Callable[[], None] | None,
) -> None:
    """One request. `answered`: told that its answer has begun, which is waited for then, also by who goes away."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        await loop.sock_connect(sock, place)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {place[0]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await loop.sock_sendall(sock, head.encode() + body)
        if answered is not None or manner is not Manner.VANISHING:
            if not await loop.sock_recv(sock, 64):
                raise ConnectionError("the server closed the connection")
            if answered is not None:
                answered()
        if manner is Manner.VANISHING:
            await asyncio.sleep(rng.uniform(0, _LEAVES_WITHIN_S))
            if rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if manner is Manner.SILENT:
            await asyncio.Event().wait()
        while await loop.sock_recv(sock, 65536):
            pass


async def _main(url: str, body: bytes, count: int, manner: Manner) -> None:
    work = asyncio.ensure_future(crowd(url, body, count, manner, lambda: print("ready", flush=True)))
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()  # it never ends by itself: this raises what went wrong
    work.cancel()


if __name__ == "__main__":
    asyncio.run(
        _main(
            sys.argv[1], json.dumps(json.loads(sys.argv[2])).encode(), int(sys.argv[3]), Manner(sys.argv[4])
        )
    )
