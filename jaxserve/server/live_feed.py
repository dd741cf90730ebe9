"""`GET /debug/engine/stream`: how the engine stands, several times a second, to everybody who watches.

Nothing is made while nobody watches. While somebody does, one view at a time is asked of the engine's thread, which
makes it between two steps; it is encoded once for all. A watcher takes the newest when his socket has room: one who is
slow misses some, and nothing is kept for him.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from jaxserve.engine_view import EngineView
from jaxserve.errors import EngineDeadError
from jaxserve.server.errors import ApiError, shutting_down
from jaxserve.server.openapi import Operation
from jaxserve.server.stream import HEADERS, bound_buffers

if TYPE_CHECKING:
    from jaxserve.server.app import Server

MIN_INTERVAL_SECONDS = 0.1
# Views take the engine's thread at most this share of its time, however large the pool is.
MAX_ENGINE_SHARE = 0.01
MAX_WATCHERS = 64
# A sign of life where nothing changes: proxies keep the connection, and a peer that is gone is noticed.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": nothing has changed\n\n"
RETRY_SECONDS = 5.0


class LiveUpdate(msgspec.Struct, frozen=True):
    """One event.

    Attributes:
      time: seconds, of a clock that only the differences of mean something.
      engine: how it stands.
    """

    time: float
    engine: EngineView


class LiveFeed:
    """A part of the server. All of it belongs to the event loop."""

    operations: tuple[Operation, ...] = (
        Operation(
            "get",
            "/debug/engine/stream",
            "How the engine stands, several times a second.",
            content_type="text/event-stream",
            errors=(429, 503),
        ),
    )

    def __init__(self) -> None:
        self._num_watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._newest: LiveUpdate | None = None
        self._event = b""
        self._changed = asyncio.Event()
        self._is_ended = False

    @property
    def num_watchers(self) -> int:
        return self._num_watchers

    def attach(self, app: web.Application, server: Server) -> None:
        """Add the route."""
        self._server = server
        app.router.add_get("/debug/engine/stream", self.stream)

    async def start(self) -> None:
        """Nothing: the first watcher starts it."""

    async def stop(self) -> None:
        """End the streams: a server that drains waits for nobody who only watches."""
        self._is_ended = True
        self._wake()

    def close(self) -> None:
        """Nothing is left to close."""

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """`GET /debug/engine/stream`."""
        if self._is_ended or self._server.is_draining:
            raise shutting_down()
        if not self._server.engine.is_alive:
            raise EngineDeadError("the engine has stopped")
        if self._num_watchers >= MAX_WATCHERS:
            raise ApiError(
                429,
                f"{MAX_WATCHERS} watch already",
                type="server_overloaded",
                code="too_many_watchers",
                retry_after_seconds=RETRY_SECONDS,
            )
        response = web.StreamResponse(headers=HEADERS)
        with self._watching():
            bound_buffers(request)
            await response.prepare(request)
            seen = b""
            while (event := await self._next(seen)) is not None:
                await response.write(event)
                seen = seen if event is KEEP_ALIVE else event
        await response.write_eof()
        return response

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._num_watchers += 1
        if self._looking is None:
            self._server.engine.watch(True)
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._looking is not None:
                self._looking.cancel()
                self._looking = None
                self._newest, self._event = None, b""
                self._server.engine.watch(False)

    async def _next(self, seen: bytes) -> bytes | None:
        """The newest event, once it is another than `seen`; a sign of life meanwhile; None: there will be no more."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                while (not self._event or self._event is seen) and not self._is_over:
                    await self._changed.wait()
        except TimeoutError:
            return KEEP_ALIVE
        return None if self._is_over else self._event

    @property
    def _is_over(self) -> bool:
        return self._is_ended or not self._server.engine.is_alive

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self) -> None:
        """Ask for one view after the other, until nobody watches."""
        loop = asyncio.get_running_loop()
        while True:
            answered: asyncio.Future[tuple[EngineView, float]] = loop.create_future()
            self._server.engine.look(partial(_answer, answered))
            while not answered.done():  # a step may take long, and a dead engine never answers
                await asyncio.wait([answered], timeout=1.0)
                if self._is_over:
                    self._wake()
                    return
            view, seconds = answered.result()
            self._publish(view)
            await asyncio.sleep(max(MIN_INTERVAL_SECONDS, seconds / MAX_ENGINE_SHARE))

    def _publish(self, view: EngineView) -> None:
        update = LiveUpdate(time=time.monotonic(), engine=view)
        if (
            self._newest is not None
            and msgspec.structs.replace(update, time=self._newest.time) == self._newest
        ):
            return
        self._newest = update
        self._event = b"data: " + msgspec.json.encode(update) + b"\n\n"
        self._wake()


def _answer(to: asyncio.Future[tuple[EngineView, float]], view: EngineView, seconds: float) -> None:
    if not to.done():  # whoever asked may be gone
        to.set_result((view, seconds))
