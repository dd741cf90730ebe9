"""`POST /debug/profile`: a trace of what the engine does for some seconds or steps, into the server's own folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve.server.app import Server, read_body
from jaxserve.server.errors import ApiError, shutting_down
from jaxserve.server.openapi import Operation
from jaxserve.server.protocol import decode

MAX_SECONDS = 60.0
MAX_STEPS = 1_000
MAX_TRACES = 100  # in the folder; a trace may have a hundred megabytes
_POLL_SECONDS = 0.01


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    """How long: one of the two, whatever ends first of both; 2 seconds if neither is given."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] | None = None
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] | None = None


class Profiled(msgspec.Struct):
    """Attributes:
    trace: name of the new folder within the server's.
    seconds, steps: that it covers.
    """

    trace: str
    seconds: float
    steps: int


class Profiler(Protocol):
    """What makes traces; raises OSError or RuntimeError where it can't."""

    def start(self, folder: Path) -> None:
        """Begin one, whose files come into `folder`."""

    def stop(self) -> None:
        """End it, and write it."""


class ProfileApi:
    """An extension of the server.

    Args:
      folder: traces come into folders in it. What they are called is not the client's to say.
      profiler: makes them.

    Raises:
      ConfigError: the folder can't be made.
    """

    operations: tuple[Operation, ...] = (
        Operation("post", "/debug/profile", "Record a trace.", ProfileBody, Profiled, errors=(400, 409, 503)),
    )

    def __init__(self, folder: Path, profiler: Profiler) -> None:
        self._folder = folder
        self._profiler = profiler
        self._running: asyncio.Task[Profiled] | None = None
        self._ending = asyncio.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile {folder}: can't be made: {error.strerror}") from None

    def attach(self, app: web.Application, server: Server) -> None:
        """Add the route."""
        self._server = server
        self._stats = server.engine.stats
        app.router.add_post("/debug/profile", self.profile)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """End a trace that is under way, and write it."""
        self._ending.set()
        if self._running is not None:
            await asyncio.wait([self._running])

    def close(self) -> None: ...

    async def profile(self, request: web.Request) -> web.StreamResponse:
        """`POST /debug/profile`: answers when the trace is written. It goes on when the client leaves."""
        if self._server.is_draining:
            raise shutting_down()
        data = await read_body(request, self._server.max_body_bytes)
        body = decode(data or b"{}", ProfileBody)
        if self._running is not None and not self._running.done():
            raise ApiError(409, "a trace is being recorded; one at a time", code="profile_under_way")
        if await asyncio.to_thread(self._num_traces) >= MAX_TRACES:
            raise ApiError(
                409, f"there are {MAX_TRACES} traces; remove some first", code="profile_folder_full"
            )
        if self._running is not None and not self._running.done():  # somebody else came meanwhile
            raise ApiError(409, "a trace is being recorded; one at a time", code="profile_under_way")
        self._running = asyncio.get_running_loop().create_task(self._record(body))
        done = await asyncio.shield(self._running)
        return web.Response(body=msgspec.json.encode(done), content_type="application/json")

    def _num_traces(self) -> int:
        """Makes the folder again where somebody has removed it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return len(list(self._folder.iterdir()))
        except OSError as error:
            raise _not_recorded(error) from None

    async def _record(self, body: ProfileBody) -> Profiled:
        name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        longest = MAX_SECONDS if body.seconds is None else body.seconds
        if body.seconds is None and body.steps is None:
            longest = 2.0
        await self._call(self._profiler.start, self._folder / name)
        try:
            begun, first = time.monotonic(), self._stats.steps
            while time.monotonic() - begun < longest and not self._ending.is_set():
                if body.steps is not None and self._stats.steps - first >= body.steps:
                    break
                left = longest - (time.monotonic() - begun)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), max(0.0, min(_POLL_SECONDS, left)))
            seconds, steps = time.monotonic() - begun, self._stats.steps - first
        finally:
            await self._call(self._profiler.stop)
        return Profiled(name, round(seconds, 6), steps)

    async def _call(self, work: Callable[..., None], *arguments: Path) -> None:
        try:
            await asyncio.to_thread(work, *arguments)
        except (OSError, RuntimeError) as error:
            raise _not_recorded(error) from None


def _not_recorded(error: Exception) -> ApiError:
    """Of a folder that is none any more, a full disk, or a trace begun elsewhere in the process."""
    return ApiError(500, f"the trace can't be recorded: {error}", type="server_error", code="profile_failed")
